"""Which blocks of a sequence others can start on, and on which of theirs it starts."""

from vlm_engine.block_pool import BlockPool, block_hash
from vlm_engine.sequence import Sequence


class Prefixes:
    """Finds and publishes the KV blocks of equal prompt starts.

    Args:
        pool: The blocks.
        is_shared: Whether anything is found or published at all.
    """

    def __init__(self, pool: BlockPool, *, is_shared: bool) -> None:
        self._pool = pool
        self._is_shared = is_shared

    def hold(self, sequence: Sequence) -> None:
        """Start a sequence without blocks on those that hold the same content already."""
        # invariant: at least the newest token is computed, since its logits are wanted
        reusable = (sequence.num_tokens - 1) // self._pool.block_size if self._is_shared else 0
        self._hash(sequence, reusable)
        found = self._pool.find(sequence.block_hashes[:reusable])
        self._pool.hold(found)
        sequence.block_ids = found
        sequence.num_published = len(found)
        sequence.num_computed_tokens = len(found) * self._pool.block_size
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = sequence.num_computed_tokens

    def publish(self, sequence: Sequence) -> None:
        """Let others find the full blocks of what is computed."""
        if not self._is_shared:
            return
        num_full = sequence.num_computed_tokens // self._pool.block_size
        self._hash(sequence, num_full)
        for index in range(sequence.num_published, num_full):
            self._pool.publish(sequence.block_ids[index], sequence.block_hashes[index])
        sequence.num_published = num_full

    def _hash(self, sequence: Sequence, num_blocks: int) -> None:
        """Extend the sequence's hashes to its first `num_blocks` full blocks."""
        size, hashes = self._pool.block_size, sequence.block_hashes
        for index in range(len(hashes), num_blocks):
            first = index * size
            parent = hashes[-1] if hashes else b""
            images = sequence.images_between(first, first + size)
            hashes.append(block_hash(parent, sequence.token_ids[first : first + size], first, images))
