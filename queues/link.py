"""One asyncio client's way to the server: commands, blocking reads, and what happens when neither answers."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis

from queues.config import QueueConfig
from queues.connection import check_server, connect_async, connect_reader, translate
from queues.errors import QueueUnavailable
from queues.outage import Outage

T = TypeVar("T")
Argument = str | bytes | int | float


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
        self._scripts: dict[str, Any] = {}

    async def open(self) -> None:
        """Check the server's version and make the group; raises `QueueUnavailable` or a `ServerError`."""
        try:
            check_server(await self.commands.info("everything"), self._url)
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

        Raises `QueueUnavailable` when the server cannot be reached, another `QueueError` for its refusal.
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

    async def run_when_told(
        self,
        stream: str,
        last_id: bytes | str,
        block_ms: int,
        script: str,
        consumer: str,
        *arguments: Argument,
    ) -> Any:
        """The answer of a script that runs once `stream` has more than `last_id`, or `block_ms` are over.

        Errors as in `ask`. If nobody reads the answer any more, the script may have run all the same.

        why: both are sent at once and the server holds the second back until the first is through, so that
        what comes is answered without another round trip.
        """
        call, keys, own = self._script(script), self.config.keys, [self.config.group, consumer, *arguments]
        told = ("XREAD", "BLOCK", block_ms, "STREAMS", stream, last_id)

        async def run() -> Any:
            try:
                return await self._both(told, ("EVALSHA", call.sha, len(keys), *keys, *own))
            except redis.exceptions.NoScriptError:
                return await call(keys, own)

        return await self.ask(run)

    async def _both(self, first: tuple[Argument, ...], second: tuple[Argument, ...]) -> Any:
        """The answer to the second of two commands that are sent at once."""
        pool = self.reads.connection_pool
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.send_packed_command(connection.pack_commands([first, second]))
            await connection.read_response()
            return await connection.read_response()
        except redis.ResponseError:
            # invariant: no answer is left behind for who comes next.
            await connection.disconnect(nowait=True)
            raise
        finally:
            await pool.release(connection)

    def _script(self, script: str) -> Any:
        call = self._scripts.get(script) or self.commands.register_script(script)
        self._scripts[script] = call
        return call

    async def poll(self, attempt: Callable[[float], Awaitable[list[T]]], block_ms: float) -> list[T]:
        """Call `attempt(seconds left)` until it yields something or `block_ms` are over.

        An outage yields nothing; the pauses between tries grow to seconds.
        """
        deadline = time.monotonic() + block_ms / 1000
        while True:
            await asyncio.sleep(min(self.outage.delay_s, max(0.0, deadline - time.monotonic())))
            found: list[T] = []
            if not self.outage.delay_s:
                try:
                    found = await attempt(max(0.0, deadline - time.monotonic()))
                except QueueUnavailable:
                    continue
            if found or time.monotonic() >= deadline:
                return found

    async def insist(self, action: Callable[[], Awaitable[T]]) -> T:
        """Repeat `action` through an outage of up to `outage_patience_s`, then raise `QueueUnavailable`."""
        deadline = time.monotonic() + self.config.outage_patience_s
        while True:
            try:
                return await action()
            except QueueUnavailable:
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
