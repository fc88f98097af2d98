"""What attention is told of one sequence."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's share of a step.

    Args:
        num_queries: Tokens computed in this step.
        num_context: Tokens in the cache after this step's are written.
        block_ids: The blocks that hold them, in order.
        both_ways: Positions ``[begin, end)`` whose queries see each other, later ones too; the context
            holds all of them.
    """

    num_queries: int
    num_context: int
    block_ids: Sequence[int]
    both_ways: tuple[tuple[int, int], ...] = ()
