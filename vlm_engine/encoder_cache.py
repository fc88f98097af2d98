"""Which images' embeddings are kept, counted in image tokens; the tensors live in the runner."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from vlm_engine.cost_model import SliceWork
from vlm_engine.sequence import Placeholder


@dataclass(slots=True)
class _Entry:
    """An image's tokens, slices still to run after the plan being made, and who still has to read it."""

    length: int
    num_left: int
    holders: set[str] = field(default_factory=set)


class EncoderCache:
    """Books of encoded images by content digest.

    An entry is *held* by the running sequences that still have to read it and *idle* after that.
    Idle entries stay until room is needed, the one idle for longest goes first. Waiting sequences
    hold nothing.

    Args:
        num_tokens: Capacity in image tokens (embedding rows).
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_used = 0
        """Image tokens of all entries."""
        self._entries: dict[bytes, _Entry] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._evicted: list[bytes] = []

    def __contains__(self, digest: bytes) -> bool:
        """Whether the image is encoded or on its way."""
        return digest in self._entries

    def num_left(self, image: Placeholder) -> int:
        """Slices of an image still to run after the plan being made, all of one that is not entered."""
        entry = self._entries.get(image.digest)
        return len(image.slices) if entry is None else entry.num_left

    def work_left(self, image: Placeholder) -> SliceWork:
        """The work of these slices."""
        count = len(image.slices)
        return image.work(count - self.num_left(image), count)

    @property
    def num_held(self) -> int:
        """Image tokens of the entries that a sequence still has to read."""
        return sum(entry.length for entry in self._entries.values() if entry.holders)

    def can_hold(self, image: Placeholder) -> bool:
        """Whether one more sequence may hold the image: it is held already, or those that are leave room."""
        entry = self._entries.get(image.digest)
        return bool(entry and entry.holders) or self.num_held + image.length <= self.num_tokens

    def advance(self, image: Placeholder, num_slices: int) -> None:
        """Book slices that the plan runs; an image that is not there is entered, and room is made for it."""
        if image.digest not in self._entries:
            while self.num_used + image.length > self.num_tokens:
                self.drop(next(iter(self._idle)))
            self._entries[image.digest] = _Entry(image.length, len(image.slices))
            self.num_used += image.length
            self._idle[image.digest] = None
        self._entries[image.digest].num_left -= num_slices

    def hold(self, digest: bytes, request_id: str) -> None:
        """Keep an entry until `request_id` has read it."""
        self._entries[digest].holders.add(request_id)
        self._idle.pop(digest, None)

    def is_held(self, digest: bytes, request_id: str) -> bool:
        """Whether `request_id` holds the entry."""
        return digest in self._entries and request_id in self._entries[digest].holders

    def release(self, digest: bytes, request_id: str) -> None:
        """Give up a hold; without one, nothing happens."""
        if self.is_held(digest, request_id):
            holders = self._entries[digest].holders
            holders.discard(request_id)
            if not holders:
                self._idle[digest] = None

    def drop(self, digest: bytes) -> None:
        """Remove an entry, for room or because its encoding failed."""
        self._idle.pop(digest, None)
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self.num_used -= entry.length
            self._evicted.append(digest)

    def drop_idle(self, digests: Iterable[bytes]) -> None:
        """Remove those of `digests` that no sequence holds."""
        for digest in digests:
            if digest in self._idle:
                self.drop(digest)

    def take_evicted(self) -> tuple[bytes, ...]:
        """Digests removed since the last call, for the runner to free."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def check_integrity(self, request_ids: set[str]) -> None:
        """Compare the books with the running sequences.

        Raises:
            AssertionError: A finished sequence still holds an entry, or the size is exceeded.
        """
        holders = set().union(*(entry.holders for entry in self._entries.values()))
        assert holders <= request_ids, f"held by sequences that are gone: {sorted(holders - request_ids)}"
        assert self.num_used == sum(entry.length for entry in self._entries.values()), "image tokens lost"
        assert self.num_used <= self.num_tokens, "more image tokens than the cache holds"
        idle = {digest for digest, entry in self._entries.items() if not entry.holders}
        assert set(self._idle) == idle, "idle list differs from the holds"
