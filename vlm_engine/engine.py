"""The engine itself: synchronous, single-threaded, one step at a time."""

import logging
import time
from collections.abc import Callable

import torch

from vlm_engine.budget import TimeBudget
from vlm_engine.config import EngineConfig
from vlm_engine.cost_model import CostModel
from vlm_engine.errors import EngineError, RequestError
from vlm_engine.grammar import CompiledForm, Grammars
from vlm_engine.health import StepHealth
from vlm_engine.limits import PromptLimits
from vlm_engine.metrics import EngineMetrics, EngineStats
from vlm_engine.models import PreparedPrompt, VisionLanguageModel, load_model
from vlm_engine.plan import StepPlan
from vlm_engine.recovery import Recovery
from vlm_engine.request import GenerationRequest, TokenEvent
from vlm_engine.runner import ModelRunner, StepResult
from vlm_engine.running import RunningRequests
from vlm_engine.scheduling import make_scheduler
from vlm_engine.speculation import SpeculationStats
from vlm_engine.trace import StepTimes, StepTrace, Tracer
from vlm_engine.turn import Turn, TurnStats
from vlm_engine.turn_queue import TurnQueue

log = logging.getLogger(__name__)

SIDE_WAIT_S = 0.005
"""How long a step without anything else to do waits for the side thread: who comes meanwhile waits too."""


