"""Room that requests share: so many pixels, or bytes, are in hand at once, whoever sends them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from appliance.api.errors import unavailable


class Place:
    """What one request has of a `Room`."""

    def __init__(self, room: "Room", size: int) -> None:
        self._room, self.size = room, size

    def shrink(self, size: int) -> None:
        """Give back what is more than `size`."""
        self.size, freed = min(size, self.size), max(0, self.size - size)
        self._room.give_back(freed)


class Room:
    """Room of `size`; who finds too little of it waits, in the order of coming.

    # invariant: `num_taken` is the sum of all places; one who wants more than there is gets all of it.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.num_taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def place(self, size: int) -> AsyncIterator[Place]:
        """A place of `size`, as soon as there is room."""
        size = min(size, self._size)
        await self._turn(size)
        place = Place(self, size)
        try:
            yield place
        finally:
            place.shrink(0)

    def give_back(self, size: int) -> None:
        """Called by places."""
        self.num_taken -= size
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.cancelled():
                if self.num_taken + wanted > self._size:
                    return
                self.num_taken += wanted
                turn.set_result(None)
            self._waiting.popleft()

    async def _turn(self, size: int) -> None:
        if not self._waiting and self.num_taken + size <= self._size:
            self.num_taken += size
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            # why: the turn may have come in the moment in which nobody wanted it any more
            self.give_back(0 if turn.cancelled() else size)
            raise


class ByteRoom:
    """Bytes of bodies in hand, of all requests together; who finds no room is told to come again."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.num_taken = 0

    @contextmanager
    def place(self) -> Iterator["BytePlace"]:
        """A place that grows while a body arrives, and is given back at the end."""
        place = BytePlace(self)
        try:
            yield place
        finally:
            self.num_taken -= place.size

    def take(self, size: int) -> None:
        """Called by places; raises `ApiError` (503) without room."""
        if self.num_taken + size > self._size:
            raise unavailable(
                "the bodies of all requests together are as large as may be: try again", code="overloaded"
            )
        self.num_taken += size


class BytePlace:
    """What one body has of a `ByteRoom`."""

    def __init__(self, room: ByteRoom) -> None:
        self._room, self.size = room, 0

    def grow(self, size: int) -> None:
        """Have `size` bytes more; raises `ApiError` (503) without room."""
        self._room.take(size)
        self.size += size
