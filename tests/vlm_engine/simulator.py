"""The real scheduler on a simulated clock and device: minutes of traffic in a second of CPU."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from tests.vlm_engine.builders import image, make_sequence
from vlm_engine.block_pool import BlockPool
from vlm_engine.budget import LatencyTargets, StaticBudget, StepBudget, TimeBudget
from vlm_engine.cost_model import CostModel, SliceWork, StepWork
from vlm_engine.encoder_cache import EncoderCache
from vlm_engine.plan import StepPlan
from vlm_engine.scheduler import Scheduler
from vlm_engine.sequence import Placeholder, Sequence, Status
from vlm_engine.slices import TowerLayout, cut
from vlm_engine.turn import Turn
from vlm_engine.turn_queue import TurnQueue

# Milliseconds of a 2-core machine with the 210 M model of the benchmarks, as `StepWork.features`.
STEP_TRUTH = (14.0, 38.0, 6.0, 3.0, 9.0)
ENCODER_TRUTH = (0.4, 9.0, 22.0, 30.0, 8.0)
# What steps and slices take beside each other, of what they take alone on two cores.
STEP_BESIDE, SLICE_BESIDE = 1.3, 1.7
WINDOWS = tuple(range(64, 4785, 64)) + ((4784,) if 4784 % 64 else ())
FRAME = TowerLayout(4784, 4, (4784,), WINDOWS, (False, False, False, True) * 2, (7,))
SLICES = tuple(part.work for part in cut(FRAME, 512))


@dataclass
class Truth:
    """What steps really take; `slowdown` is a machine that gets slower, `noise` the spread."""

    seed: int = 0
    noise: float = 0.05
    slowdown: float = 1.0
    model: CostModel = field(default_factory=lambda: CostModel(STEP_TRUTH, ENCODER_TRUTH))
    runs_beside: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def step_ms(self, work: StepWork) -> float:
        return self._spread() * self.model.step_ms(work) if work.num_tokens else 0.0

    def slice_ms(self, work: SliceWork) -> float:
        return self._spread() * self.model.slice_ms(work) if work.num_slices else 0.0

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
        **targets: float,
    ) -> None:
        self.now = 0.0
        self.truth = truth or Truth()
        self.cost = CostModel(runs_beside=self.truth.runs_beside)
        self.targets = LatencyTargets(**targets)
        self.budget: StepBudget = (
            StaticBudget(2048) if budget == "static" else TimeBudget(self.cost, self.targets, 2048)
        )
        self.scheduler = Scheduler(
            BlockPool(2000, 16),
            EncoderCache(16384),
            self.budget,
            max_num_seqs=32,
            turns=turns,
            encodes_beside=self.truth.runs_beside,
        )
        self.on_turn: Callable[[Turn], None] | None = None
        self.gaps_ms: list[float] = []
        self.lateness_ms: list[float] = []
        self.ttfts_ms: list[float] = []
        self.ended: list[Sequence] = []
        self.steps: list[tuple[float, StepPlan]] = []
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
        return self._add(sequence, on_end)

    def frame(
        self, name: str, on_end: Callable[[Sequence], None] | None = None, expires_s: float | None = None
    ) -> Sequence:
        plain = image(20, 1196, name)
        picture = Placeholder(plain.start, plain.length, plain.digest, 0, SLICES)
        expires_at = None if expires_s is None else self.now + expires_s
        sequence = make_sequence(
            1222,
            max_tokens=32,
            priority="background",
            images=(picture,),
            arrival_s=self.now,
            expires_at=expires_at,
        )
        return self._add(sequence, on_end)

    def _add(self, sequence: Sequence, on_end: Callable[[Sequence], None] | None) -> Sequence:
        if on_end:
            self.on_end[sequence.request_id] = on_end
        self.scheduler.add(sequence)
        return sequence

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
        plan = self.scheduler.plan(self.now)
        for sequence in plan.expired:
            self._end(sequence)
        if plan.turn is not None:
            assert self.on_turn is not None, "a turn for nobody"
            self.on_turn(plan.turn)
        if plan.is_empty:
            assert plan.expired or plan.turn, "a step without progress"
            return
        step_work, slice_work = plan.step_work, plan.slice_work
        beside = self.truth.runs_beside and bool(plan.chunks and plan.encodes)
        step_ms = self.truth.step_ms(step_work) * (STEP_BESIDE if beside else 1)
        slice_ms = self.truth.slice_ms(slice_work) * (SLICE_BESIDE if beside else 1)
        self._learn(step_work, step_ms, slice_work, slice_ms, beside)
        total_ms = max(step_ms, slice_ms) if beside else step_ms + slice_ms
        self.now += total_ms / 1e3
        self.busy_s += total_ms / 1e3
        self.background_busy_s += self._background_s(plan, slice_ms)
        sampled = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        self.scheduler.commit(plan)
        for sequence in sampled:
            self._token(sequence)

    def _learn(
        self, step_work: StepWork, step_ms: float, slice_work: SliceWork, slice_ms: float, beside: bool
    ) -> None:
        if step_ms:
            self.errors.append(abs(self.cost.step_ms(step_work, beside=beside) - step_ms) / step_ms)
            self.cost.learn_step(step_work, step_ms, beside=beside)
        if slice_ms:
            self.cost.learn_slices(slice_work, slice_ms, beside=beside)

    def _background_s(self, plan: StepPlan, slice_ms: float) -> float:
        tokens = sum(chunk.num_tokens for chunk in plan.chunks if not chunk.sequence.is_interactive)
        return (slice_ms + self.truth.model.step_ms(StepWork(tokens)) * bool(tokens)) / 1e3

    def _token(self, sequence: Sequence) -> None:
        if sequence.is_interactive:
            if sequence.last_token_s is None:
                self.ttfts_ms.append(1e3 * (self.now - sequence.arrival_s))
            else:
                gap_ms = 1e3 * (self.now - sequence.last_token_s)
                self.gaps_ms.append(gap_ms)
                self.lateness_ms.append(gap_ms - self.targets.chat_itl_ms)
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
