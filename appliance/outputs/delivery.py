"""One output's messages, sent in order, again and again until they are taken or too old."""

import asyncio
import logging
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Protocol

from appliance.outputs.outbox import Message, Outbox

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
LOOK_AGAIN_S = 30.0

Changes = Callable[[], AbstractContextManager[asyncio.Event]]


class DeliveryError(Exception):
    """A message was not taken; `is_outage` says that the next one will not be either.

    `again_in_s` is when the receiver wants to see it again. The text has no secret in it.
    """

    def __init__(self, text: str, *, is_outage: bool = False, again_in_s: float | None = None) -> None:
        super().__init__(text)
        self.is_outage = is_outage
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


class Delivery:
    """Sends the messages of one output until cancelled; `changes` wakes it when there may be new ones.

    invariant: a message waits while an earlier one of the same event does, so that each event is told in
    order; other events are not held up by one that fails, only by an outage.
    """

    def __init__(self, output: Output, outbox: Outbox, changes: Changes) -> None:
        self._output, self._outbox, self._changes = output, outbox, changes
        self._num_outages = 0

    async def run(self) -> None:
        """Sends until cancelled, also when the event file cannot be used for a while."""
        while True:
            try:
                await self._send_all()
            except sqlite3.Error as error:
                logger.error("output=%s cannot use the event file: %s", self._output.name, error)
                await asyncio.sleep(LOOK_AGAIN_S)

    async def _send_all(self) -> None:
        async for message in self._due():
            try:
                await self._output.send(message)
            except DeliveryError as error:
                await self._failed(message, error)
            else:
                if self._num_outages:
                    logger.warning("output=%s takes messages again", self._output.name)
                self._num_outages = 0
                await asyncio.to_thread(self._outbox.sent, message)

    async def _due(self) -> AsyncIterator[Message]:
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
        name, age_s = self._output.name, time.time() - message.created_at
        is_last = age_s >= self._output.give_up_after_s
        again_in_s = None if is_last else error.again_in_s or pause_after(message.num_tries)
        await asyncio.to_thread(self._outbox.failed, message, str(error), again_in_s)
        if is_last or not self._num_outages:
            what = "is a dead letter now" if is_last else f"is sent again in {again_in_s:.0f} s"
            logger.warning("output=%s event=%s %s: %s", name, message.event_id, what, error)
        if error.is_outage:
            await asyncio.sleep(pause_after(self._num_outages))
            self._num_outages += 1


def pause_after(num_failures: int) -> float:
    """Seconds to wait after a failure that `num_failures` others came before: doubling, spread, bounded."""
    longest: float = min(FIRST_PAUSE_S * 2.0 ** min(num_failures, 20), LONGEST_PAUSE_S)
    return longest * random.uniform(0.75, 1.0)


async def _wait(changed: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(changed.wait(), timeout_s)
    except TimeoutError:
        return
