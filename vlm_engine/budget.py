"""How much a step may do: counted in tokens, or in milliseconds of an operator's target."""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from vlm_engine.cost_model import CostModel, SliceWork, StepWork
from vlm_engine.plan import Chunk
from vlm_engine.sequence import Placeholder, Sequence

MIN_CHUNK = 16
CHAT_CHUNK = 64


class StepBudget(Protocol):
    """Gives out one step's work, piece by piece, in the order in which it is asked."""

    max_num_batched_tokens: int
    counts: Counter[str]

    def begin(self, running: Items[Sequence], now: float) -> None:
        """Start a step at `now` (seconds on the scheduler's clock)."""

    def fit_tokens(self, sequence: Sequence, num_wanted: int) -> int:
        """How many of the sequence's next tokens fit, 0 to `num_wanted`."""

    def fit_slices(self, sequence: Sequence, image: Placeholder, num_done: int) -> int:
        """How many encoder slices of the image, from the first that is not done, fit."""

    def spend_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """Book tokens that the step computes."""

    def spend_slices(self, sequence: Sequence, image: Placeholder, first: int, last: int) -> None:
        """Book encoder slices ``[first, last)`` that the step runs."""


class StaticBudget:
    """A number of tokens, as engines have today; images are encoded whole.

    Background decodes keep one token each, whatever interactive prompts want.

    Args:
        max_num_batched_tokens: Tokens a step.
        max_encoder_tokens: Image tokens encoded in a step; one image is always allowed.
    """

    def __init__(self, max_num_batched_tokens: int, max_encoder_tokens: int | None = None) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_encoder_tokens = max_encoder_tokens or max_num_batched_tokens
        self.counts: Counter[str] = Counter()
        self._tokens = self._encoder_tokens = self._reserved = 0

    def begin(self, running: Items[Sequence], now: float) -> None:
        """See `StepBudget`."""
        self._tokens, self._encoder_tokens = self.max_num_batched_tokens, self.max_encoder_tokens
        decodes = sum(s.is_decoding and not s.is_interactive for s in running)
        self._reserved = min(decodes, self._tokens - 1)

    def fit_tokens(self, sequence: Sequence, num_wanted: int) -> int:
        """See `StepBudget`."""
        reserved = self._reserved if sequence.is_interactive else 0
        return max(0, min(num_wanted, self._tokens - reserved))

    def fit_slices(self, sequence: Sequence, image: Placeholder, num_done: int) -> int:
        """See `StepBudget`."""
        is_first = self._encoder_tokens == self.max_encoder_tokens
        fits = is_first or image.length <= self._encoder_tokens
        return len(image.slices) - num_done if fits else 0

    def spend_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """See `StepBudget`."""
        self._tokens -= num_tokens
        if sequence.is_decoding and not sequence.is_interactive:
            self._reserved = max(0, self._reserved - num_tokens)

    def spend_slices(self, sequence: Sequence, image: Placeholder, first: int, last: int) -> None:
        """See `StepBudget`."""
        self._encoder_tokens -= image.length


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """What the operator promises to people who chat.

    Args:
        chat_itl_ms: Milliseconds from one token of a chat to its next.
        chat_ttft_ms: Milliseconds to the first token of a short prompt.
        background_share: Least share of the time that frames get under any chat load, 0 to 1.
    """

    chat_itl_ms: float = 100.0
    chat_ttft_ms: float = 500.0
    background_share: float = 0.1


