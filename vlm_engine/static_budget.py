"""How much a step may do, counted in tokens."""

from collections import Counter
from collections.abc import Sequence as Items

from vlm_engine.budget import Moment
from vlm_engine.fitting import room_for
from vlm_engine.sequence import Placeholder, Sequence


class StaticBudget:
    """A number of tokens, as engines have today; images are encoded whole.

    Background decodes keep one token each, whatever interactive prompts want.

    Args:
        max_num_batched_tokens: Tokens a step, and image tokens encoded in one; one image is always allowed.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.counts: Counter[str] = Counter()
        self._tokens = self._encoder_tokens = self._reserved = self._num_decodes = 0
        self._has_prompt = False

    def begin(self, moment: Moment) -> None:
        """See `WorkBudget`."""
        self._tokens = self._encoder_tokens = self.max_num_batched_tokens
        decodes = [s for s in moment.running if s.is_decoding]
        self._num_decodes = len(decodes)
        self._reserved = min(sum(not s.is_interactive for s in decodes), self._tokens - 1)
        self._has_prompt = False

    def fit_tokens(self, sequence: Sequence, num_wanted: int) -> int:
        """See `WorkBudget`."""
        reserved = self._reserved if sequence.is_interactive else 0
        room = room_for(sequence, self._tokens - reserved, has_prompt=self._has_prompt)
        return max(0, min(num_wanted, room))

    def spend_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """See `WorkBudget`."""
        self._tokens -= num_tokens
        self._has_prompt |= not sequence.is_decoding
        if sequence.is_decoding and not sequence.is_interactive:
            self._reserved = max(0, self._reserved - num_tokens)

    def take_slices(self, sequence: Sequence, image: Placeholder, num_done: int) -> int:
        """See `WorkBudget`."""
        is_first = self._encoder_tokens == self.max_num_batched_tokens
        if not is_first and image.length > self._encoder_tokens:
            return 0
        self._encoder_tokens -= image.length
        return len(image.slices) - num_done

    def take_proposed(self, sequence: Sequence, costs_ms: Items[float]) -> int:
        """See `StepBudget`."""
        count = max(0, min(len(costs_ms), (self._tokens - self._num_decodes) // 2))
        self._tokens -= count
        return count

    @property
    def has_chats(self) -> bool:
        """See `StepBudget`; without a count of milliseconds nothing is spread for their sake."""
        return False

    def fit_turn(self, costs_ms: Items[float]) -> int:
        """See `StepBudget`."""
        return len(costs_ms)

    def spend_turn(self, cost_ms: float) -> None:
        """See `StepBudget`."""
