"""Who owns which block of the paged KV cache, and which blocks can be found again by content."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from vlm_engine.sequence import Placeholder


def block_hash(
    parent: bytes, token_ids: Sequence[int], first: int, placeholders: Sequence[Placeholder]
) -> bytes:
    """Hash of one full block, chained to the block before it.

    Every image that overlaps the block goes in with its digest and its place: the ids of all
    image tokens are equal, so without the digest two frames would share keys and values.

    Args:
        parent: Hash of the block before, ``b""`` for the first.
        token_ids: The block's token ids.
        first: Position of the block's first token in its sequence.
        placeholders: All images of the sequence.
    """
    digest = hashlib.sha256(parent)
    digest.update(b",".join(b"%d" % token_id for token_id in token_ids))
    for image in placeholders:
        if image.start < first + len(token_ids) and first < image.end:
            digest.update(b"|%d:" % (image.start - first) + image.digest)
    return digest.digest()


class BlockPool:
    """Reference counts and content hashes of a fixed number of KV blocks.

    A block that nobody holds keeps its hash until it is handed out again, so a finished request's
    prefix stays usable; blocks that nothing can be found in are handed out first, then the block that was
    released longest ago, and blocks that were released to be kept after all others.

    Args:
        num_blocks: Blocks in the cache.
        block_size: Tokens a block.
        num_kept: Most free blocks that are kept.
    """

    def __init__(self, num_blocks: int, block_size: int, num_kept: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kept = num_kept
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._kept)

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Block ids of the longest run of `hashes`, from the first on, that is cached."""
        found: list[int] = []
        for value in hashes:
            block_id = self._by_hash.get(value)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_exclusive(self, block_ids: Iterable[int]) -> int:
        """How many of `block_ids` have a single holder, whose release frees them."""
        return sum(self._ref_counts[block_id] == 1 for block_id in block_ids)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add one holder to blocks that were found."""
        for block_id in block_ids:
            self._free.pop(block_id, None)
            self._kept.pop(block_id, None)
            self._ref_counts[block_id] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks of unknown content; as many are free."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks wanted, {self.num_free} free"
        return [self._take() for _ in range(num_blocks)]

    def _take(self) -> int:
        block_id, _ = (self._free or self._kept).popitem(last=False)
        self._forget(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def _forget(self, block_id: int) -> None:
        value = self._hashes[block_id]
        self._hashes[block_id] = None
        if value is not None and self._by_hash.get(value) == block_id:
            del self._by_hash[value]

    def publish(self, block_id: int, value: bytes) -> None:
        """Make a block findable, once its keys and values are written.

        The first block with a hash stays the one that is found.
        """
        if self._by_hash.setdefault(value, block_id) == block_id:
            self._hashes[block_id] = value

    def release(self, block_ids: Sequence[int], *, keep: bool = False) -> None:
        """Give up one hold on each block; the end of a sequence is reused before its start.

        Args:
            block_ids: From the start of the sequence on.
            keep: Hand those that can be found again out last.
        """
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id} released more often than held"
            if not self._ref_counts[block_id]:
                is_found = self._hashes[block_id] is not None
                (self._kept if keep and is_found else self._free)[block_id] = None
                if not is_found:
                    self._free.move_to_end(block_id, last=False)
        while len(self._kept) > self.num_kept:
            self._free[self._kept.popitem(last=False)[0]] = None

    def forget(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable, because what they hold cannot be trusted."""
        for block_id in block_ids:
            self._forget(block_id)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Compare the books with the blocks that the living sequences hold.

        Raises:
            AssertionError: A block is lost, held twice, or found under a wrong hash.
        """
        counts = [0] * self.num_blocks
        for block_ids in holders:
            for block_id in block_ids:
                counts[block_id] += 1
        assert counts == self._ref_counts, "reference counts differ from what the sequences hold"
        free = {b for b, n in enumerate(counts) if not n}
        assert self._free.keys() | self._kept.keys() == free, "free list differs from the counts"
        assert len(self._kept) <= self.num_kept, "more blocks kept than may be"
        assert all(self._hashes[b] == h for h, b in self._by_hash.items()), (
            "hash index differs from the blocks"
        )
