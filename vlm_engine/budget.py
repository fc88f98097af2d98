"""How much a step may do: counted in tokens, or in milliseconds of an operator's target."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal, Protocol

from vlm_engine.cost_model import CostModel, Road, SliceWork, StepWork
from vlm_engine.fitting import largest, room_for, step_work
from vlm_engine.floor import Floor
from vlm_engine.pace import Owed, needed_share, paced_ms
from vlm_engine.plan import chunk_work
from vlm_engine.sequence import Placeholder, Sequence

MIN_CHUNK = 16
CHAT_CHUNK = 64
# A chat's prompt is spread over so much of the time to its first token, beside chats that decode.
CHAT_PACE = 0.6
# Without a chat a step takes so much of the time to a first token: who comes then waits for its end.
IDLE_SHARE = 0.5

Side = Literal["none", "idle", "busy"]
"""The side thread: of no use to a step, or ready for encoder slices and background prompts, or at work."""


class StepBudget(Protocol):
    """Gives out one step's work, piece by piece, in the order in which it is asked."""

    max_num_batched_tokens: int
    counts: Counter[str]

    def begin(
        self,
        running: Items[Sequence],
        waiting: Items[Sequence],
        now: float,
        longest_ms: float = math.inf,
        owed: Callable[[], Iterable[Owed]] | None = None,
        side: Side = "none",
    ) -> None:
        """Start a step at `now` (seconds on the scheduler's clock), of at most `longest_ms` without chats.

        `owed` tells what background requests have left, in their order; without it they take what fits.
        `side` tells what the side thread does meanwhile.
        """

    def fit_tokens(self, sequence: Sequence, num_wanted: int) -> int:
        """How many of the sequence's next tokens fit, 0 to `num_wanted`.

        Never fewer than `Sequence.num_together` (`num_wanted` is not less) but 0; the first prompt of a
        step may need more of them than `max_num_batched_tokens` for that.
        """

    def fit_slices(self, sequence: Sequence, image: Placeholder, num_done: int) -> int:
        """How many encoder slices of the image, from the first that is not done, fit."""

    @property
    def has_chats(self) -> bool:
        """Whether the step computes tokens that somebody waits for, as far as it is planned."""

    def fit_turn(self, costs_ms: Items[float]) -> int:
        """How many pieces of a detector's turn fit; ``costs_ms[i]`` is what its first ``i + 1`` take."""

    def fit_proposed(self, sequence: Sequence, costs_ms: Items[float]) -> int:
        """How many proposed tokens fit beside a decode; ``costs_ms[i]`` is what the first ``i + 1`` take."""

    def spend_proposed(self, sequence: Sequence, num_tokens: int, cost_ms: float) -> None:
        """Book proposed tokens that the step computes beside a decode."""

    def spend_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """Book tokens that the step computes."""

    def spend_slices(self, sequence: Sequence, image: Placeholder, first: int, last: int) -> None:
        """Book encoder slices ``[first, last)`` that the step runs."""

    def spend_turn(self, cost_ms: float) -> None:
        """Book a detector's turn that the step waits for."""


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
        self._tokens = self._encoder_tokens = self._reserved = self._num_decodes = 0
        self._has_prompt = False

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
        self._tokens, self._encoder_tokens = self.max_num_batched_tokens, self.max_encoder_tokens
        self._num_decodes = sum(s.is_decoding for s in running)
        decodes = sum(s.is_decoding and not s.is_interactive for s in running)
        self._reserved = min(decodes, self._tokens - 1)
        self._has_prompt = False

    def fit_tokens(self, sequence: Sequence, num_wanted: int) -> int:
        """See `StepBudget`."""
        reserved = self._reserved if sequence.is_interactive else 0
        room = room_for(sequence, self._tokens - reserved, has_prompt=self._has_prompt)
        return max(0, min(num_wanted, room))

    def fit_slices(self, sequence: Sequence, image: Placeholder, num_done: int) -> int:
        """See `StepBudget`."""
        is_first = self._encoder_tokens == self.max_encoder_tokens
        fits = is_first or image.length <= self._encoder_tokens
        return len(image.slices) - num_done if fits else 0

    @property
    def has_chats(self) -> bool:
        """See `StepBudget`; without a count of milliseconds nothing is spread for their sake."""
        return False

    def fit_turn(self, costs_ms: Items[float]) -> int:
        """See `StepBudget`."""
        return len(costs_ms)

    def fit_proposed(self, sequence: Sequence, costs_ms: Items[float]) -> int:
        """See `StepBudget`."""
        return max(0, min(len(costs_ms), (self._tokens - self._num_decodes) // 2))

    def spend_proposed(self, sequence: Sequence, num_tokens: int, cost_ms: float) -> None:
        """See `StepBudget`."""
        self._tokens -= num_tokens

    def spend_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """See `StepBudget`."""
        self._tokens -= num_tokens
        self._has_prompt |= not sequence.is_decoding
        if sequence.is_decoding and not sequence.is_interactive:
            self._reserved = max(0, self._reserved - num_tokens)

    def spend_slices(self, sequence: Sequence, image: Placeholder, first: int, last: int) -> None:
        """See `StepBudget`."""
        self._encoder_tokens -= image.length

    def spend_turn(self, cost_ms: float) -> None:
        """See `StepBudget`."""


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """What the operator promises to people who chat.

    Args:
        chat_itl_ms: Milliseconds from one token of a chat to its next.
        chat_ttft_ms: Milliseconds to the first token of a short prompt.
        background_share: Least share of the time that frames get under any chat load, 0 to 1.
        background_ttft_ms: Milliseconds to a frame's first token; what would be in time with less than
            chats leave is spread, so that chats are faster than their target.
    """

    chat_itl_ms: float = 100.0
    chat_ttft_ms: float = 500.0
    background_share: float = 0.1
    background_ttft_ms: float = 4000.0


class TimeBudget:
    """Milliseconds that fit between the last and the next token of the chats that run.

    A chat's next token is due one target after its last one, and token ``i`` not later than
    ``first + i * target``; the first one `chat_ttft_ms` after the request. The step's allowance is
    the smallest slack of the chats that decode, less what predictions err by; background work also
    leaves time to those that wait for a first token. Without a chat, steps are as long as a chat
    that comes may wait.

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
        self.allowance_ms = self.residual_ms = 0.0
        self.floor = Floor(targets.background_share)
        self._reset(0.0)

    def _reset(self, now: float) -> None:
        self._now = now
        self._steps, self._slices = StepWork(), SliceWork()
        self._steps_ms = self._slices_ms = self._turn_ms = 0.0
        self._overruns: set[str] = set()
        self._side: Side = "none"
        self._is_left_aside = False
        self._road: Road = "narrow"
        self._has_prompt = False

    @property
    def predicted_ms(self) -> float:
        """What the step planned so far will take."""
        return self._turn_ms + self._steps_ms + self._slices_ms

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
        self._reset(now)
        decoding = [s for s in running if s.is_interactive and s.is_decoding]
        starting = [s for s in (*running, *waiting) if s.is_interactive and not s.is_decoding]
        self._side, self._road = side, self._road_beside(side, has_chats=bool(decoding or starting))
        self._start_ms = self.model.step_ms(StepWork(), self._road)
        self.floor.begin(now, is_wanted=any(not s.is_interactive for s in (*running, *waiting)))
        self.allowance_ms = min(IDLE_SHARE * self.targets.chat_ttft_ms, longest_ms)
        slack_ms = min((self._slack_ms(chat) for chat in decoding), default=self.allowance_ms)
        self.residual_ms = residual_ms = self.model.residual_ms(slack_ms)
        if decoding:
            self.allowance_ms = max(0.0, slack_ms - residual_ms)
        # why: chats' own prompts are not held to this, else a late one could never start
        slack_ms = min((self._slack_ms(chat) for chat in starting), default=math.inf) - residual_ms
        self._background_allowance_ms = max(0.0, min(self.allowance_ms, slack_ms))
        # invariant: decodes of chats are paid first, whatever stands before them in the order
        self._steps = sum((step_work(chat, 1) for chat in decoding), StepWork())
        self._steps_ms = self.model.step_ms(self._steps, self._road) if decoding else 0.0
        self._pace_ms = self._background_allowance_ms
        self._chat_pace_ms = self.allowance_ms
        if decoding and starting:
            patience_s = CHAT_PACE * self.targets.chat_ttft_ms / 1e3
            share = needed_share(map(_owed_to, starting), now, patience_s, self.model, may_go_aside=False)
            paced = paced_ms(share, self._steps_ms)
            self._chat_pace_ms = min(self.allowance_ms, math.inf if paced is None else self._steps_ms + paced)
        if (decoding or starting) and owed:
            patience_s = self.targets.background_ttft_ms / 1e3
            share = needed_share(owed(), now, patience_s, self.model)
            paced = paced_ms(share, self._steps_ms)
            self._is_left_aside = side != "none" and share == 0.0
            self._pace_ms = min(self._pace_ms, math.inf if paced is None else self._steps_ms + paced)

    def _road_beside(self, side: Side, *, has_chats: bool) -> Road:
        if side == "busy":
            return "loaded"
        return "wide" if self.model.has_side and not has_chats else "narrow"

    def _slack_ms(self, chat: Sequence) -> float:
        """Milliseconds until the chat's next token is due."""
        if chat.first_token_s is None or chat.last_token_s is None:
            return self.targets.chat_ttft_ms - 1e3 * (self._now - chat.arrival_s)
        target_s = self.targets.chat_itl_ms / 1e3
        on_average = chat.first_token_s + chat.num_output_tokens * target_s
        return 1e3 * (min(on_average, chat.last_token_s + target_s) - self._now)

    def fit_tokens(self, sequence: Sequence, num_wanted: int) -> int:
        """See `StepBudget`."""
        together = sequence.num_together
        room = self.max_num_batched_tokens - self._steps.num_tokens
        num_wanted = min(num_wanted, room_for(sequence, room, has_prompt=self._has_prompt))
        if sequence.is_decoding and sequence.is_interactive:
            return 1
        if self._is_left_aside and not (sequence.is_decoding or sequence.is_interactive):
            return 0
        fits, piece = (
            self._most_tokens(sequence, num_wanted, self._pace_of(sequence)),
            max(MIN_CHUNK, together),
        )
        if fits < min(num_wanted, piece):
            fits = min(piece, self._most_tokens(sequence, num_wanted, self._allowance_of(sequence)))
        if fits < min(num_wanted, piece):
            least = max(CHAT_CHUNK if sequence.is_interactive else MIN_CHUNK, together)
            extra_ms = self._overrun_ms(sequence)
            if extra_ms is None:
                return 0
            fits = max(min(num_wanted, least), self._most_tokens(sequence, num_wanted, extra_ms))
        return max(0, fits)

    def _most_tokens(self, sequence: Sequence, num_wanted: int, limit_ms: float) -> int:
        return largest(num_wanted, lambda n: self._with_tokens_ms(sequence, n) <= limit_ms)

    def fit_slices(self, sequence: Sequence, image: Placeholder, num_done: int) -> int:
        """See `StepBudget`."""
        if self._side != "none":
            return 0
        count = self._most_slices(image, num_done, self._pace_of(sequence))
        if not count:
            count = min(1, self._most_slices(image, num_done, self._allowance_of(sequence)))
        if not count:
            extra_ms = self._overrun_ms(sequence)
            count = 0 if extra_ms is None else max(1, self._most_slices(image, num_done, extra_ms))
        return count

    def _most_slices(self, image: Placeholder, num_done: int, limit_ms: float) -> int:
        num_left = len(image.slices) - num_done
        return largest(num_left, lambda n: self._with_slices_ms(image, num_done, num_done + n) <= limit_ms)

    @property
    def has_chats(self) -> bool:
        """See `StepBudget`."""
        return self._steps.num_tokens > 0

    def fit_turn(self, costs_ms: Items[float]) -> int:
        """See `StepBudget`; a piece that is longer than every allowance runs while no chat computes."""
        fits = bisect_right(costs_ms, self._background_allowance_ms - self.predicted_ms)
        return fits or int(not self.has_chats)

    def fit_proposed(self, sequence: Sequence, costs_ms: Items[float]) -> int:
        """See `StepBudget`."""
        fits = bisect_right(costs_ms, self._allowance_of(sequence) - self.predicted_ms)
        # why: decodes that are still to be planned need a token each
        return max(0, min(fits, (self.max_num_batched_tokens - self._steps.num_tokens) // 2))

    def spend_proposed(self, sequence: Sequence, num_tokens: int, cost_ms: float) -> None:
        """See `StepBudget`."""
        self._steps += StepWork(num_tokens)
        self._steps_ms += cost_ms
        self._book(sequence, cost_ms)

    def _allowance_of(self, sequence: Sequence) -> float:
        return self.allowance_ms if sequence.is_interactive else self._background_allowance_ms

    def _pace_of(self, sequence: Sequence) -> float:
        """How long the step may get for the sequence as long as nothing presses.

        why: prompts that would be done in time with less of each step leave the rest to the chats that
        decode; the least piece is given even so, if it fits the allowance.
        """
        return self._chat_pace_ms if sequence.is_interactive else self._pace_ms

    def _with_tokens_ms(self, sequence: Sequence, num_tokens: int) -> float:
        """What the step will take with the next `num_tokens` of the sequence as well."""
        return self.predicted_ms + self._tokens_ms(sequence, num_tokens)

    def _tokens_ms(self, sequence: Sequence, num_tokens: int) -> float:
        """What tokens add to the forward pass."""
        alone_ms = self.model.step_ms(step_work(sequence, num_tokens), self._road)
        # why: the model is linear, so that pieces add up, but a step starts only once
        return alone_ms - (self._start_ms if self._steps.num_tokens else 0.0)

    def _with_slices_ms(self, image: Placeholder, first: int, last: int) -> float:
        """What the step will take with slices ``[first, last)`` of the image as well."""
        return self.predicted_ms + self.model.slice_ms(image.work(first, last))

    def _overrun_ms(self, sequence: Sequence) -> float | None:
        """How long the step may get for a sequence that does not fit; None for not at all.

        A least piece is given even over that; at most one a class and step.

        why: a step without anything else must do something; background work keeps its share under
        any load; and a chat that waits for its next token is not held up for ever by chats that the
        machine cannot serve in time anyway.
        """
        if not self._steps.num_tokens and not self._slices.num_slices:
            return 0.0
        if sequence.is_interactive:
            waited_since = sequence.arrival_s if sequence.last_token_s is None else sequence.last_token_s
            is_due = 1e3 * (self._now - waited_since) >= self.targets.chat_ttft_ms / 2
            return self.predicted_ms if is_due and self._open("chat") else None
        owed_ms = self.floor.owed_ms(self._now)
        return self.predicted_ms + owed_ms if owed_ms >= 0 and self._open("floor") else None

    def _open(self, kind: str) -> bool:
        """Take the step's one overrun of a kind."""
        is_new = kind not in self._overruns
        self._overruns.add(kind)
        return is_new

    def spend_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """See `StepBudget`."""
        if not (sequence.is_decoding and sequence.is_interactive):
            cost_ms = self._tokens_ms(sequence, num_tokens)
            self._steps += step_work(sequence, num_tokens)
            self._steps_ms += cost_ms
            self._has_prompt |= not sequence.is_decoding
            self._book(sequence, cost_ms)

    def spend_slices(self, sequence: Sequence, image: Placeholder, first: int, last: int) -> None:
        """See `StepBudget`."""
        cost_ms = self.model.slice_ms(image.work(first, last))
        self._slices += image.work(first, last)
        self._slices_ms += cost_ms
        self._book(sequence, cost_ms)

    def spend_turn(self, cost_ms: float) -> None:
        """See `StepBudget`."""
        self._turn_ms += cost_ms

    def _book(self, sequence: Sequence, cost_ms: float) -> None:
        kind = "chat" if sequence.is_interactive else "floor"
        if kind in self._overruns and self.predicted_ms > self.allowance_ms:
            self.counts[f"{kind}_overruns"] += 1
        if not sequence.is_interactive:
            self.floor.pay(cost_ms, self._now)


def _owed_to(chat: Sequence) -> Owed:
    """What a chat's prompt has left; of its pictures all, encoded or not."""
    start, end = chat.num_computed_tokens, chat.num_tokens
    images = chat.images_between(start, end)
    slices = sum((image.work(0, len(image.slices)) for image in images), SliceWork())
    return Owed(chat.arrival_s, None, chunk_work(start, end, samples=True), slices)
