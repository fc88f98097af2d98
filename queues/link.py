"""One asyncio client's way to the server: commands, blocking reads, and what happens when neither answers."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import redis
import redis.asyncio

from queues.config import QueueConfig
from queues.connection import CURABLE, check_server, connect_async, connect_reader, translate
from queues.outage import Outage
from queues.permissions import CHECK, COMMANDS, check_permissions
from queues.pipe import Argument, exchange

T = TypeVar("T")


def _is_group_gone(error: Exception) -> bool:
    return any(word in str(error) for word in ("NOGROUP", "UNBLOCKED"))


async def _cancellable(action: Callable[[], Awaitable[T]]) -> T:
    """What `action` answers, and a cancellation that came meanwhile, always.

    why: redis-py sends under `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that comes
    just as the sending ends; a task that loops around us would then never end.
    """
    task = asyncio.current_task()
    assert task is not None
    num_before = task.cancelling()
    try:
        return await action()
    finally:
        if task.cancelling() > num_before:
            raise asyncio.CancelledError


class Link:
    """Two connections, one for commands and one for blocking reads, with one `outage` between them.

    A lost consumer group (the server was restarted empty) is made again, from id 0 so that no job is missed.
    """

    def __init__(self, url: str, config: QueueConfig) -> None:
        self.config = config
        self.outage = Outage(url)
        self.commands = connect_async(url, config)
        self.reads = connect_reader(url, config)
        self._url = url
        self._reading: Any = None
        self._scripts: dict[str, Any] = {}

    async def open(self) -> None:
        """Check the server's version and make the group; raises `QueueUnavailable` or a `ServerError`."""
        try:
            check_server(await self.commands.info("everything"), self._url)
            check = self.commands.register_script(CHECK)
            check_permissions(await check([], [self.config.stream, *COMMANDS]), self._url)
            await self._make_group()
        except (redis.RedisError, OSError) as error:
            raise translate(error, self._url) from error

    async def close(self) -> None:
        """Close both connections."""
        await self.reads.aclose()
        await self.commands.aclose()

    async def run(self, script: str, consumer: str, *arguments: Argument) -> Any:
        """The answer of a script of `queues.scripts`; errors as in `ask`."""
        call = self._script(script)
        return await self.ask(lambda: call(self.config.keys, [self.config.group, consumer, *arguments]))

    async def ask(self, action: Callable[[], Awaitable[T]]) -> T | None:
        """What `action` answers, or None when the group was gone (it is there again now).

        Raises `QueueUnavailable` when the server cannot be reached or is busy, another `QueueError` for its
        refusal.
        """
        try:
            answer = await _cancellable(action)
        except (redis.RedisError, OSError) as error:
            self.outage.bad(error)
            if not _is_group_gone(error):
                raise translate(error, self._url) from error
            await self._make_group_again()
            return None
        self.outage.good()
        return answer

    async def run_and_get(
        self,
        script: str,
        consumer: str,
        key: str,
        *arguments: Argument,
        told: tuple[str, bytes | str, int] | None = None,
    ) -> tuple[Any, bytes | None] | None:
        """The answer of a script that gets `key` as its first argument, and what it left there, which goes.

        With `told`, a stream, an id and a number of ms, it runs once the stream has more than that, or the
        time is over. Errors as in `ask`. If nobody reads the answer any more, the script may have run anyway.

        why: all is sent at once and the server holds back what stands behind a read that waits, so that what
        comes is answered without another round trip.
        """
        call, keys = self._script(script), self.config.keys
        sent = [("EVALSHA", call.sha, len(keys), *keys, self.config.group, consumer, key, *arguments)]
        sent.append(("GETDEL", key))
        waits = [("XREAD", "BLOCK", told[2], "STREAMS", *told[:2])] if told else []

        async def run() -> tuple[Any, bytes | None]:
            try:
                answers = await (self._wait_for([*waits, *sent]) if told else self._together(sent))
            except redis.exceptions.NoScriptError:
                await self.commands.script_load(script)
                answers = await self._together(sent)
            return answers[-2], answers[-1]

        return await self.ask(run)

    async def _together(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        pool = self.commands.connection_pool
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            return await exchange(connection, commands, self.config.command_timeout_s)
        finally:
            await pool.release(connection)

    async def _wait_for(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """The same on the connection for blocking reads; one at a time.

        why: it goes back to the pool, which looks whether it still lives, before the next read: who waits for
        what comes does not wait for that.
        """
        pool = self.reads.connection_pool
        held, self._reading = self._reading, None
        if held:
            await pool.release(held)
        self._reading = await pool.get_connection()  # type: ignore[no-untyped-call]
        return await exchange(self._reading, commands, self.config.max_block_s + self.config.read_margin_s)

    def _script(self, script: str) -> Any:
        call = self._scripts.get(script) or self.commands.register_script(script)
        self._scripts[script] = call
        return call

    async def poll(self, attempt: Callable[[float], Awaitable[list[T]]], block_ms: float) -> list[T]:
        """Call `attempt(seconds left)` until it yields something or `block_ms` are over.

        An outage, or a refusal that its operator may end, yields nothing; the pauses between tries grow to
        seconds.
        """
        deadline = time.monotonic() + block_ms / 1000
        while True:
            await asyncio.sleep(min(self.outage.delay_s, max(0.0, deadline - time.monotonic())))
            found: list[T] = []
            if not self.outage.delay_s:
                try:
                    found = await attempt(max(0.0, deadline - time.monotonic()))
                except CURABLE:
                    continue
            if found or time.monotonic() >= deadline:
                return found

    async def insist(self, action: Callable[[], Awaitable[T]]) -> T:
        """Repeat `action` through an outage of up to `outage_patience_s`, then raise what it was."""
        deadline = time.monotonic() + self.config.outage_patience_s
        while True:
            try:
                return await action()
            except CURABLE:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(self.outage.delay_s)

    async def _make_group_again(self) -> None:
        try:
            await _cancellable(self._make_group)
        except (redis.RedisError, OSError) as error:
            raise translate(error, self._url) from error

    async def _make_group(self) -> None:
        try:
            await self.commands.xgroup_create(self.config.stream, self.config.group, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
