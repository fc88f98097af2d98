"""The engine itself: synchronous, single-threaded, one step at a time."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from vlm_engine.answers import Answers, AnswerText
from vlm_engine.budget import TimeBudget
from vlm_engine.choosing import Run
from vlm_engine.config import EngineConfig
from vlm_engine.cost_model import CostModel
from vlm_engine.errors import RequestError
from vlm_engine.grammar import CompiledForm, Grammars
from vlm_engine.limits import PromptLimits
from vlm_engine.metrics import EngineMetrics, EngineStats
from vlm_engine.models import PreparedPrompt, VisionLanguageModel, load_model
from vlm_engine.plan import Chunk, StepPlan
from vlm_engine.request import FinishReason, GenerationRequest, TokenEvent
from vlm_engine.runner import ModelRunner, StepResult
from vlm_engine.scheduling import make_scheduler
from vlm_engine.sequence import Placeholder, Sequence
from vlm_engine.speculation import SpeculationStats
from vlm_engine.token_bytes import TokenBytes
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
        self.metrics = EngineMetrics()
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
        self._sequences: dict[str, Sequence] = {}
        self._answers: dict[str, Answers] = {}
        self._texts: dict[str, AnswerText] = {}
        self._token_bytes = TokenBytes(self.model.prompts.tokenizer)

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
        if request.request_id in self._answers or request.request_id in self._sequences:
            raise RequestError(f"request {request.request_id} is already running", field="request_id")
        if form is None and request.sampling.structured is not None:
            form = self.grammars.compile(request.sampling.structured)
        self._finish_aside(request.request_id)
        answers = Answers(request, prompt, self._with_slices(prompt), form)
        self._answers[request.request_id] = answers
        self._start(answers, 0, preprocess_s)

    def _finish_aside(self, request_id: str) -> None:
        """Wait for the side thread where it still works for an ended request of the same id."""
        if any(request_id in (s.parent_id, s.request_id) for s in self.scheduler.aside.sequences):
            self._untold += self._land()

    def _start(self, answers: Answers, index: int, preprocess_s: float = 0.0) -> None:
        """Queue one of a request's answers."""
        request, prompt = answers.part(index), answers.prompt
        sampling = request.sampling
        room = self.limits.max_model_len - len(prompt.token_ids)
        wanted = sampling.max_tokens or self.model.spec.usual_tokens(sampling.min_tokens)
        sequence = Sequence(
            request=request,
            token_ids=list(prompt.token_ids),
            num_prompt_tokens=len(prompt.token_ids),
            placeholders=answers.placeholders,
            max_tokens=room if wanted is None else min(wanted, room),
            stop_token_ids=frozenset(sampling.stop_token_ids)
            | (frozenset() if sampling.ignore_eos else self.model.spec.stop_token_ids),
            arrival_s=self._clock(),
            index=index,
            parent_id=answers.request.request_id,
            preprocess_s=preprocess_s,
        )
        self._sequences[request.request_id] = answers.running[request.request_id] = sequence
        tokenizer = self.model.prompts.tokenizer
        self._texts[request.request_id] = AnswerText(tokenizer, self._token_bytes, sampling)
        self.runner.add(sequence, prompt, answers.form.start() if answers.form else None)
        self.scheduler.add(sequence)

    def step(self) -> list[TokenEvent]:
        """Compute one step and return what happened, in the order of importance."""
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
            return self._fail(plan, error)
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
        events = [self._end(sequence, "expired") for sequence in plan.expired]
        if plan.turn is not None and self._lend is not None:
            self._lend(plan.turn)
        lent_s = self._clock()
        if plan.is_empty:
            if self.scheduler.is_aside_busy:
                self.runner.is_aside_done(SIDE_WAIT_S)
            if plan.turn is not None:
                self._trace(plan, StepTimes(start_s, planned_s, lent_s, lent_s))
            self.runner.forget_images(plan.evicted)
            return events
        self.num_steps += 1
        try:
            result = self.runner.execute(plan)
        except Exception as error:
            log.exception("a step with %d sequences failed", len(plan.chunks))
            return events + self._fail(plan, error)
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
            if chunk.sequence.request_id in result.broken:
                events += self._give_up([chunk.sequence], result.broken[chunk.sequence.request_id])
        now = self._clock()
        going_on = (chunk for chunk in sampled if chunk.sequence.finish_reason is None)
        return events + [self._advance(c, result.runs[c.sequence.request_id], now) for c in going_on]

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request in any state and free all it holds; returns its last event if it ran."""
        answers = self._answers.get(request_id)
        if answers is None:
            return None
        sequence = next(iter(answers.running.values()))
        self.scheduler.finish(sequence, "cancelled")
        return self._end(sequence, "cancelled")

    def close(self) -> None:
        """End the threads and processes beside the engine."""
        self.runner.close()
        self.grammars.close()

    def generate(self, request: GenerationRequest) -> str:
        """Run one request to its end and return its text; for scripts and notebooks.

        Raises:
            RequestError: The request can never run.
            RuntimeError: A step failed.
        """
        self.add(request)
        text = ""
        while request.request_id in self._answers:
            for event in self.step():
                if event.request_id != request.request_id or event.index:
                    continue
                text += event.text
                if event.error:
                    raise RuntimeError(event.error)
        return text

    def start_over(self) -> None:
        """End all requests and forget what was counted, recorded and cached; the cost model stays."""
        for request_id in list(self._answers):
            self.abort(request_id)
        if self.scheduler.is_aside_busy:
            self._land()
        self._untold.clear()
        self.runner.start_over()
        turns = self.scheduler.turns
        self.scheduler = make_scheduler(self.config, self.cost_model, self.runner.num_blocks)
        self.scheduler.turns = turns
        self.metrics = EngineMetrics()
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
        if not self._sequences and not self.scheduler.is_aside_busy:
            assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks, "blocks leaked"
            assert not self.scheduler.encoder_cache.num_held, "encoder entries leaked"

    def _with_slices(self, prompt: PreparedPrompt) -> tuple[Placeholder, ...]:
        """The prompt's images with the work that the encoder has on each."""
        encoder = self.model.encoder
        pairs = zip(prompt.placeholders, prompt.images, strict=True)
        return tuple(
            replace(run, slices=tuple(part.work for part in encoder.slices(image))) for run, image in pairs
        )

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

    def _advance(self, chunk: Chunk, run: Run, now: float) -> TokenEvent:
        """Append the tokens that a sequence said and tell what text they complete."""
        sequence = chunk.sequence
        event = self._append(sequence, run, 0, now)
        for index in range(1, len(run.token_ids)):
            if event.finish_reason is not None:
                break
            event = event.merged(self._append(sequence, run, index, now))
        if chunk.proposed:
            self.scheduler.accept(chunk, len(run.token_ids) - 1)
        if event.finish_reason is None:
            return event
        self.scheduler.finish(sequence, event.finish_reason)
        return self._end(sequence, event.finish_reason, event)

    def _append(self, sequence: Sequence, run: Run, index: int, now: float) -> TokenEvent:
        """Append one token of a run and tell what text it completes."""
        self.metrics.add_token(sequence, now)
        if sequence.first_token_s is None:
            sequence.first_token_s = now
            self._start_others(sequence)
        sequence.last_token_s = now
        reason = sequence.append(run.token_ids[index])
        is_complete = run.ended and index == len(run.token_ids) - 1
        logprobs = run.logprobs[index] if run.logprobs else None
        return self._texts[sequence.request_id].tell(sequence, "stop" if is_complete else reason, logprobs)

    def _start_others(self, first: Sequence) -> None:
        """Start a request's other answers now that they find its prompt cached."""
        if first.index == 0:
            answers = self._answers[first.parent_id]
            for index in range(1, answers.request.sampling.n):
                self._start(answers, index)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        event: TokenEvent | None = None,
        *,
        error: str | None = None,
    ) -> TokenEvent:
        """Forget a sequence that the scheduler has finished; its last event, made of `event` if given."""
        self._forget(sequence)
        now = self._clock()
        self.metrics.add_end(sequence, reason, now)
        event = event or TokenEvent(sequence.parent_id, index=sequence.index, usage=sequence.usage())
        event = replace(event, finish_reason=reason, timings=sequence.timings(now), error=error)
        answers = self._answers[sequence.parent_id]
        if event.is_failure:
            for other in list(answers.running.values()):
                self.scheduler.finish(other, "cancelled")
                self._forget(other)
                self.metrics.add_end(other, "cancelled", now)
        if not answers.running:
            del self._answers[sequence.parent_id]
        return event

    def _forget(self, sequence: Sequence) -> None:
        name = sequence.request_id
        self.runner.remove(name)
        del self._sequences[name], self._texts[name]
        del self._answers[sequence.parent_id].running[name]

    def _give_up(self, sequences: Iterable[Sequence], error: str) -> list[TokenEvent]:
        """End sequences with an error, and with each the request that it belongs to."""
        events = []
        for sequence in sequences:
            if sequence.finish_reason is None:
                self.scheduler.finish(sequence, "error")
                events.append(self._end(sequence, "error", error=error))
        return events

    def _fail(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        """End the sequences of a plan whose step raised; the others go on."""
        events = self._give_up(plan.sequences, f"{type(error).__name__}: {error}")
        for item in plan.encodes:
            self.scheduler.encoder_cache.drop(item.image.digest)
        return events
