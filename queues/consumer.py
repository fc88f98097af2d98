"""The worker's side: take jobs, keep their leases, finish or fail each."""

import asyncio
import itertools
import os
import socket
import time
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Self

from queues import scripts, upkeep
from queues.config import QueueConfig
from queues.errors import QueueError
from queues.link import Link
from queues.outage import Outage
from queues.pipe import Argument
from queues.status import parse_status
from queues.types import Delivery, Job, QueueStatus

_CLAIM_EVERY_S = 1.0
_KEEP_EVERY_S = 5.0
_GONE_AFTER_MS = 24 * 3600 * 1000


def _new_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _delivery(
    entry_id: bytes,
    flat: list[bytes],
    body: bytes,
    times_delivered: int,
    now_ms: int,
    waited_ms: float | None = None,
) -> Delivery:
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    expires_at = fields[b"expires_at"]
    job = Job(
        job_id=_text(fields[b"job_id"]),
        key=_text(fields[b"key"]),
        body=body,
        created_at=float(fields[b"created_at"]),
        expires_at=float(expires_at) if expires_at else None,
        slot=_text(fields.get(b"slot", b"")) or None,
        permit=_text(fields.get(b"permit", b"")),
    )
    queue_ms = max(0.0, now_ms - int(entry_id.partition(b"-")[0]))
    waited_ms = queue_ms if waited_ms is None else waited_ms
    num_replaced = int(fields.get(b"num_replaced", 0))
    return Delivery(job, entry_id.decode(), times_delivered, queue_ms, waited_ms, num_replaced)


def _text(found: bytes) -> str:
    """What others may have added in another encoding stops nobody."""
    return found.decode(errors="replace")


def _present(rows: list[Any], bodies: list[bytes | None]) -> list[tuple[Any, bytes]]:
    return [(row, body) for row, body in zip(rows, bodies, strict=False) if body is not None]


def _waits(flat: list[Any]) -> list[tuple[str, float]]:
    return [(_text(key), ms / 1000) for key, ms in zip(flat[::2], flat[1::2], strict=True)]


async def forget_queue(url: str, config: QueueConfig) -> None:
    """Delete a queue that nobody uses any more, with all that waits in it; raises `QueueUnavailable`."""
    link = Link(url, config)
    try:
        await link.run(upkeep.FORGET, "")
    finally:
        await link.close()


