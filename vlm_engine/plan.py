"""What one step does."""

from dataclasses import dataclass

from vlm_engine.sequence import Placeholder, Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions ``[start, end)`` of a sequence that the step computes."""

    sequence: Sequence
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.end - self.start

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the newest token, so that the next one is sampled."""
        return self.end == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class EncodeItem:
    """An image to encode before the step's forward pass."""

    sequence: Sequence
    image: Placeholder


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Chunks in the order of their importance, images to encode first, entries to free before.

    Args:
        chunks: At most one for each sequence.
        encodes: Images that the chunks read and that are not encoded yet.
        evicted: Digests whose embeddings the runner frees before it encodes.
        expired: Sequences that ended while waiting because their time had passed.
        stalled: Why running or waiting sequences got nothing, with counts.
    """

    chunks: tuple[Chunk, ...] = ()
    encodes: tuple[EncodeItem, ...] = ()
    evicted: tuple[bytes, ...] = ()
    expired: tuple[Sequence, ...] = ()
    stalled: tuple[tuple[str, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def is_empty(self) -> bool:
        """Whether the step has nothing to compute."""
        return not self.chunks
