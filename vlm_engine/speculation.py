"""Speculative decoding by prompt lookup: what a text said after its last words before, it may say again.

A step can compute several tokens of a sequence for little more than one, as it mostly waits for weights.
Tokens found by lookup are computed beside the newest one, and the run of them that the model itself would
have said is taken over. How many are proposed follows from what they take and from how often they were right,
of this sequence and of all; pure Python.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import accumulate, islice, takewhile

from vlm_engine.config import SpeculativeConfig
from vlm_engine.cost_model import LinearModel
from vlm_engine.lookup import Earlier, Lookup
from vlm_engine.plan import Chunk
from vlm_engine.request import FinishReason
from vlm_engine.sequence import Sequence

TRIAL_SHARE = 0.01
TRIAL_EVERY = 64
"""Share of the time for proposals that are not expected to be worth it, to learn whether they are; one in so
many steps is made even if it seems to take more, as what it takes is learned by that too."""
TRUST = 4.0
"""How many proposals the experience with all sequences, and the first guess for these, are worth."""
FIRST_GUESS = 0.5
KEPT = 0.95
FIRST_COST = 0.03
"""What one more token takes of a step until some steps with proposals were measured."""
NUM_FIRST = 8
LEARN_EVERY = 32
PATIENCE = 4
MOST_RESTS = 3
"""After so many looks for nothing every second step is looked at, then every third, then every fourth.

why: after a model's pass, which leaves others no cache, a look takes 20 us, some percent of a small step."""


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counts since the start, under vLLM's names.

    Args:
        num_drafts: Steps of a sequence for which tokens were proposed.
        num_draft_tokens: Tokens proposed.
        num_accepted_tokens: How many of them were right.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def after(self, earlier: "SpeculationStats") -> "SpeculationStats":
        """These counts with those of an earlier engine added."""
        return SpeculationStats(
            earlier.num_drafts + self.num_drafts,
            earlier.num_draft_tokens + self.num_draft_tokens,
            earlier.num_accepted_tokens + self.num_accepted_tokens,
        )


@dataclass(slots=True)
class Odds:
    """How often the next token of a proposal was right; older experience counts less."""

    num_right: float = FIRST_GUESS * TRUST
    num_tried: float = TRUST

    def book(self, num_right: int, num_tried: int) -> None:
        """Add what a proposal taught."""
        self.num_right = KEPT * self.num_right + num_right
        self.num_tried = KEPT * self.num_tried + num_tried

    def given(self, common: "Odds") -> float:
        """Probability that the next token is right, where `common` is what is known of others."""
        known = TRUST * common.num_right / common.num_tried
        return (self.num_right + known) / (self.num_tried + TRUST)


class DecodeCosts:
    """What steps of nothing but decodes take, and what proposed tokens add; learned by measuring."""

    def __init__(self) -> None:
        self._model: LinearModel | None = None
        self._num_seen = self._num_with_proposals = 0

    def learn(self, chunks: Items[Chunk], measured_ms: float) -> None:
        """Learn from a step; those with other work, and most of those without proposals, tell nothing."""
        self._num_seen += 1
        num_proposed = sum(len(chunk.proposed) for chunk in chunks)
        if not num_proposed and self._num_seen % LEARN_EVERY:
            return
        if any(chunk.end - chunk.start != 1 for chunk in chunks):
            return
        if self._model is None:
            self._model = LinearModel((measured_ms, 0.0, 0.0, FIRST_COST * measured_ms))
        self._num_with_proposals += bool(num_proposed)
        num_context = sum(chunk.end for chunk in chunks)
        self._model.learn(_features(len(chunks), num_context, num_proposed), measured_ms)

    def step_ms(self, decodes: Items[Sequence]) -> float:
        """What a step of these decodes takes; 1 as long as nothing was measured."""
        if self._model is None:
            return 1.0
        return self._model.predict(_features(len(decodes), sum(each.num_tokens for each in decodes), 0))

    def token_ms(self, step_ms: float) -> float:
        """What a proposed token adds to a step of `step_ms`."""
        if self._model is None or self._num_with_proposals < NUM_FIRST:
            return FIRST_COST * step_ms
        return self._model.weights[-1]


def _features(num_decodes: int, num_context: int, num_proposed: int) -> tuple[float, ...]:
    return (1.0, num_decodes / 8, num_context / 4096, float(num_proposed))