class Engine:
    """A vision-language model with continuous batching and chunked prefill.

    ``add`` requests, then call ``step`` while ``has_work``; each call computes one step and
    returns the news of it. Not thread-safe but for ``prepare``; `AsyncEngine` is the front for
    servers.

    Args:
        config: Model and limits.
        model: An already loaded model, else it is loaded from ``config.model``.
        clock: Seconds; deadlines of requests are on it.

    Raises:
        ModelLoadError: The model cannot be loaded.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: VisionLanguageModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.config = config
        self.model = model or load_model(config)
        self.runner = ModelRunner(self.model, config)
        self.cost_model = CostModel(has_side=self.runner.has_side)
        self.scheduler = make_scheduler(config, self.cost_model, self.runner.num_blocks)
        spec = self.model.spec
        longest = min(config.max_model_len or spec.max_model_len, spec.max_model_len)
        num_tokens = min(longest, self.scheduler.pool.num_tokens)
        self.limits = PromptLimits(num_tokens, config.encoder_cache_tokens, spec.vocab_size)
        self.grammars = Grammars(self.model.prompts.tokenizer, spec.vocab_size, spec.stop_token_ids)
        self.num_steps = 0
        self.tracer = Tracer(config.trace_steps, self.cost_model) if config.trace_steps else None
        self._lend: Callable[[Turn], None] | None = None
        self._aside_since_s = 0.0
        self._untold: list[TokenEvent] = []
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        """Have no requests, and no steps that failed."""
        longest, runner, scheduler = self.limits.max_model_len, self.runner, self.scheduler
        requests = self._requests = RunningRequests(self.model, runner, scheduler, longest, self._clock)
        self.health = StepHealth(self._clock)
        self._recovery = Recovery(self.model, runner, scheduler, requests, self.health)

    @property
    def metrics(self) -> EngineMetrics:
        """What was measured since the start, or the last `start_over`."""
        return self._requests.metrics

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished, or a detector waits for its turn."""
        return self.scheduler.has_work or self.scheduler.is_aside_busy or bool(self._untold)

    def share_device(self, turns: TurnQueue, lend: Callable[[Turn], None]) -> None:
        """Let detectors have turns on the device between steps.

        Args:
            turns: Where they wait.
            lend: Called with a turn within `step`; returns when the device is the engine's again, and books
                how the turn ended.
        """
        self.scheduler.turns, self._lend = turns, lend

    def prepare(self, request: GenerationRequest) -> tuple[PreparedPrompt, float]:
        """Tokenize and preprocess; safe from any thread.

        Returns:
            The prompt and the seconds it took.

        Raises:
            RequestError: The request can never run; nothing was queued.
        """
        started = time.perf_counter()
        self.limits.check_text(request.messages)
        prompt = self.model.prompts.prepare(request.messages)
        self.limits.check(prompt, request.sampling)
        return prompt, time.perf_counter() - started

    def add(self, request: GenerationRequest) -> None:
        """Prepare and queue a request.

        Raises:
            RequestError: The request can never run, or its id is in use; nothing was queued.
        """
        self.submit(request, *self.prepare(request))

    def submit(
        self,
        request: GenerationRequest,
        prompt: PreparedPrompt,
        preprocess_s: float = 0.0,
        form: CompiledForm | None = None,
    ) -> None:
        """Queue a prepared request.

        Args:
            request: As it was asked for.
            prompt: What `prepare` made of it.
            preprocess_s: Seconds that this took.
            form: What `grammars` made of the form that it wants; without it, it is waited for here.

        Raises:
            RequestError: It can never run, or its id is in use.
        """
        self.limits.check(prompt, request.sampling)
        if request.request_id in self._requests:
            raise RequestError(f"request {request.request_id} is already running", field="request_id")
        if form is None and request.sampling.structured is not None:
            form = self.grammars.compile(request.sampling.structured)
        self._finish_aside(request.request_id)
        self._requests.submit(request, prompt, preprocess_s, form)

    def _finish_aside(self, request_id: str) -> None:
        """Wait for the side thread where it still works for an ended request of the same id."""
        if any(request_id in (s.parent_id, s.request_id) for s in self.scheduler.aside.sequences):
            self._untold += self._land()

    def step(self) -> list[TokenEvent]:
        """Compute one step and return what happened, in the order of importance.

        Raises:
            EngineBroken: No step succeeds any more, or none does anything; see `StepHealth`.
        """
        untold, self._untold = self._untold, []
        if not self.scheduler.is_aside_busy:
            self._start_aside()
        elif self.runner.is_aside_done(0.0 if self.scheduler.has_chat_tokens else SIDE_WAIT_S):
            return untold + self._land()
        elif not self.scheduler.has_chat_tokens:
            return untold
        return untold + self._step()

    def _start_aside(self) -> None:
        """Give the side thread something to do beside the next steps, if there are any for chats."""
        plan = self.scheduler.plan_aside(self._clock())
        if not plan.is_empty:
            self._aside_since_s = self._clock()
            self.runner.start_aside(plan)
        else:
            self.runner.forget_images(plan.evicted)

    def _land(self) -> list[TokenEvent]:
        """Take back what the side thread has done."""
        plan, start_s = self.scheduler.aside, self._aside_since_s
        try:
            result = self.runner.take_aside()
        except Exception as error:
            log.exception("work aside for %d sequences failed", len(plan.sequences))
            self.scheduler.commit_aside(is_done=False)
            return self._recovery.go_on(plan, error, self._tell)
        self._learn(plan, result)
        end_s = start_s + (result.encode_ms + result.forward_ms) / 1e3
        times = StepTimes(start_s, start_s, start_s, end_s, result.encode_ms, result.forward_ms)
        self._trace(plan, times, is_aside=True)
        self.scheduler.commit_aside()
        return self._tell(plan, result)

    def _step(self) -> list[TokenEvent]:
        start_s = self._clock()
        plan = self.scheduler.plan(start_s)
        planned_s = self._clock()
        events = [self._requests.end(sequence, "expired") for sequence in plan.expired]
        if plan.turn is not None and self._lend is not None:
            self._lend(plan.turn)
        lent_s = self._clock()
        if plan.is_empty:
            if self.scheduler.is_aside_busy:
                self.runner.is_aside_done(SIDE_WAIT_S)
            elif plan.turn is None and not events and self._requests.ids:
                self.health.stand_still()
            if plan.turn is not None:
                self._trace(plan, StepTimes(start_s, planned_s, lent_s, lent_s))
            self.runner.forget_images(plan.evicted)
            return events
        self.num_steps += 1
        try:
            result = self.runner.execute(plan)
        except Exception as error:
            log.exception("a step with %d sequences failed", len(plan.chunks))
            return events + self._recovery.go_on(plan, error, self._tell)
        self._learn(plan, result)
        end_s = self._clock()
        self._trace(plan, StepTimes(start_s, planned_s, lent_s, end_s, result.encode_ms, result.forward_ms))
        self.scheduler.commit(plan)
        return events + self._tell(plan, result)

    def _tell(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Move the sequences of an executed plan on; what is told of them."""
        sampled = [c for c in plan.chunks if c.sequence.finish_reason is None and c.samples]
        events = []
        for chunk in sampled:
            error = result.runs[chunk.sequence.request_id].failed
            if error:
                events += self._requests.give_up([chunk.sequence], error)
        if sampled and len(events) == len(sampled):
            self._recovery.book(events[0].error or "")
        elif sampled:
            self.health.succeed()
        else:
            self.health.move()
        going_on = (chunk for chunk in sampled if chunk.sequence.finish_reason is None)
        return events + [self._requests.advance(c, result.runs[c.sequence.request_id]) for c in going_on]

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request in any state and free all it holds; returns its last event if it ran."""
        event = self._requests.abort(request_id)
        if event is not None:
            if not self._requests.ids:
                self.health.move()
            self._untold = [other for other in self._untold if other.request_id != request_id]
        return event

    def close(self) -> None:
        """End the threads and processes beside the engine."""
        self.runner.close()
        self.grammars.close()

    def generate(self, request: GenerationRequest) -> str:
        """Run one request to its end and return its text; for scripts and notebooks.

        Raises:
            RequestError: The request can never run.
            EngineError: A step failed.
        """
        self.add(request)
        text = ""
        while request.request_id in self._requests:
            for event in self.step():
                if event.request_id != request.request_id or event.index:
                    continue
                text += event.text
                if event.error:
                    raise EngineError(event.error)
        return text

    def start_over(self) -> None:
        """End all requests and forget what was counted, recorded and cached; the cost model stays."""
        for request_id in self._requests.ids:
            self.abort(request_id)
        if self.scheduler.is_aside_busy:
            self._land()
        self._untold.clear()
        self.runner.start_over()
        turns = self.scheduler.turns
        self.scheduler = make_scheduler(self.config, self.cost_model, self.runner.num_blocks)
        self.scheduler.turns = turns
        self._begin()
        if self.tracer is not None:
            self.tracer = Tracer(self.config.trace_steps, self.cost_model)
        self.num_steps = 0

    def stats(self) -> EngineStats:
        """The books as they are now."""
        scheduler, model = self.scheduler, self.cost_model
        budget, factor = scheduler.budget, model.speed.factor
        return EngineStats(
            len(scheduler.running),
            len(scheduler.waiting),
            scheduler.pool.num_free,
            scheduler.pool.num_blocks,
            scheduler.encoder_cache.num_used,
            scheduler.encoder_cache.num_tokens,
            self.num_steps,
            self.runner.num_encoded,
            {**scheduler.counts, **budget.counts},
            dict(scheduler.preemptions),
            self._allowance_ms,
            self.metrics.steps.snapshot(model.step_error, factor * model.step.residual_ms),
            self.metrics.slices.snapshot(model.slice_error, factor * model.encoder.residual_ms),
            self.metrics.classes(scheduler.running, scheduler.waiting),
            turns=scheduler.turns.stats() if scheduler.turns else TurnStats(),
            speculation=scheduler.speculator.stats if scheduler.speculator else SpeculationStats(),
        )

    def trace(self, first: int = 0) -> list[StepTrace] | None:
        """Recorded steps from number `first` on, the oldest ones first; None when none are recorded."""
        return None if self.tracer is None else self.tracer.since(first)

    def check_integrity(self) -> None:
        """Check all books against each other (AssertionError if off)."""
        self.scheduler.check_integrity()
        if not self._requests.ids and not self.scheduler.is_aside_busy:
            assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks, "blocks leaked"
            assert not self.scheduler.encoder_cache.num_held, "encoder entries leaked"

    def _learn(self, plan: StepPlan, result: StepResult) -> None:
        """Book what was predicted beside what was measured, and have the cost model learn from it."""
        model = self.cost_model
        if plan.chunks:
            work = plan.step_work
            self.metrics.steps.add(result.forward_ms, model.step_ms(work, result.road))
            model.learn_step(work, result.forward_ms, result.road)
            if self.scheduler.speculator is not None and result.road != "aside":
                self.scheduler.speculator.costs.learn(plan.chunks, result.forward_ms)
        if plan.encodes:
            slices, is_aside = plan.slice_work, result.road == "aside"
            self.metrics.slices.add(result.encode_ms, model.slice_ms(slices, aside=is_aside))
            model.learn_slices(slices, result.encode_ms, aside=is_aside)

    def _trace(self, plan: StepPlan, times: StepTimes, *, is_aside: bool = False) -> None:
        """Record the step if asked to; before its sequences are moved on."""
        if self.tracer is None:
            return
        steps, slices = self.metrics.steps, self.metrics.slices
        parts_ms = [steps.last_predicted_ms] * bool(plan.chunks) + [slices.last_predicted_ms] * bool(
            plan.encodes
        )
        self.tracer.add(plan, times, sum(parts_ms), self._allowance_ms, is_aside=is_aside)

    @property
    def _allowance_ms(self) -> float | None:
        budget = self.scheduler.budget
        return budget.allowance_ms if isinstance(budget, TimeBudget) else None
