"""How much one piece of work for the side thread is."""

from vlm_engine.budget import MIN_CHUNK, Moment
from vlm_engine.cost_model import CostModel
from vlm_engine.fitting import largest, step_work
from vlm_engine.floor import Floor
from vlm_engine.pace import needed_share
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
        self, model: CostModel, background_ttft_ms: float, max_num_batched_tokens: int, floor: Floor
    ) -> None:
        self.model = model
        self.max_num_batched_tokens = max_num_batched_tokens
        self._patience_s = background_ttft_ms / 1e3
        self._floor = floor
        self._now = self._spent_ms = 0.0
        self._only_encodes, self._pays_floor = False, True

    def begin(self, moment: Moment) -> None:
        """See `WorkBudget`."""
        self._now, self._spent_ms = moment.now, 0.0
        # why: who decodes beside chats without slack lives on what the steps owe, whatever runs here
        self._pays_floor = not any(s.is_decoding and not s.is_interactive for s in moment.running)
        left = list(moment.owed()) if moment.owed else []
        is_late = needed_share(left, self._now, self._patience_s, self.model) > 0.0
        num_encoded = sum(not each.slices.num_slices for each in left)
        self._only_encodes = is_late and num_encoded <= MOST_ENCODED < len(left)

    def fit_tokens(self, sequence: Sequence, num_wanted: int) -> int:
        """See `WorkBudget`; tokens that are decoded one by one cost least in the steps, with the others'."""
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

    def spend_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """See `WorkBudget`."""
        self._spend(sequence, self._tokens_ms(sequence, num_tokens))

    def take_slices(self, sequence: Sequence, image: Placeholder, num_done: int) -> int:
        """See `WorkBudget`."""

        def cost_ms(count: int) -> float:
            return self.model.slice_ms(image.work(num_done, num_done + count), aside=True)

        left_ms = JOB_MS - self._spent_ms
        count = largest(len(image.slices) - num_done, lambda n: cost_ms(n) <= left_ms)
        count = count or int(not self._spent_ms)
        if count:
            self._spend(sequence, cost_ms(count))
        return count

    def _spend(self, sequence: Sequence, cost_ms: float) -> None:
        self._spent_ms += cost_ms
        if self._pays_floor and not sequence.is_interactive:
            self._floor.pay(cost_ms, self._now)
