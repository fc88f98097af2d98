"""A plan while it is made."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from vlm_engine.budget import WorkBudget
from vlm_engine.plan import Chunk, EncodeItem, StepPlan
from vlm_engine.sequence import Sequence
from vlm_engine.turn import Turn


@dataclass(slots=True)
class Draft:
    """The plan while it is made, within a budget."""

    budget: WorkBudget
    chunks: list[Chunk] = field(default_factory=list)
    encodes: list[EncodeItem] = field(default_factory=list)
    stalled: Counter[str] = field(default_factory=Counter)
    planned: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)
    turn: Turn | None = None

    def add(self, part: Chunk | EncodeItem) -> None:
        """Plan a chunk, or slices of an image, of a sequence."""
        if isinstance(part, Chunk):
            self.chunks.append(part)
        else:
            self.encodes.append(part)
        self.planned.add(part.sequence.request_id)

    def completes(self, sequence: Sequence) -> bool:
        """Whether the plan computes all that the sequence has, as far as it was just planned."""
        return bool(self.chunks) and self.chunks[-1].sequence is sequence and self.chunks[-1].samples

    def plan(self, evicted: tuple[bytes, ...], expired: Iterable[Sequence]) -> StepPlan:
        """What was drafted; `evicted` and `expired` as `StepPlan` has them."""
        stalled = tuple(sorted(self.stalled.items()))
        return StepPlan(tuple(self.chunks), tuple(self.encodes), evicted, tuple(expired), stalled, self.turn)
