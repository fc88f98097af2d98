"""One output's messages, sent in order, again and again until they are taken or too old."""

import asyncio
import logging
import random
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from traceback import extract_tb
from typing import Protocol

from appliance.event_schema import why_not_written
from appliance.logs import Complaints
from appliance.outputs.outbox import Message, Outbox
from appliance.retention import SteadyClock

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
LONGEST_REFUSAL_S = 300.0
MOST_REFUSED = 10
LOOK_AGAIN_S = 30.0
COMPLAIN_EVERY_S = 60.0
STEADY_AFTER_S = 86_400.0

Changes = Callable[[], AbstractContextManager[asyncio.Event]]


class DeliveryError(Exception):
    """A message was not taken; `is_outage` says that the next one will not be either.

    `again_in_s` is when the receiver wants to see it again, `is_final` that it never does. The text has no
    secret in it.
    """

    def __init__(
        self, text: str, *, is_outage: bool = False, is_final: bool = False, again_in_s: float | None = None
    ) -> None:
        super().__init__(text)
        self.is_outage, self.is_final = is_outage, is_final
        self.again_in_s = again_in_s


class Output(Protocol):
    """A receiver of messages outside."""

    @property
    def name(self) -> str:
        """Its name in settings, logs and metrics."""

    @property
    def give_up_after_s(self) -> float:
        """The age of a message in seconds from which a failure is its last."""

    async def send(self, message: Message) -> None:
        """Return when the receiver has confirmed the message; raises `DeliveryError`."""

    async def rest(self, pause_s: float) -> None:
        """Wait so long in an outage, or until the receiver is known to be there again."""


class Delivery:
    """Sends the messages of one output until cancelled; `changes` wakes it when there may be new ones.

    invariant: a message waits while an earlier one of the same event does, so that each event is told in
    order; other events are not held up by one that fails, only by an outage, in which the oldest is tried.
    Who refuses more than `MOST_REFUSED` in a row is given pauses too.
    """

    def __init__(self, output: Output, outbox: Outbox, changes: Changes) -> None:
        self._output, self._outbox, self._changes = output, outbox, changes
        self._num_outages = 0
        self._num_refused = 0
        self._confirmed: int | None = None
        self._complaints = Complaints(logger, COMPLAIN_EVERY_S)
        self._clock = SteadyClock(time.time(), min(output.give_up_after_s, STEADY_AFTER_S))

    async def run(self) -> None:
        """Sends until cancelled, also when the event file cannot be used for a while."""
        while True:
            try:
                await self._send_all()
            except sqlite3.Error as error:
                text = "output=%s cannot use the event file: %s"
                self._complaints.tell("file", text, self._output.name, why_not_written(error))
                await asyncio.sleep(LOOK_AGAIN_S)

    async def _send_all(self) -> None:
        async with aclosing(self._due()) as messages:
            async for message in messages:
                try:
                    if message.id != self._confirmed:
                        await self._send(message)
                except DeliveryError as error:
                    await self._failed(message, error)
                else:
                    # why: where that cannot be noted down, as on a full disk, it is not sent again.
                    self._confirmed = message.id
                    await self._taken(message)

    async def _send(self, message: Message) -> None:
        try:
            await self._output.send(message)
        except DeliveryError:
            raise
        except Exception as error:
            # why: what is wrong with one message must not end the others; its words may hold a secret
            place = extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}"
            raise DeliveryError(text) from None

    async def _taken(self, message: Message) -> None:
        await asyncio.to_thread(self._outbox.sent, message)
        if self._num_outages:
            logger.warning("output=%s takes messages again", self._output.name)
        if self._num_outages or self._num_refused > MOST_REFUSED:
            await asyncio.to_thread(self._outbox.hasten, self._output.name)
        self._num_outages = self._num_refused = 0

    async def _due(self) -> AsyncGenerator[Message, None]:
        name = self._output.name
        with self._changes() as changed:
            while True:
                changed.clear()
                message = await asyncio.to_thread(self._outbox.next_due, name)
                if message is not None:
                    yield message
                    continue
                due_in_s = await asyncio.to_thread(self._outbox.due_in_s, name)
                # why: dead letters are put back by another process, which cannot wake this one.
                pause_s = LOOK_AGAIN_S if due_in_s is None else min(due_in_s, LOOK_AGAIN_S)
                await _wait(changed, pause_s)

    async def _failed(self, message: Message, error: DeliveryError) -> None:
        name, oldest = self._output.name, self._oldest()
        pause_s = error.again_in_s or self._pause_s(message, error)
        is_last = error.is_final or message.owed_since <= oldest
        # why: in an outage nothing is sent anyway, and who rests may be woken
        again_in_s = None if is_last else 0.0 if error.is_outage else pause_s
        await asyncio.to_thread(self._outbox.failed, message, str(error), again_in_s)
        num_dead = int(is_last)
        if error.is_outage:
            num_dead += await asyncio.to_thread(self._outbox.give_up, name, oldest, str(error))
        if num_dead:
            self._complain(f"{num_dead} more are dead letters now: {error}")
        elif not error.is_outage:
            self._complain(f"event={message.event_id} is sent again in {pause_s:.0f} s: {error}")
        elif not self._num_outages:
            logger.warning("output=%s is tried again and again: %s", name, error)
        if error.is_outage:
            self._num_outages += 1
            await self._output.rest(pause_s)
            return
        self._num_refused += 1
        if self._num_refused > MOST_REFUSED:
            await self._output.rest(pause_after(self._num_refused - MOST_REFUSED))

    def _oldest(self) -> float:
        """Since when the oldest message may wait, in unix seconds; none is too old by a clock that jumped."""
        return time.time() - self._output.give_up_after_s if self._clock.look() else 0.0

    def _pause_s(self, message: Message, error: DeliveryError) -> float:
        if error.is_outage:
            return pause_after(self._num_outages)
        return pause_after(message.num_tries, LONGEST_REFUSAL_S)

    def _complain(self, text: str) -> None:
        # why: a receiver may refuse thousands, and `appliance outputs` tells of each
        self._complaints.tell("refusals", "output=%s %s", self._output.name, text)


def pause_after(num_failures: int, longest_s: float | None = None) -> float:
    """Seconds to wait after a failure that `num_failures` others came before: doubling, spread, bounded."""
    most_s = LONGEST_PAUSE_S if longest_s is None else longest_s
    longest: float = min(FIRST_PAUSE_S * 2.0 ** min(num_failures, 20), most_s)
    return longest * random.uniform(0.75, 1.0)


async def _wait(changed: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(changed.wait(), timeout_s)
    except TimeoutError:
        return
