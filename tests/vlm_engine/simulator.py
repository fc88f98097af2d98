"""The real scheduler on a simulated clock and device: minutes of traffic in a second of CPU."""

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count

from tests.vlm_engine.builders import image, make_sequence
from vlm_engine.block_pool import BlockPool
from vlm_engine.budget import LatencyTargets, StepBudget, TimeBudget
from vlm_engine.cost_model import CostModel, Road, SliceWork, StepWork
from vlm_engine.encoder_cache import EncoderCache
from vlm_engine.plan import StepPlan
from vlm_engine.scheduler import Scheduler
from vlm_engine.sequence import Placeholder, Sequence, Status
from vlm_engine.side_budget import SideBudget
from vlm_engine.slices import TowerLayout, cut
from vlm_engine.static_budget import StaticBudget
from vlm_engine.turn import Turn
from vlm_engine.turn_queue import TurnQueue

# Milliseconds of a 2-core machine with the 210 M model of the benchmarks, as `StepWork.features`.
STEP_TRUTH = (14.0, 38.0, 6.0, 3.0, 9.0)
ENCODER_TRUTH = (0.4, 9.0, 22.0, 30.0, 8.0)
# What steps take on each road, and slices aside, of what they take on one core, or on all.
STEP_ROADS: dict[Road, float] = {"narrow": 1.0, "loaded": 1.25, "wide": 0.7, "aside": 1.2}
SLICE_ASIDE = 1.7


@cache
def slices_of(num_patches: int) -> tuple[SliceWork, ...]:
    """The encoder's work on an image; a frame of 1280x720 has 4784 patches."""
    windows = (*range(64, num_patches, 64), num_patches)
    layout = TowerLayout(num_patches, 4, (num_patches,), windows, (False, False, False, True) * 2, (7,))
    return tuple(part.work for part in cut(layout, 512))