class JobConsumer:
    """One worker of the group. `async with JobConsumer(url) as consumer`, or `start` and `close`.

    Between `take` and `finish`/`fail` a task renews the leases of the jobs in hand, so a slow job stays here,
    and only the jobs of a worker that died, hung or lost its way go to another one.
    """

    def __init__(self, url: str, config: QueueConfig | None = None, name: str | None = None) -> None:
        self.config = config or QueueConfig()
        self.name = name or _new_name()
        self._link = Link(url, self.config)
        self._held: dict[str, tuple[Delivery, float]] = {}
        self._cursor = "0-0"
        self._next_claim = 0.0
        self._newest: bytes | str = "0-0"
        self._hands, self._numbers = uuid.uuid4().hex, itertools.count()
        self.waits_s: Mapping[str, float] = {}
        self.expired_s: list[tuple[str, float]] = []
        self._keeper: asyncio.Task[None] | None = None

    @property
    def outage(self) -> Outage:
        """The connection's health."""
        return self._link.outage

    @property
    def is_healthy(self) -> bool:
        """Whether the server answered lately: within two periods of this worker's own poll."""
        return self.outage.silent_s < 2 * self._keep_every_s + self.config.command_timeout_s

    async def start(self) -> None:
        """Connect; raises `QueueUnavailable`, `ServerTooOld` or another `ServerError`."""
        await self._link.open()
        await self._link.run(upkeep.SWEEP, self.name, _GONE_AFTER_MS)
        self._keeper = asyncio.create_task(self._keep(), name=f"queue-leases-{self.name}")

    async def take(
        self, max_jobs: int, block_ms: float = 1000, *, hold: Collection[str] = ()
    ) -> list[Delivery]:
        """Up to `max_jobs` jobs, waiting up to `block_ms` for the first; jobs of dead workers come first.

        Keys take turns, the oldest job of each; those of `hold` are passed over and their jobs wait.
        `waits_s` is then how long the keys that still have jobs wait for their turn, and
        `expired_s` how long jobs (by key) had waited in vain.

        Never raises for an outage: it returns nothing and `is_healthy` turns False. If the call is cancelled,
        jobs that were on their way come again after `visibility_s`.
        """

        self.waits_s, self.expired_s = {}, []

        async def attempt(left_s: float) -> list[Delivery]:
            return await self._claim(max_jobs) or await self._take(max_jobs, hold, left_s)

        return await self._link.poll(attempt, block_ms)

    async def finish(self, delivery: Delivery, result: bytes) -> bool:
        """Store the result and acknowledge the job in one step; False when the job has a result already.

        Waits through an outage of up to `outage_patience_s`, then raises a `QueueError`; may be repeated.
        """
        job, config = delivery.job, self.config
        answer = await self._settle(
            scripts.FINISH,
            delivery,
            job.job_id,
            job.key,
            f"{self.name}:{delivery.entry_id}",
            result,
            _milliseconds(config.dedup_ttl_s),
            config.result_max_len,
        )
        return bool(answer == 1)

    async def fail(self, delivery: Delivery, error: str) -> bool:
        """Give a job up: True when it will be delivered again, False when it went to the dead letters.

        The pause before the next delivery doubles each time. False too when another worker has it by now.
        """
        config, times = self.config, delivery.times_delivered
        pause_s = min(config.retry_delay_s * 2.0 ** (times - 1), config.visibility_s)
        answer = await self._settle(
            scripts.FAIL,
            delivery,
            times,
            config.max_deliveries,
            _milliseconds(config.visibility_s - pause_s),
            error,
            config.dead_max_len,
            delivery.job.job_id,
            delivery.job.key,
        )
        return bool(answer == 1)

    async def drop(self, delivery: Delivery, reason: str) -> bool:
        """End a job without an answer and count it under `reason`; False when another worker has it.

        Waits through an outage as `finish` does.
        """
        job = delivery.job
        answer = await self._settle(scripts.DROP, delivery, reason, job.job_id, job.key)
        return bool(answer == 1)

    async def permit(self, key: str, permit: str) -> int:
        """As `JobProducer.permit`."""
        return int(await self._link.run(upkeep.PERMIT, self.name, key, permit) or 0)

    async def is_withdrawn(self, delivery: Delivery) -> bool:
        """Whether the jobs of its key have to have another permit by now; waits as `finish` does."""
        job = delivery.job
        permits = self.config.key("permits")
        wanted: Any = await self._link.insist(
            lambda: self._link.ask(lambda: self._link.commands.hget(permits, job.key))
        )
        return wanted is not None and wanted.decode() != job.permit

    async def status(self) -> QueueStatus:
        """The queue's state; raises `QueueUnavailable`."""
        return parse_status(await self._link.run(upkeep.STATUS, self.name))

    async def close(self) -> None:
        """Hand the jobs in hand to other workers at once, and disconnect; never raises for an outage."""
        if self._keeper:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
            await self._release()
        await self._link.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def _keep_every_s(self) -> float:
        return min(self.config.visibility_s / 3, _KEEP_EVERY_S)

    async def _claim(self, max_jobs: int) -> list[Delivery]:
        if time.monotonic() < self._next_claim:
            return []
        config = self.config
        limits = (config.max_deliveries, config.dead_max_len)
        visibility_ms = _milliseconds(config.visibility_s)
        answer = await self._link.run(
            scripts.CLAIM, self.name, visibility_ms, self._cursor, max_jobs, *limits
        )
        if answer is None:
            return []
        self._cursor = answer[0].decode()
        if self._cursor == "0-0":
            self._next_claim = time.monotonic() + min(_CLAIM_EVERY_S, config.visibility_s / 4)
        rows = [row for row in answer[2] if row[0].decode() not in self._held]
        bodies = await self._bodies([entry_id for entry_id, *_ in rows])
        return self._hold(
            [_delivery(row[0], row[1], body, row[2], answer[1]) for row, body in _present(rows, bodies)]
        )

    async def _bodies(self, entry_ids: list[bytes]) -> list[bytes | None]:
        """The bodies of entries, None for one that is gone: another worker was quicker."""
        if not entry_ids:
            return []
        keys = [self.config.key(f"body:{entry_id.decode()}") for entry_id in entry_ids]
        found: Any = await self._link.ask(lambda: self._link.commands.mget(keys))
        return found or []

    async def _take(self, max_jobs: int, hold: Collection[str], left_s: float) -> list[Delivery]:
        asked: tuple[Argument, ...] = (max_jobs, self.config.dead_max_len, *hold)
        found = await self._ask_for(True, asked)
        if found or found is None or not left_s:
            return found or []
        # why: it sleeps until a job comes (also one since the last look), or silent workers are due.
        due_s = max(0.001, self._next_claim - time.monotonic())
        block_ms = _milliseconds(min(left_s, self.config.max_block_s, due_s))
        told = (self.config.stream, self._newest, block_ms)
        return await self._ask_for(False, asked, told) or []

    async def _ask_for(
        self,
        is_first: bool,
        arguments: tuple[Argument, ...],
        told: tuple[str, bytes | str, int] | None = None,
    ) -> list[Delivery] | None:
        """What there is to take; None when the group was gone, and then nothing was looked for."""
        # invariant: a hand of its own for each call, else two at once might get each other's body.
        hand = self.config.key(f"hand:{self._hands}:{next(self._numbers)}")
        answer = await self._link.run_and_get(
            scripts.TAKE, self.name, hand, int(is_first), *arguments, told=told
        )
        if answer is None:
            return None
        (now_ms, rows, waits, expired, newest), first = answer
        if is_first:
            self._newest = newest
        self.waits_s = dict(_waits(waits))
        self.expired_s += _waits(expired)
        bodies: list[bytes | None] = [] if first is None else [first]
        bodies += await self._bodies([entry_id for entry_id, *_ in rows[len(bodies) :]])
        return self._hold(
            [_delivery(row[0], row[1], body, 1, now_ms, row[2]) for row, body in _present(rows, bodies)]
        )

    def _hold(self, deliveries: list[Delivery]) -> list[Delivery]:
        now = time.monotonic()
        self._held.update({delivery.entry_id: (delivery, now) for delivery in deliveries})
        return deliveries

    async def _settle(self, script: str, delivery: Delivery, *arguments: Argument) -> Any:
        try:
            answer = await self._link.insist(
                lambda: self._link.run(script, self.name, delivery.entry_id, *arguments)
            )
        except QueueError:
            # why: its lease is renewed no more, so that it comes again.
            self._held.pop(delivery.entry_id, None)
            raise
        self._held.pop(delivery.entry_id, None)
        return answer

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._keep_every_s)
            with suppress(QueueError):
                await self._renew()

    async def _renew(self) -> None:
        oldest = time.monotonic() - self.config.max_hold_s
        self._held = {key: held for key, held in self._held.items() if held[1] > oldest}
        for entry_id in await self._link.run(scripts.RENEW, self.name, *self._held) or []:
            self._held.pop(entry_id.decode(), None)

    async def _release(self) -> None:
        rows = [(entry_id, held[0].times_delivered) for entry_id, held in self._held.items()]
        visibility_ms = _milliseconds(self.config.visibility_s)
        if self.outage.delay_s:
            return
        with suppress(QueueError):
            await self._link.run(
                scripts.RELEASE, self.name, visibility_ms, *(item for row in rows for item in row)
            )
