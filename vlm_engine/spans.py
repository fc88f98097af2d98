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
    """

    num_queries: int
    num_context: int
    block_ids: Sequence[int]