class TimeBudget:
    """Milliseconds that fit between the last and the next token of the chats that run.

    A chat's next token is due one target after its last one, and token ``i`` not later than
    ``first + i * target``. The step's allowance is the smallest slack of all chats less what
    predictions err by. Without a chat, steps are as long as a chat that comes may wait.

    Args:
        model: Predicts what a piece of work takes.
        targets: What chats are promised.
        max_num_batched_tokens: Most tokens a step, whatever the time allows.
    """

    def __init__(self, model: CostModel, targets: LatencyTargets, max_num_batched_tokens: int) -> None:
        self.model = model
        self.targets = targets
        self.max_num_batched_tokens = max_num_batched_tokens
        self.counts: Counter[str] = Counter()
        self.allowance_ms = 0.0
        self._floor_due_s = 0.0
        self._reset(0.0)

    def _reset(self, now: float) -> None:
        self._now = now
        self._steps, self._slices = StepWork(), SliceWork()
        self._background_ms = 0.0
        self._overruns: set[str] = set()

    @property
    def predicted_ms(self) -> float:
        """What the step planned so far will take."""
        return self._predict(StepWork(), SliceWork())

    def begin(self, running: Items[Sequence], now: float) -> None:
        """See `StepBudget`."""
        self._reset(now)
        chats = [s for s in running if s.is_interactive and s.num_output_tokens]
        slack_ms = min((self._slack_ms(chat, now) for chat in chats), default=None)
        if slack_ms is None:
            self.allowance_ms = self.targets.chat_ttft_ms / 2
        else:
            self.allowance_ms = max(0.0, slack_ms - self.model.residual_ms)
        # invariant: decodes of chats are paid first, whatever stands before them in the order
        for chat in chats:
            if chat.is_decoding:
                self._steps += _step_work(chat, 1)

    def _slack_ms(self, chat: Sequence, now: float) -> float:
        assert chat.first_token_s is not None, "decodes without a first token"
        assert chat.last_token_s is not None, "decodes without a last token"
        target_s = self.targets.chat_itl_ms / 1e3
        on_average = chat.first_token_s + chat.num_output_tokens * target_s
        return 1e3 * (min(on_average, chat.last_token_s + target_s) - now)

    def fit_tokens(self, sequence: Sequence, num_wanted: int) -> int:
        """See `StepBudget`."""
        num_wanted = min(num_wanted, self.max_num_batched_tokens - self._steps.num_tokens)
        if sequence.is_decoding and sequence.is_interactive:
            return 1
        fits = _largest(num_wanted, lambda n: self._fits(_step_work(sequence, n), SliceWork()))
        if fits < min(num_wanted, MIN_CHUNK):
            least = CHAT_CHUNK if sequence.is_interactive else MIN_CHUNK
            fits = min(num_wanted, least) if self._may_overrun(sequence) else 0
        return max(0, fits)

    def fit_slices(self, sequence: Sequence, image: Placeholder, num_done: int) -> int:
        """See `StepBudget`."""
        left = image.slices[num_done:]
        work, count = SliceWork(), 0
        for part in left:
            work += part
            if not self._fits(StepWork(), work):
                break
            count += 1
        return count or int(self._may_overrun(sequence))

    def _fits(self, step: StepWork, slices: SliceWork) -> bool:
        return self._predict(step, slices) <= self.allowance_ms

    def _predict(self, step: StepWork, slices: SliceWork) -> float:
        steps, all_slices = self._steps + step, self._slices + slices
        step_ms = self.model.step_ms(steps) if steps.num_tokens else 0.0
        return step_ms + (self.model.slice_ms(all_slices) if all_slices.num_slices else 0.0)

    def _may_overrun(self, sequence: Sequence) -> bool:
        """Whether a least piece is given although it does not fit; at most one a class and step.

        why: a step without anything else must do something; background work keeps its share under
        any load; and a chat that waits for its first token is not held up for ever by chats that the
        machine cannot serve in time anyway.
        """
        if not self._steps.num_tokens and not self._slices.num_slices:
            return True
        if sequence.is_interactive:
            waited_ms = 1e3 * (self._now - sequence.arrival_s)
            is_due = sequence.first_token_s is None and waited_ms >= self.targets.chat_ttft_ms / 2
            return is_due and self._open("chat")
        return self._now >= self._floor_due_s and self._open("floor")

    def _open(self, kind: str) -> bool:
        """Take the step's one overrun of a kind."""
        if kind in self._overruns:
            return False
        self._overruns.add(kind)
        self.counts[f"{kind}_overruns"] += 1
        return True

    def spend_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """See `StepBudget`."""
        if sequence.is_decoding and sequence.is_interactive:
            return
        before = self.predicted_ms
        self._steps += _step_work(sequence, num_tokens)
        self._book(sequence, self.predicted_ms - before)

    def spend_slices(self, sequence: Sequence, image: Placeholder, first: int, last: int) -> None:
        """See `StepBudget`."""
        before = self.predicted_ms
        self._slices = sum(image.slices[first:last], self._slices)
        self._book(sequence, self.predicted_ms - before)

    def _book(self, sequence: Sequence, cost_ms: float) -> None:
        """Background work of c milliseconds buys the chats c / share without more of it."""
        if sequence.is_interactive:
            return
        self._background_ms += cost_ms
        self._floor_due_s = self._now + self._background_ms / 1e3 / self.targets.background_share


def _step_work(sequence: Sequence, num_tokens: int) -> StepWork:
    """The next `num_tokens` of a sequence as the cost model sees them."""
    start = sequence.num_computed_tokens
    return Chunk(sequence, start, start + num_tokens).work


def _largest(high: int, fits: Callable[[int], bool]) -> int:
    """Largest n up to `high` for which ``fits(n)`` holds, 0 if none; `fits` is monotone."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
