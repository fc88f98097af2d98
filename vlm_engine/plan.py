"""What one step does."""

from dataclasses import dataclass

from vlm_engine.cost_model import SliceWork, StepWork
from vlm_engine.sequence import Placeholder, Sequence
from vlm_engine.turn import Turn


def chunk_work(start: int, end: int, *, samples: bool, num_proposed: int = 0) -> StepWork:
    """What the cost model needs to know of positions ``[start, end)`` of a sequence, and of proposed ones."""
    num_tokens = end - start
    if num_tokens == 1:
        num_rows = 1 + num_proposed
        return StepWork(num_rows, num_rows * samples, num_context=end, num_pairs=num_proposed * end)
    return StepWork(num_tokens, int(samples), num_pairs=num_tokens * start + num_tokens**2 // 2)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions ``[start, end)`` of a sequence that the step computes.

    Args:
        sequence: The sequence.
        start: First position.
        end: Position after the last one that the sequence has a token for.
        proposed: Of a decode, tokens that may follow; they are computed as well, and those that turn out to
            be what the model says itself are taken over.
    """

    sequence: Sequence
    start: int
    end: int
    proposed: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk, proposed ones too."""
        return self.end - self.start + len(self.proposed)

    @property
    def token_ids(self) -> list[int]:
        """The tokens themselves."""
        return [*self.sequence.token_ids[self.start : self.end], *self.proposed]

    @property
    def work(self) -> StepWork:
        """What the cost model needs to know of it."""
        return chunk_work(self.start, self.end, samples=self.samples, num_proposed=len(self.proposed))

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the newest token, so that the next one is sampled."""
        return self.end == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class EncodeItem:
    """Encoder slices ``[first, last)`` of an image, to run before the plan's forward pass."""

    sequence: Sequence
    image: Placeholder
    first: int
    last: int

    @property
    def work(self) -> SliceWork:
        """What the cost model needs to know of it."""
        return self.image.work(self.first, self.last)

    @property
    def is_whole(self) -> bool:
        """Whether the image is encoded once they ran."""
        return self.last == len(self.image.slices)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Chunks in the order of their importance, slices to encode first, entries to free before.

    Args:
        chunks: At most one for each sequence.
        encodes: Encoder slices; the images that chunks read are encoded once these ran.
        evicted: Digests whose embeddings the runner frees before it encodes.
        expired: Sequences that ended because their time had passed before they were encoded.
        stalled: Why running or waiting sequences got nothing, with counts.
        turn: A detector's turn that the step waits for before it computes.
    """

    chunks: tuple[Chunk, ...] = ()
    encodes: tuple[EncodeItem, ...] = ()
    evicted: tuple[bytes, ...] = ()
    expired: tuple[Sequence, ...] = ()
    stalled: tuple[tuple[str, int], ...] = ()
    turn: Turn | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def step_work(self) -> StepWork:
        """All chunks as the cost model sees them."""
        return sum((chunk.work for chunk in self.chunks), StepWork())

    @property
    def slice_work(self) -> SliceWork:
        """All encoder slices as the cost model sees them."""
        return sum((item.work for item in self.encodes), SliceWork())

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that the step works for, each once."""
        all_of_them = [c.sequence for c in self.chunks] + [e.sequence for e in self.encodes]
        return list({sequence.request_id: sequence for sequence in all_of_them}.values())

    @property
    def has_interactive(self) -> bool:
        """Whether somebody waits for one of the chunks."""
        return any(chunk.sequence.is_interactive for chunk in self.chunks)

    @property
    def is_empty(self) -> bool:
        """Whether the step has nothing to compute."""
        return not self.chunks and not self.encodes
