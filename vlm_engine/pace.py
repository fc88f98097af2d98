"""How fast background work must go to be done in time, and so how short steps beside chats can be."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from vlm_engine.cost_model import CostModel, SliceWork, StepWork
from vlm_engine.fitting import step_work
from vlm_engine.sequence import Sequence

SPARE = 1.4
WHOLE = 0.95
FRESH = 0.7


@dataclass(frozen=True, slots=True)
class Owed:
    """What is left of a background request before its first token.

    Args:
        arrival_s: When it came, on the scheduler's clock.
        expires_s: When it is of no use any more, None for never.
        steps: Tokens left.
        slices: Encoder slices left.
        wanted_s: When it is wanted at the latest, None for no such wish.
    """

    arrival_s: float
    expires_s: float | None
    steps: StepWork
    slices: SliceWork
    wanted_s: float | None = None

    def due_s(self, patience_s: float) -> float:
        """When it should be done: well before it expires, and when it is wanted."""
        if self.expires_s is not None:
            patience_s = min(patience_s, FRESH * (self.expires_s - self.arrival_s))
        due_s = self.arrival_s + patience_s
        return due_s if self.wanted_s is None else min(due_s, self.wanted_s)


def owed_by(sequence: Sequence, slices: SliceWork) -> Owed:
    """What a sequence has left before its next token, these encoder slices included."""
    work, request = step_work(sequence, sequence.num_left), sequence.request
    return Owed(sequence.arrival_s, request.expires_at, work, slices, request.wanted_at)


def needed_share(
    owed: Iterable[Owed], now: float, patience_s: float, model: CostModel, *, may_go_aside: bool = True
) -> float:
    """Share of the steps' time in which all is done when due, one after the other, with some to spare.

    Args:
        owed: Background requests in their order.
        now: On the scheduler's clock.
        patience_s: How long after it came each should be done.
        model: Predicts what takes how long.
        may_go_aside: Whether the side thread may run the prompts too, and not only encode.

    Returns:
        0 to 1; 1 where it cannot be done in time, so that background work gets all that chats leave; 0 where
        the side thread alone is in time with it.
    """
    goes_aside = model.has_side and may_go_aside
    steps_s, slices_s, share = 0.0, 0.0, 0.0
    for each in owed:
        steps_s += SPARE * model.step_ms(each.steps, "aside" if goes_aside else "narrow") / 1e3
        slices_s += SPARE * model.slice_ms(each.slices, aside=model.has_side) / 1e3
        left_s = each.due_s(patience_s) - now
        if goes_aside:
            # why: the side thread does what it can, and the steps the rest
            work_s = steps_s + slices_s - left_s
        elif model.has_side:
            # why: slices aside take no time from the steps, but prompts can only follow them
            work_s, left_s = steps_s, left_s - slices_s
        else:
            work_s = steps_s + slices_s
        share = max(share, work_s / left_s if left_s > 0 else 1.0)
        if share >= 1.0:
            return 1.0
    return share


def paced_ms(share: float, chats_ms: float) -> float:
    """How long a step may get whose chats take `chats_ms`, so that other work gets `share` of the time.

    Infinite for as much as fits.
    """
    return math.inf if share >= WHOLE else chats_ms + chats_ms * share / (1.0 - share)
