"""Which images' embeddings are kept, counted in image tokens; the tensors live in the runner."""

from collections import OrderedDict
from collections.abc import Iterable

from vlm_engine.cost_model import SliceWork
from vlm_engine.sequence import Placeholder


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
        self._lengths: dict[bytes, int] = {}
        self._num_left: dict[bytes, int] = {}
        self._holders: dict[bytes, set[str]] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._evicted: list[bytes] = []

    def __contains__(self, digest: bytes) -> bool:
        """Whether the image is encoded or on its way."""
        return digest in self._lengths

    def num_left(self, digest: bytes) -> int | None:
        """Slices still to run after the plan being made; None for an image that is not entered."""
        return self._num_left.get(digest)

    def work_left(self, image: Placeholder) -> SliceWork:
        """What of an image is still to be encoded, all of one that is not entered."""
        count = len(image.slices)
        return image.work(count - self._num_left.get(image.digest, count), count)

    def is_ready(self, digest: bytes) -> bool:
        """Whether the image is encoded, or will be by the plan being made."""
        return self._num_left.get(digest) == 0

    @property
    def num_used(self) -> int:
        """Image tokens of all entries."""
        return sum(self._lengths.values())

    @property
    def num_held(self) -> int:
        """Image tokens of the entries that a sequence still has to read."""
        return sum(self._lengths[digest] for digest, holders in self._holders.items() if holders)

    def cost_to_hold(self, digest: bytes, length: int) -> int:
        """Tokens by which `num_held` grows when one more sequence holds the image."""
        return 0 if self._holders.get(digest) else length

    def add(self, digest: bytes, length: int, num_slices: int) -> None:
        """Make room for an image and enter it, idle, with all its slices to run."""
        assert digest not in self._lengths, "image entered twice"
        while self.num_used + length > self.num_tokens:
            self.drop(next(iter(self._idle)))
        self._lengths[digest] = length
        self._num_left[digest] = num_slices
        self._holders[digest] = set()
        self._idle[digest] = None

    def advance(self, digest: bytes, num_slices: int) -> None:
        """Book slices that the plan runs."""
        self._num_left[digest] -= num_slices

    def hold(self, digest: bytes, request_id: str) -> None:
        """Keep an entry until `request_id` has read it."""
        self._holders[digest].add(request_id)
        self._idle.pop(digest, None)

    def is_held(self, digest: bytes, request_id: str) -> bool:
        """Whether `request_id` holds the entry."""
        return request_id in self._holders.get(digest, ())

    def release(self, digest: bytes, request_id: str) -> None:
        """Give up a hold; without one, nothing happens."""
        holders = self._holders.get(digest)
        if holders is None or request_id not in holders:
            return
        holders.discard(request_id)
        if not holders:
            self._idle[digest] = None

    def drop(self, digest: bytes) -> None:
        """Remove an entry, for room or because its encoding failed."""
        self._idle.pop(digest, None)
        if self._lengths.pop(digest, None) is not None:
            del self._holders[digest], self._num_left[digest]
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
        holders = set().union(*self._holders.values()) if self._holders else set()
        assert holders <= request_ids, f"held by sequences that are gone: {sorted(holders - request_ids)}"
        assert self.num_used <= self.num_tokens, "more image tokens than the cache holds"
        assert set(self._idle) == {d for d, h in self._holders.items() if not h}, (
            "idle list differs from the holds"
        )
