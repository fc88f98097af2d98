"""How much of something fits: pure functions that budgets share."""

from collections.abc import Callable

from vlm_engine.cost_model import StepWork
from vlm_engine.plan import chunk_work
from vlm_engine.sequence import Sequence


def room_for(sequence: Sequence, num_tokens: int, *, has_prompt: bool) -> int:
    """How many of `num_tokens` that a step has left may be the sequence's, or more if they must be together.

    why: an image that attends both ways may be longer than any step; it goes before other prompts then.
    """
    together = sequence.num_together
    if num_tokens >= together:
        return num_tokens
    return together if num_tokens > 0 and not has_prompt else 0


def step_work(sequence: Sequence, num_tokens: int) -> StepWork:
    """The next `num_tokens` of a sequence as the cost model sees them."""
    start = sequence.num_computed_tokens
    end = start + num_tokens
    return chunk_work(start, end, samples=end == sequence.num_tokens)


def largest(high: int, fits: Callable[[int], bool]) -> int:
    """Largest n up to `high` for which ``fits(n)`` holds, 0 if none; `fits` is monotone."""
    if high <= 0 or not fits(1):
        return 0
    if fits(high):
        return high
    low, high = 1, high - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