@dataclass(slots=True)
class _Course:
    """What is kept of a sequence between its steps."""

    lookup: Lookup
    barred: frozenset[int]
    odds: Odds = field(default_factory=lambda: Odds(0.0, 0.0))
    common: Odds = field(default_factory=Odds)
    num_waited: int = 0
    num_missed: int = 0
    num_rests: int = 0

    def looked(self, *, is_worth: bool) -> None:
        """Book whether a look was worth it, and rest for some steps after many that were not."""
        self.num_missed = 0 if is_worth else self.num_missed + 1
        self.num_rests = min(self.num_missed // PATIENCE, MOST_RESTS)


class Speculator:
    """Proposes tokens for sequences that decode, as many as are worth their time.

    A proposal costs every sequence of the step its extra time and saves its own sequence steps. One that is
    not expected to be worth it is made only now and then, of a single token, out of a hundredth of the time.

    Args:
        config: How far to look and how much to propose.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._courses: dict[str, _Course] = {}
        self._common: dict[tuple[bool, int], Odds] = {}
        self._earlier = Earlier(config.max_cached_answers) if config.max_cached_answers else None
        self._running: Items[Sequence] = ()
        self._times: tuple[float, float] | None = None
        self.costs = DecodeCosts()
        self.stats = SpeculationStats()

    def begin(self, running: Items[Sequence]) -> None:
        """Start a step with the sequences that run."""
        self._running, self._times = running, None

    def propose(
        self, sequence: Sequence, room: Callable[[], int], take: Callable[[Items[float]], int]
    ) -> tuple[int, ...]:
        """Tokens that may follow the newest one of a sequence that decodes, often none.

        Args:
            sequence: It decodes in the step being planned.
            room: How many positions there is memory for.
            take: Books as many of some tokens as fit the step, of which the first ``i + 1`` take
                ``costs_ms[i]``; tells how many.
        """
        num_left = sequence.max_tokens - sequence.num_output_tokens - 1
        most = min(num_left, self._config.num_speculative_tokens)
        if most < 1:
            return ()
        course = self._course(sequence)
        course.num_waited += 1
        if course.num_rests:
            course.num_rests -= 1
            return ()
        found, followed = course.lookup.find(sequence.token_ids, most)
        if not found:
            course.looked(is_worth=False)
            return ()
        likely = takewhile(lambda token_id: token_id not in course.barred, followed)
        proposed = tuple(islice(likely, max(0, room())))
        if not proposed:
            return ()
        course.common = self._common.setdefault((sequence.is_interactive, found), Odds())
        costs_ms = self._costs_of(len(proposed))
        share_ms = self._step_times()[1]
        num_worth = _num_worth(course, costs_ms, share_ms)
        course.looked(is_worth=num_worth > 0)
        count = num_worth or _num_tried(course, costs_ms, share_ms)
        return proposed[: take(costs_ms[:count])] if count else ()

    def _costs_of(self, num_proposed: int) -> list[float]:
        """What the first, the first two, ... of some proposed tokens take."""
        token_ms = self.costs.token_ms(self._step_times()[0])
        return [token_ms * count for count in range(1, num_proposed + 1)]

    def _step_times(self) -> tuple[float, float]:
        """What the decodes of the step being planned take, together and each its share."""
        if self._times is None:
            decodes = [sequence for sequence in self._running if sequence.is_decoding]
            step_ms = self.costs.step_ms(decodes)
            self._times = step_ms, step_ms / max(1, len(decodes))
        return self._times

    def _course(self, sequence: Sequence) -> _Course:
        course = self._courses.get(sequence.request_id)
        if course is None:
            # why: a place for a picture is no word that a model would say
            barred = frozenset(sequence.token_ids[image.start] for image in sequence.placeholders)
            # why: of pictures much the same is said again and again, and what is said in a chat stays there
            others = None if sequence.is_interactive else self._earlier
            config = self._config
            lookup = Lookup(config.prompt_lookup_min, config.prompt_lookup_max, others)
            course = self._courses[sequence.request_id] = _Course(lookup, barred)
        return course

    def book(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        """Learn how a proposal for a sequence went."""
        course = self._course(sequence)
        num_tried = min(num_accepted + 1, num_proposed)
        for odds in (course.odds, course.common):
            odds.book(num_accepted, num_tried)
        self.stats = SpeculationStats(1, num_proposed, num_accepted).after(self.stats)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Drop what is kept of a sequence, but for what later ones may look in."""
        self._courses.pop(sequence.request_id, None)
        if self._earlier is not None and not sequence.is_interactive and reason in ("stop", "length"):
            first = max(0, sequence.num_prompt_tokens - self._config.prompt_lookup_max)
            self._earlier.add(sequence.token_ids[first:])


def _num_worth(course: _Course, costs_ms: list[float], share_ms: float) -> int:
    """How many of the proposed tokens gain the most time; 0 where none gains any."""
    rate = course.odds.given(course.common)
    expected = accumulate(rate ** (index + 1) for index in range(len(costs_ms)))
    gains_ms = [num * share_ms - cost_ms for num, cost_ms in zip(expected, costs_ms, strict=True)]
    best = max(gains_ms, default=0.0)
    return gains_ms.index(best) + 1 if best > 0 else 0


def _num_tried(course: _Course, costs_ms: list[float], share_ms: float) -> int:
    """One token for a trial that can be paid by now, or is due anyway."""
    is_paid = course.num_waited * TRIAL_SHARE * share_ms >= costs_ms[0]
    if not is_paid and course.num_waited < TRIAL_EVERY:
        return 0
    course.num_waited = 0
    return 1
