"""How much a step may do: milliseconds of an operator's target."""

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
from vlm_engine.pace import Owed, needed_share, owed_by, paced_ms
from vlm_engine.sequence import Placeholder, Sequence

MIN_CHUNK = 16
CHAT_CHUNK = 64
CHAT_PACE = 0.6
"""A chat's prompt is spread over so much of the time to its first token, beside chats that decode."""
MOST_BEHIND = 4
"""A late chat makes up for so many targets at most: frames would pay for a stall's seconds."""
IDLE_SHARE = 0.5
"""Without a chat a step takes so much of the time to a first token: who comes then waits for its end."""

Side = Literal["none", "idle", "busy"]
"""The side thread: of no use to a step, or ready for encoder slices and background prompts, or at work."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a budget is told when a step begins.

    Args:
        running: Sequences that run.
        waiting: Sequences that do not yet.
        now: Seconds on the scheduler's clock.
        longest_ms: How long the step may be without chats.
        owed: Tells what background requests have left, in their order; without it they take what fits.
        side: What the side thread does meanwhile.
    """

    running: Items[Sequence]
    waiting: Items[Sequence]
    now: float
    longest_ms: float = math.inf
    owed: Callable[[], Iterable[Owed]] | None = None
    side: Side = "none"


class WorkBudget(Protocol):
    """Gives out one plan's work, piece by piece, in the order in which it is asked."""

    max_num_batched_tokens: int

    def begin(self, moment: Moment) -> None:
        """Start a plan."""

    def fit_tokens(self, sequence: Sequence, num_wanted: int) -> int:
        """How many of the sequence's next tokens fit, 0 to `num_wanted`.

        Never fewer than `Sequence.num_together` (`num_wanted` is not less) but 0; the first prompt of a
        step may need more of them than `max_num_batched_tokens` for that.
        """

    def spend_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """Book tokens that the plan computes."""

    def take_slices(self, sequence: Sequence, image: Placeholder, num_done: int) -> int:
        """Book as many encoder slices of the image as fit, from the first that is not done; how many."""


