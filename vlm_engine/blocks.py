"""Which KV blocks a sequence has: found by content, taken, published for others, and given back."""

from collections.abc import Iterable

from vlm_engine.block_pool import BlockPool, block_hash
from vlm_engine.sequence import Sequence


class Blocks:
    """The blocks of sequences, with some that background work leaves to chats.

    Args:
        pool: All blocks.
        num_for_chats: Blocks that background work leaves to chats, running and kept.
        is_shared: Whether equal prompt starts are found or published at all.
    """

    def __init__(self, pool: BlockPool, num_for_chats: int, *, is_shared: bool) -> None:
        self._pool = pool
        self._num_for_chats = pool.num_kept = num_for_chats
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

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a sequence lacks for its first `num_tokens` positions."""
        return max(0, -(-num_tokens // self._pool.block_size) - len(sequence.block_ids))

    def num_withheld(self, sequence: Sequence, num_missing: int, running: Iterable[Sequence]) -> int:
        """Free blocks that a sequence must leave to chats: the reserve without what those that run hold.

        why: a background request that is larger than all that the reserve leaves could never run;
        it may take from the reserve, since a chat that needs blocks preempts it.
        """
        largest = self._pool.num_blocks - self._num_for_chats
        if sequence.is_interactive or len(sequence.block_ids) + num_missing > largest:
            return 0
        held = sum(len(other.block_ids) for other in running if other.is_interactive)
        return max(0, self._num_for_chats - held)

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Take what a sequence lacks for its first `num_tokens` positions; as much is free."""
        sequence.block_ids += self._pool.allocate(self.num_missing(sequence, num_tokens))

    def publish(self, sequence: Sequence) -> None:
        """Let others find the full blocks of what is computed."""
        if not self._is_shared:
            return
        num_full = sequence.num_computed_tokens // self._pool.block_size
        self._hash(sequence, num_full)
        for index in range(sequence.num_published, num_full):
            self._pool.publish(sequence.block_ids[index], sequence.block_hashes[index])
        sequence.num_published = num_full

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks behind what is computed."""
        num_kept = -(-sequence.num_computed_tokens // self._pool.block_size)
        self._pool.release(sequence.block_ids[num_kept:])
        del sequence.block_ids[num_kept:]

    def free(self, sequence: Sequence) -> None:
        """Give all back; after an error nothing that it computed is found again."""
        if sequence.finish_reason == "error":
            self._pool.forget(sequence.block_ids)
        self._pool.release(sequence.block_ids, keep=sequence.is_interactive)
        sequence.block_ids = []
        sequence.num_computed_tokens = sequence.num_published = 0

    def _hash(self, sequence: Sequence, num_blocks: int) -> None:
        """Extend the sequence's hashes to its first `num_blocks` full blocks."""
        size, hashes = self._pool.block_size, sequence.block_hashes
        for index in range(len(hashes), num_blocks):
            first = index * size
            parent = hashes[-1] if hashes else b""
            images = sequence.images_between(first, first + size)
            hashes.append(block_hash(parent, sequence.token_ids[first : first + size], first, images))
