"""What the front does with the event store by itself: follow Redis' streams, and keep the store in order."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice

from appliance.events import COMPLAIN_EVERY_S, EventStore, EventStoreError
from appliance.fates import LOST, LOST_AFTER_S, why_dropped
from appliance.jobs import decode_change, decode_description
from appliance.retention import SteadyClock
from queues import Result, ResultReader

logger = logging.getLogger(__name__)

READ_BLOCK_MS = 1000
STORE_AGAIN_S = 5.0
LOOK_FOR_LOST_S = 30.0
SWEEP_EVERY_S = 3600.0
STORED_AT_ONCE = 64
MAX_HELD_BYTES = 16 * 2**20
UNSTORED = "events that were not stored"
GAPS = "events that Redis had forgotten"
"""Under these names they are counted; of the latter it is not known how many there are at a time."""

Store = Callable[[EventStore, Result, bool], object]


class Follower:
    """Stores all that comes by a stream, also from other appliances and before this one started.

    Where the store has never followed it, what was there before `begin` is history, which outputs are not
    owed: an appliance without a file of events has told them before. A server that was just started
    `has_history` of nobody. What there is no room for while nothing can be stored is counted in
    `num_failures`.
    """

    def __init__(
        self,
        reader: ResultReader,
        store: Store,
        events: EventStore,
        *,
        has_history: bool = True,
        num_failures: Counter[str] | None = None,
    ) -> None:
        self._reader, self._store, self._events = reader, store, events
        self._has_history = has_history
        self._num_failures = Counter() if num_failures is None else num_failures
        self._held, self._num_bytes = deque[Result](), 0
        self._complain_at = float("-inf")
        # why: what the store has forgotten must not come in again with the next start.
        self._mark = f"{reader.stream} of {reader.outage.url}"
        self._last, self._history = (0, 0), (0, 0)

    async def begin(self) -> None:
        """Find where to go on; raises `QueueError` and `EventStoreError`."""
        newest, mark = _number(await self._reader.last_id()), self._events.mark(self._mark)
        if mark is None:
            self._history = newest if self._has_history else (0, 0)
        elif (last := _number(mark)) <= newest:
            self._last = last
            if last < _number(await self._reader.first_id()):
                self._num_failures[GAPS] += 1
                logger.warning(
                    "%s: Redis has forgotten some of what came since %s", self._reader.stream, mark
                )
        # why: else the stream is another one than that which was read, and all in it is new

    async def run(self) -> None:
        """Follow until cancelled; what cannot be stored yet is held, since Redis keeps the newest only."""
        read_to, store_at = self._last, 0.0
        self._held.clear()
        self._num_bytes = 0
        while True:
            found = await self._reader.read("{}-{}".format(*read_to), READ_BLOCK_MS)
            if found:
                read_to = _number(found[-1].entry_id)
                self._hold(found)
            if not self._held or time.monotonic() < store_at:
                continue
            try:
                await self._store_held()
            except EventStoreError as error:
                # why: the store has complained
                logger.debug("%s waits until events can be stored: %s", self._reader.stream, error)
                store_at = time.monotonic() + STORE_AGAIN_S

    def _hold(self, found: list[Result]) -> None:
        self._held.extend(found)
        self._num_bytes += sum(map(_size, found))
        num_lost = 0
        while self._num_bytes > MAX_HELD_BYTES and len(self._held) > 1:
            self._num_bytes -= _size(self._held.popleft())
            num_lost += 1
        if not num_lost:
            return
        self._num_failures[UNSTORED] += num_lost
        if time.monotonic() >= self._complain_at:
            # why: from then on each that comes pushes one out
            self._complain_at = time.monotonic() + COMPLAIN_EVERY_S
            logger.error("%s: the oldest that could not be stored are lost", self._reader.stream)

    async def _store_held(self) -> None:
        while self._held:
            batch = list(islice(self._held, STORED_AT_ONCE))
            await asyncio.to_thread(self._store_all, batch)
            self._last = _number(batch[-1].entry_id)
            for one in batch:
                self._num_bytes -= _size(one)
                self._held.popleft()

    async def is_through(self) -> bool:
        """Whether all that is in the stream now was stored; raises `QueueError`."""
        return _number(await self._reader.last_id()) <= self._last

    def _store_all(self, found: list[Result]) -> None:
        for result in found:
            try:
                self._store(self._events, result, _number(result.entry_id) > self._history)
            except ValueError as error:
                what = self._reader.stream
                logger.warning("job=%s: what %s says is not known: %s", result.job_id, what, error)
        self._events.set_mark(self._mark, found[-1].entry_id)


def store_answer(events: EventStore, result: Result, is_news: bool) -> None:
    """An answer joins its event."""
    events.add(decode_description(result.body), is_news=is_news)


def store_change(events: EventStore, told: Result, is_news: bool) -> None:
    """An event begins, moves or ends."""
    events.change(decode_change(told.body), is_news=is_news)


def store_drop(events: EventStore, dropped: Result, is_news: bool) -> None:
    """A job gets no answer."""
    dropped_at = int(dropped.entry_id.partition("-")[0]) / 1000
    error = why_dropped(dropped.body.decode(errors="replace"))
    events.give_up(dropped.job_id, error, dropped_at, is_news=is_news)


async def give_up_lost(events: EventStore, max_age_s: float) -> None:
    """Tell events of whose job nothing is heard any more, as when Redis came back empty."""
    patience_s = max(LOST_AFTER_S, 2 * max_age_s)
    clock = SteadyClock(time.time(), patience_s)
    while True:
        # why: first what the streams know is read, which may be much after a pause
        await asyncio.sleep(LOOK_FOR_LOST_S)
        if not clock.look():
            continue
        try:
            number = await asyncio.to_thread(events.give_up_lost, time.time() - patience_s, LOST)
        except EventStoreError as error:
            logger.debug("%s", error)
        else:
            if number:
                logger.warning("%d events lost their jobs and stay undescribed", number)


async def sweep(events: EventStore) -> None:
    """Let go of what the store need not keep, now and every hour."""
    while True:
        try:
            await asyncio.to_thread(events.sweep)
        except EventStoreError as error:
            logger.debug("%s", error)
        await asyncio.sleep(SWEEP_EVERY_S)


def _number(entry_id: str) -> tuple[int, int]:
    time_ms, _, count = entry_id.partition("-")
    return int(time_ms), int(count or 0)


def _size(result: Result) -> int:
    """Bytes that it takes while it is held, about."""
    return len(result.body) + 500