def picture_of(start: int, num_patches: int, content: str) -> Placeholder:
    plain = image(start, num_patches // 4, content)
    return replace(plain, slices=slices_of(num_patches))


SLICES = slices_of(4784)


@dataclass(frozen=True, slots=True)
class Step:
    """What was planned and what came of it; `late_ms` of the chat that waited longest."""

    at_s: float
    predicted_ms: float
    measured_ms: float
    allowance_ms: float
    residual_ms: float
    is_overrun: bool
    num_decodes: int
    late_ms: float
    decodes_ms: float
    background_ms: float
    wants_background: bool


@dataclass
class Truth:
    """What steps really take; `slowdown` is a machine that gets slower, `noise` the spread."""

    seed: int = 0
    noise: float = 0.05
    slowdown: float = 1.0
    model: CostModel = field(default_factory=lambda: CostModel(STEP_TRUTH, ENCODER_TRUTH))
    has_side: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def step_ms(self, work: StepWork, road: Road = "narrow") -> float:
        return self._spread() * STEP_ROADS[road] * self.model.step_ms(work) if work.num_tokens else 0.0

    def slice_ms(self, work: SliceWork, road: Road = "narrow") -> float:
        factor = SLICE_ASIDE if road == "aside" else 1.0
        return self._spread() * factor * self.model.slice_ms(work) if work.num_slices else 0.0

    def _spread(self) -> float:
        return self.slowdown * self._random.lognormvariate(0.0, self.noise)


class Simulator:
    """Events in time order, a scheduler, and what its chats and frames felt."""

    def __init__(
        self,
        budget: str = "latency",
        *,
        truth: Truth | None = None,
        turns: TurnQueue | None = None,
        num_blocks: int = 2000,
        num_chat_blocks: int = 0,
        max_num_seqs: int = 32,
        **targets: float,
    ) -> None:
        self.now = 0.0
        self.truth = truth or Truth()
        self.cost = CostModel(has_side=self.truth.has_side)
        self.targets = LatencyTargets(**targets)
        self.budget: StepBudget = (
            StaticBudget(2048) if budget == "static" else TimeBudget(self.cost, self.targets, 2048)
        )
        self.scheduler = Scheduler(
            BlockPool(num_blocks, 16),
            EncoderCache(16384),
            self.budget,
            max_num_seqs=max_num_seqs,
            num_chat_blocks=num_chat_blocks,
            turns=turns,
        )
        if self.truth.has_side:
            assert isinstance(self.budget, TimeBudget)
            patience_ms, floor = self.targets.background_ttft_ms, self.budget.floor
            self.scheduler.side_budget = SideBudget(self.cost, patience_ms, 2048, floor)
        self.aside: list[tuple[float, float]] = []
        self.aside_ends_s = 0.0
        self.aside_busy_s = 0.0
        self.on_turn: Callable[[Turn], None] | None = None
        self.gaps_ms: list[float] = []
        self.ttfts_ms: list[float] = []
        self.ended: list[Sequence] = []
        self.steps: list[Step] = []
        self.encoded_late: list[Sequence] = []
        self.busy_s = 0.0
        self.background_busy_s = 0.0
        self.errors: list[float] = []
        self.on_end: dict[str, Callable[[Sequence], None]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def chat(
        self, num_prompt: int = 62, max_tokens: int = 64, on_end: Callable[[Sequence], None] | None = None
    ) -> Sequence:
        sequence = make_sequence(num_prompt, max_tokens=max_tokens, arrival_s=self.now)
        return self.add(sequence, on_end)

    def frame(
        self,
        name: str,
        on_end: Callable[[Sequence], None] | None = None,
        expires_s: float | None = None,
        num_patches: int = 4784,
        tenant: str = "",
    ) -> Sequence:
        picture = picture_of(20, num_patches, name)
        sequence = make_sequence(
            picture.length + 26,
            max_tokens=32,
            priority="background",
            images=(picture,),
            arrival_s=self.now,
            expires_at=None if expires_s is None else self.now + expires_s,
            tenant=tenant,
        )
        return self.add(sequence, on_end)

    def add(self, sequence: Sequence, on_end: Callable[[Sequence], None] | None = None) -> Sequence:
        if on_end:
            self.on_end[sequence.request_id] = on_end
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """As a client that goes away; nothing happens to what has ended."""
        if sequence.status is not Status.FINISHED:
            self.scheduler.finish(sequence, "cancelled")
            self._end(sequence)

    def run(self, until_s: float) -> None:
        """Run events and steps until the clock passes `until_s`; sequences that run go on later."""
        while self.now < until_s:
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            if self.scheduler.has_work:
                self._step()
            else:
                self.now = min(self._events[0][0] if self._events else until_s, until_s)

    def _step(self) -> None:
        """As `Engine.step`."""
        scheduler = self.scheduler
        if not scheduler.is_aside_busy:
            self._start_aside()
        elif self.now >= self.aside_ends_s:
            self._land()
            return
        elif not scheduler.has_chat_tokens:
            self._wait_for_side()
            return
        self._step_beside()

    def _start_aside(self) -> None:
        plan = self.scheduler.plan_aside(self.now)
        if plan.is_empty:
            return
        step_ms, slice_ms = self._measure(plan, "aside")
        self._learn(plan, step_ms, slice_ms, "aside")
        self.aside_busy_s += (step_ms + slice_ms) / 1e3
        self.background_busy_s += self._background_ms(plan) / 1e3
        self.aside.append((self.now, self._background_ms(plan)))
        self.aside_ends_s = self.now + (step_ms + slice_ms) / 1e3
        self._note_encodes(plan)

    def _land(self) -> None:
        plan = self.scheduler.aside
        self.scheduler.commit_aside()
        self._tell(plan)

    def _wait_for_side(self) -> None:
        self.now = min(self.aside_ends_s, self._events[0][0] if self._events else math.inf)

    def _step_beside(self) -> None:
        num_overruns = self.budget.counts.total()
        everyone = (*self.scheduler.running, *self.scheduler.waiting)
        wants_background = any(not s.is_interactive for s in everyone)
        is_loaded = self.scheduler.is_aside_busy
        plan = self.scheduler.plan(self.now)
        for sequence in plan.expired:
            self._end(sequence)
        if plan.turn is not None:
            assert self.on_turn is not None, "a turn for nobody"
            self.on_turn(plan.turn)
        if plan.is_empty:
            assert plan.expired or plan.turn or is_loaded, "a step without progress"
            if is_loaded:
                self._wait_for_side()
            return
        self._note_encodes(plan)
        road: Road = "wide" if self.truth.has_side and not plan.has_interactive else "narrow"
        road = "loaded" if is_loaded else road
        step_ms, slice_ms = self._measure(plan, road)
        predicted_ms = self._predict(plan, road)
        residual_ms = self.budget.residual_ms if isinstance(self.budget, TimeBudget) else 0.0
        decodes = [c.work for c in plan.chunks if c.sequence.is_interactive and c.sequence.is_decoding]
        decodes_ms = self.cost.step_ms(sum(decodes, StepWork()), road)
        self._learn(plan, step_ms, slice_ms, road)
        total_ms = step_ms + slice_ms
        started, self.now = self.now, self.now + total_ms / 1e3
        self.busy_s += total_ms / 1e3
        background_ms = self._background_ms(plan)
        self.background_busy_s += background_ms / 1e3
        waiting = [c.sequence for c in plan.chunks if c.sequence.is_interactive and c.sequence.is_decoding]
        step = Step(
            started,
            predicted_ms,
            total_ms,
            self.budget.allowance_ms if isinstance(self.budget, TimeBudget) else 0.0,
            residual_ms,
            self.budget.counts.total() > num_overruns,
            len(waiting),
            max((self._late_ms(chat) for chat in waiting), default=-math.inf),
            decodes_ms,
            background_ms,
            wants_background,
        )
        self.steps.append(step)
        self.scheduler.commit(plan)
        self._tell(plan)

    def _tell(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            if chunk.samples and chunk.sequence.status is not Status.FINISHED:
                self._token(chunk.sequence)

    def _note_encodes(self, plan: StepPlan) -> None:
        begun = [e.sequence for e in plan.encodes if not e.first]
        self.encoded_late += [sequence for sequence in begun if sequence.has_expired(self.now)]

    def _late_ms(self, chat: Sequence) -> float:
        assert chat.last_token_s is not None
        return 1e3 * (self.now - chat.last_token_s) - self.targets.chat_itl_ms

    def _measure(self, plan: StepPlan, road: Road) -> tuple[float, float]:
        return self.truth.step_ms(plan.step_work, road), self.truth.slice_ms(plan.slice_work, road)

    def _predict(self, plan: StepPlan, road: Road) -> float:
        step_ms = self.cost.step_ms(plan.step_work, road) if plan.chunks else 0.0
        return step_ms + self.cost.slice_ms(plan.slice_work, aside=road == "aside")

    def _learn(self, plan: StepPlan, step_ms: float, slice_ms: float, road: Road) -> None:
        work = plan.step_work
        if step_ms:
            self.errors.append(abs(self.cost.step_ms(work, road) - step_ms) / step_ms)
            self.cost.learn_step(work, step_ms, road)
        if slice_ms:
            self.cost.learn_slices(plan.slice_work, slice_ms, aside=road == "aside")

    def _background_ms(self, plan: StepPlan) -> float:
        """What the plan's background work takes, beside whatever else the step does."""
        model = self.truth.model
        chunks = [c for c in plan.chunks if not c.sequence.is_interactive]
        slices = [e.work for e in plan.encodes if not e.sequence.is_interactive]
        step_ms = model.step_ms(sum((c.work for c in chunks), StepWork())) - model.step_ms(StepWork())
        return self.truth.slowdown * (step_ms + model.slice_ms(sum(slices, SliceWork())))

    def _token(self, sequence: Sequence) -> None:
        if sequence.is_interactive:
            if sequence.last_token_s is None:
                self.ttfts_ms.append(1e3 * (self.now - sequence.arrival_s))
            else:
                gap_ms = 1e3 * (self.now - sequence.last_token_s)
                self.gaps_ms.append(gap_ms)
        if sequence.first_token_s is None:
            sequence.first_token_s = self.now
        sequence.last_token_s = self.now
        reason = sequence.append(5000)
        if reason:
            self.scheduler.finish(sequence, reason)
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        assert sequence.status is Status.FINISHED
        self.ended.append(sequence)
        callback = self.on_end.pop(sequence.request_id, None)
        if callback:
            callback(sequence)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
