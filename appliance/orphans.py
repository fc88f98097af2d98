"""Events that nobody will end: their worker was killed, or the appliance was, or Redis lost their end."""

import asyncio
import logging
import time
from collections.abc import Callable

from appliance.board import BoardReader
from appliance.events import EventStore, EventStoreError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
ORPHAN_AFTER_S = 10.0
"""Far longer than a worker takes to name a new event, or all of them to a Redis that came back."""


class Orphans:
    """Ends the stored events that go on by no worker's account: each names its own with its cameras' states.

    A worker's account lives for 15 s, so that what one leaves behind ends within half a minute.
    """

    def __init__(
        self, events: EventStore, board: BoardReader, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._events = events
        self._board = board
        self._clock = clock
        self._since: dict[str, float] = {}

    async def run(self) -> None:
        """Looks for them until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.look()
            except EventStoreError as error:
                # why: the store has complained
                logger.debug("%s", error)

    async def look(self) -> int:
        """Ends those that were orphans at each look for `ORPHAN_AFTER_S`, and counts them.

        Raises:
            EventStoreError: The file cannot be read or written.
        """
        cameras = await asyncio.to_thread(self._events.open_events)
        going_on = await self._board.going_on(cameras)
        if going_on is None:
            self._since.clear()
            return 0
        now = self._clock()
        self._since = {one: self._since.get(one, now) for one in cameras if one not in going_on}
        due = [one for one, since in self._since.items() if now - since >= ORPHAN_AFTER_S]
        return sum([await asyncio.to_thread(self._events.end, event_id) for event_id in due])