class StepBudget(WorkBudget, Protocol):
    """The same of a step, which detectors wait for as well, and which decodes may add proposed tokens to."""

    counts: Counter[str]

    def take_proposed(self, sequence: Sequence, costs_ms: Items[float]) -> int:
        """Book proposed tokens beside a decode; ``costs_ms[i]`` is what the first ``i + 1`` take."""

    @property
    def has_chats(self) -> bool:
        """Whether the step computes tokens that somebody waits for, as far as it is planned."""

    def fit_turn(self, costs_ms: Items[float]) -> int:
        """How many pieces of a detector's turn fit; ``costs_ms[i]`` is what its first ``i + 1`` take."""

    def spend_turn(self, cost_ms: float) -> None:
        """Book a detector's turn that the step waits for."""


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
    ``first + i * target``, moved by what is more than `MOST_BEHIND` targets late; the first one
    `chat_ttft_ms` after the request. The step's allowance is
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
        self.predicted_ms = 0.0
        """What the step planned so far will take."""
        self._num_tokens = self._num_slices = 0

    def begin(self, moment: Moment) -> None:
        """See `WorkBudget`."""
        self._now, self._side = moment.now, moment.side
        everyone = (*moment.running, *moment.waiting)
        chats = [s for s in everyone if s.is_interactive]
        decoding = [s for s in chats if s.is_decoding]
        starting = [s for s in chats if not s.is_decoding]
        self._road = self._road_beside(has_chats=bool(chats))
        self._start_ms = self.model.step_ms(StepWork(), self._road)
        self.floor.begin(self._now, is_wanted=len(chats) < len(everyone))
        # invariant: decodes of chats are paid first, whatever stands before them in the order
        paid = sum((step_work(chat, 1) for chat in decoding), StepWork())
        self.predicted_ms = self.model.step_ms(paid, self._road) if decoding else 0.0
        self._num_tokens, self._num_slices = paid.num_tokens, 0
        self._has_prompt = False
        self._overruns: set[str] = set()
        self._allow(decoding, starting, moment.longest_ms)
        self._spread(decoding, starting, moment.owed)

    def _road_beside(self, *, has_chats: bool) -> Road:
        if self._side == "busy":
            return "loaded"
        return "wide" if self.model.has_side and not has_chats else "narrow"

    def _allow(self, decoding: Items[Sequence], starting: Items[Sequence], longest_ms: float) -> None:
        """How long the step may be: for chats, and for background work."""
        self.allowance_ms = min(IDLE_SHARE * self.targets.chat_ttft_ms, longest_ms)
        slack_ms = min(map(self._slack_ms, decoding), default=self.allowance_ms)
        self.residual_ms = self.model.residual_ms(slack_ms)
        if decoding:
            self.allowance_ms = max(0.0, slack_ms - self.residual_ms)
        # why: chats' own prompts are not held to this, else a late one could never start
        slack_ms = min(map(self._slack_ms, starting), default=math.inf) - self.residual_ms
        self._background_allowance_ms = max(0.0, min(self.allowance_ms, slack_ms))

    def _spread(
        self,
        decoding: Items[Sequence],
        starting: Items[Sequence],
        owed: Callable[[], Iterable[Owed]] | None,
    ) -> None:
        """How long the step may get for prompts as long as nothing presses.

        why: prompts that would be done in time with less of each step leave the rest to the chats that
        decode; the least piece is given even so, if it fits the allowance.
        """
        chat_share = share = 1.0
        if decoding and starting:
            patience_s = CHAT_PACE * self.targets.chat_ttft_ms / 1e3
            chats = map(_owed_to, starting)
            chat_share = needed_share(chats, self._now, patience_s, self.model, may_go_aside=False)
        if (decoding or starting) and owed:
            patience_s = self.targets.background_ttft_ms / 1e3
            share = needed_share(owed(), self._now, patience_s, self.model)
        self._chat_pace_ms = min(self.allowance_ms, paced_ms(chat_share, self.predicted_ms))
        self._pace_ms = min(self._background_allowance_ms, paced_ms(share, self.predicted_ms))
        self._is_left_aside = self._side != "none" and share == 0.0

    def _slack_ms(self, chat: Sequence) -> float:
        """Milliseconds until the chat's next token is due, with more than `MOST_BEHIND` forgiven."""
        if chat.first_token_s is None or chat.last_token_s is None:
            return self.targets.chat_ttft_ms - 1e3 * (self._now - chat.arrival_s)
        target_s = self.targets.chat_itl_ms / 1e3
        on_average = chat.first_token_s + chat.forgiven_s + chat.num_output_tokens * target_s
        behind_s = chat.last_token_s + target_s - on_average
        forgiven_s = max(0.0, behind_s - MOST_BEHIND * target_s)
        chat.forgiven_s += forgiven_s
        return 1e3 * (chat.last_token_s + target_s - max(0.0, behind_s - forgiven_s) - self._now)

    def fit_tokens(self, sequence: Sequence, num_wanted: int) -> int:
        """See `WorkBudget`."""
        is_chat, together = sequence.is_interactive, sequence.num_together
        if sequence.is_decoding and is_chat:
            return 1
        if self._is_left_aside and not (sequence.is_decoding or is_chat):
            return 0
        room = self.max_num_batched_tokens - self._num_tokens
        num_wanted = min(num_wanted, room_for(sequence, room, has_prompt=self._has_prompt))
        piece, least = max(MIN_CHUNK, together), max(CHAT_CHUNK if is_chat else MIN_CHUNK, together)
        return self._fit(sequence, num_wanted, piece, least, lambda n: self._tokens_ms(sequence, n))

    def take_slices(self, sequence: Sequence, image: Placeholder, num_done: int) -> int:
        """See `WorkBudget`."""
        if self._side != "none":
            return 0

        def cost_ms(count: int) -> float:
            return self.model.slice_ms(image.work(num_done, num_done + count))

        count = self._fit(sequence, len(image.slices) - num_done, 1, 1, cost_ms)
        if count:
            self._num_slices += count
            self._book(sequence, cost_ms(count))
        return count

    def _fit(
        self, sequence: Sequence, num_wanted: int, piece: int, least: int, cost_ms: Callable[[int], float]
    ) -> int:
        """As much as the pace leaves room for, else a `piece` within the allowance, else an overrun's."""
        is_chat, spent_ms = sequence.is_interactive, self.predicted_ms

        def most(limit_ms: float) -> int:
            return largest(num_wanted, lambda count: spent_ms + cost_ms(count) <= limit_ms)

        piece = min(num_wanted, piece)
        fits = most(self._chat_pace_ms if is_chat else self._pace_ms)
        if fits < piece:
            fits = min(piece, most(self._allowance_of(sequence)))
        if fits >= piece:
            return fits
        extra_ms = self._overrun_ms(sequence)
        return 0 if extra_ms is None else max(min(num_wanted, least), most(extra_ms))

    def _allowance_of(self, sequence: Sequence) -> float:
        return self.allowance_ms if sequence.is_interactive else self._background_allowance_ms

    def _tokens_ms(self, sequence: Sequence, num_tokens: int) -> float:
        """What tokens add to the forward pass."""
        alone_ms = self.model.step_ms(step_work(sequence, num_tokens), self._road)
        # why: the model is linear, so that pieces add up, but a step starts only once
        return alone_ms - (self._start_ms if self._num_tokens else 0.0)

    def _overrun_ms(self, sequence: Sequence) -> float | None:
        """How long the step may get for a sequence that does not fit; None for not at all.

        A least piece is given even over that; at most one a class and step.

        why: a step without anything else must do something; background work keeps its share under
        any load; and a chat that waits for its next token is not held up for ever by chats that the
        machine cannot serve in time anyway.
        """
        if not self._num_tokens and not self._num_slices:
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
        """See `WorkBudget`."""
        if not (sequence.is_decoding and sequence.is_interactive):
            cost_ms = self._tokens_ms(sequence, num_tokens)
            self._num_tokens += num_tokens
            self._has_prompt |= not sequence.is_decoding
            self._book(sequence, cost_ms)

    def take_proposed(self, sequence: Sequence, costs_ms: Items[float]) -> int:
        """See `StepBudget`."""
        fits = bisect_right(costs_ms, self._allowance_of(sequence) - self.predicted_ms)
        # why: decodes that are still to be planned need a token each
        count = max(0, min(fits, (self.max_num_batched_tokens - self._num_tokens) // 2))
        if count:
            self._num_tokens += count
            self._book(sequence, costs_ms[count - 1])
        return count

    @property
    def has_chats(self) -> bool:
        """See `StepBudget`."""
        return self._num_tokens > 0

    def fit_turn(self, costs_ms: Items[float]) -> int:
        """See `StepBudget`; a piece that is longer than every allowance runs while no chat computes."""
        fits = bisect_right(costs_ms, self._background_allowance_ms - self.predicted_ms)
        return fits or int(not self.has_chats)

    def spend_turn(self, cost_ms: float) -> None:
        """See `StepBudget`."""
        self.predicted_ms += cost_ms

    def _book(self, sequence: Sequence, cost_ms: float) -> None:
        self.predicted_ms += cost_ms
        kind = "chat" if sequence.is_interactive else "floor"
        if kind in self._overruns and self.predicted_ms > self.allowance_ms:
            self.counts[f"{kind}_overruns"] += 1
        if not sequence.is_interactive:
            self.floor.pay(cost_ms, self._now)


def _owed_to(chat: Sequence) -> Owed:
    """What a chat's prompt has left; of its pictures all, encoded or not."""
    return owed_by(chat, sum((image.work(0, len(image.slices)) for image in chat.images_left), SliceWork()))
