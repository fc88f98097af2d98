"""How much one piece of work for the side thread is."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from vlm_engine.budget import MIN_CHUNK, Side
from vlm_engine.cost_model import CostModel
from vlm_engine.fitting import largest, step_work
from vlm_engine.floor import Floor
from vlm_engine.pace import Owed, needed_share
from vlm_engine.sequence import Placeholder, Sequence

JOB_MS = 120.0
"""What a chat's picture that has just come may wait for; much longer than a step, so that little is lost
between one piece and the next."""

MOST_ENCODED = 1
"""Encoded prompts that are left to the steps while this thread encodes the next; more would only wait."""


class SideBudget:
    """Milliseconds for what runs beside the steps of chats: slices of anybody, prompts of background work.

    Args:
        model: Predicts what takes how long.
        background_ttft_ms: When background prompts should be done. Where this thread alone would be late it
            only encodes, as long as the steps keep up with the prompts.
        max_num_batched_tokens: Most tokens of one forward pass.
        floor: Where it is booked what background work got.
    """

    def __init__(
        self,
        model: CostModel,
        background_ttft_ms: float,
        max_num_batched_tokens: int,
        floor: Floor,
    ) -> None:
        self.model = model
        self.max_num_batched_tokens = max_num_batched_tokens
        self.counts: Counter[str] = Counter()
        self._patience_s = background_ttft_ms / 1e3
        self._floor = floor
        self._now = self._spent_ms = 0.0
        self._only_encodes, self._pays_floor = False, True

    def begin(
        self,
        running: Items[Sequence],
        waiting: Items[Sequence],
        now: float,
        longest_ms: float = math.inf,
        owed: Callable[[], Iterable[Owed]] | None = None,
        side: Side = "none",
    ) -> None:
        """See `StepBudget`."""
        self._now, self._spent_ms = now, 0.0
        # why: who decodes beside chats without slack lives on what the steps owe, whatever runs here
        self._pays_floor = not any(s.is_decoding and not s.is_interactive for s in running)
        left = list(owed()) if owed else []
        is_late = needed_share(left, now, self._patience_s, self.model) > 0.0
        num_encoded = sum(not each.slices.num_slices for each in left)
        self._only_encodes = is_late and num_encoded <= MOST_ENCODED < len(left)

    def fit_tokens(self, sequence: Sequence, num_wanted: int) -> int:
        """See `StepBudget`; tokens that are decoded one by one cost least in the steps, with the others'."""
        if self._only_encodes or sequence.is_interactive or sequence.is_decoding:
            return 0
        together = sequence.num_together
        num_wanted = min(num_wanted, max(self.max_num_batched_tokens, together))
        fits = largest(num_wanted, lambda n: self._spent_ms + self._tokens_ms(sequence, n) <= JOB_MS)
        if fits >= max(1, together):
            return fits
        return 0 if self._spent_ms else min(max(MIN_CHUNK, together), num_wanted)

    def _tokens_ms(self, sequence: Sequence, num_tokens: int) -> float:
        return self.model.step_ms(step_work(sequence, num_tokens), "aside")

    def fit_slices(self, sequence: Sequence, image: Placeholder, num_done: int) -> int:
        """See `StepBudget`."""
        left_ms, last = JOB_MS - self._spent_ms, len(image.slices) - num_done
        fits = largest(
            last, lambda n: self.model.slice_ms(image.work(num_done, num_done + n), aside=True) <= left_ms
        )
        return fits or int(not self._spent_ms)

    @property
    def has_chats(self) -> bool:
        """See `StepBudget`."""
        return False

    def fit_turn(self, costs_ms: Items[float]) -> int:
        """See `StepBudget`."""
        return 0

    def fit_proposed(self, sequence: Sequence, costs_ms: Items[float]) -> int:
        """See `StepBudget`."""
        return 0

    def spend_proposed(self, sequence: Sequence, num_tokens: int, cost_ms: float) -> None:
        """See `StepBudget`."""

    def spend_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """See `StepBudget`."""
        self._spend(sequence, self._tokens_ms(sequence, num_tokens))

    def spend_slices(self, sequence: Sequence, image: Placeholder, first: int, last: int) -> None:
        """See `StepBudget`."""
        self._spend(sequence, self.model.slice_ms(image.work(first, last), aside=True))

    def spend_turn(self, cost_ms: float) -> None:
        """See `StepBudget`."""

    def _spend(self, sequence: Sequence, cost_ms: float) -> None:
        self._spent_ms += cost_ms
        if self._pays_floor and not sequence.is_interactive:
            self._floor.pay(cost_ms, self._now)
