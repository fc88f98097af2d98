"""The requests that have not ended: from their prompts to what their readers are told."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from vlm_engine.answers import Answers, AnswerText
from vlm_engine.choosing import Run
from vlm_engine.grammar import CompiledForm
from vlm_engine.metrics import EngineMetrics
from vlm_engine.models import PreparedPrompt, VisionLanguageModel
from vlm_engine.plan import Chunk
from vlm_engine.request import FinishReason, GenerationRequest, TokenEvent
from vlm_engine.runner import ModelRunner
from vlm_engine.scheduler import Scheduler
from vlm_engine.sequence import Placeholder, Sequence
from vlm_engine.token_bytes import TokenBytes


class RunningRequests:
    """Requests with their sequences and texts, from `submit` to the last event.

    Args:
        model: The model.
        runner: Keeps what a sequence needs besides its tokens.
        scheduler: Decides when they run.
        max_model_len: Tokens of prompt and output together.
        clock: Seconds.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        runner: ModelRunner,
        scheduler: Scheduler,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._runner = runner
        self._scheduler = scheduler
        self._max_model_len = max_model_len
        self._clock = clock
        self._answers: dict[str, Answers] = {}
        self._sequences: dict[str, Sequence] = {}
        self._texts: dict[str, AnswerText] = {}
        self._token_bytes = TokenBytes(model.prompts.tokenizer)
        self.metrics = EngineMetrics()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._answers

    @property
    def ids(self) -> list[str]:
        """The requests' ids."""
        return list(self._answers)

    def submit(
        self,
        request: GenerationRequest,
        prompt: PreparedPrompt,
        preprocess_s: float,
        form: CompiledForm | None,
    ) -> None:
        """Queue a request whose id is free."""
        answers = Answers(request, prompt, self._with_slices(prompt), form)
        self._start(answers, 0, preprocess_s)
        self._answers[request.request_id] = answers

    def advance(self, chunk: Chunk, run: Run) -> TokenEvent:
        """Append the tokens that a sequence said and tell what text they complete."""
        sequence, now = chunk.sequence, self._clock()
        event = self._append(sequence, run, 0, now)
        for index in range(1, len(run.token_ids)):
            if event.finish_reason is not None:
                break
            event = event.merged(self._append(sequence, run, index, now))
        if chunk.proposed:
            self._scheduler.accept(chunk, len(run.token_ids) - 1)
        if event.finish_reason is None:
            return event
        self._scheduler.finish(sequence, event.finish_reason)
        return self.end(sequence, event.finish_reason, event)

    def end(
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
                self._scheduler.finish(other, "cancelled")
                self._forget(other)
                self.metrics.add_end(other, "cancelled", now)
        if not answers.running:
            del self._answers[sequence.parent_id]
        return event

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request in any state and free all it holds; returns its last event if it ran."""
        answers = self._answers.get(request_id)
        if answers is None:
            return None
        sequence = next(iter(answers.running.values()))
        self._scheduler.finish(sequence, "cancelled")
        return self.end(sequence, "cancelled")

    def give_up(self, sequences: Iterable[Sequence], error: str) -> list[TokenEvent]:
        """End sequences with an error, and with each the request that it belongs to."""
        events = []
        for sequence in sequences:
            if sequence.finish_reason is None:
                self._scheduler.finish(sequence, "error")
                events.append(self.end(sequence, "error", error=error))
        return events

    def _start(self, answers: Answers, index: int, preprocess_s: float = 0.0) -> None:
        """Queue one of a request's answers."""
        name = self._free_name(answers.request.request_id, index)
        request, prompt = answers.part(index, name), answers.prompt
        sampling, spec = request.sampling, self._model.spec
        room = self._max_model_len - len(prompt.token_ids)
        wanted = sampling.max_tokens or spec.usual_tokens(sampling.min_tokens)
        sequence = Sequence(
            request=request,
            token_ids=list(prompt.token_ids),
            num_prompt_tokens=len(prompt.token_ids),
            placeholders=answers.placeholders,
            max_tokens=room if wanted is None else min(wanted, room),
            stop_token_ids=frozenset(sampling.stop_token_ids)
            | (frozenset() if sampling.ignore_eos else spec.stop_token_ids),
            arrival_s=self._clock(),
            index=index,
            parent_id=answers.request.request_id,
            preprocess_s=preprocess_s,
        )
        self._sequences[name] = answers.running[name] = sequence
        self._texts[name] = AnswerText(self._model.prompts.tokenizer, self._token_bytes, sampling)
        self._runner.add(sequence, prompt, answers.form.start() if answers.form else None)
        self._scheduler.add(sequence)

    def _free_name(self, request_id: str, index: int) -> str:
        """What a sequence is called: another request may have the name that an answer would have."""
        name = f"{request_id} answer {index}" if index else request_id
        taken = {*self._sequences, *(sequence.request_id for sequence in self._scheduler.aside.sequences)}
        while name in taken:
            name += "'"
        return name

    def _with_slices(self, prompt: PreparedPrompt) -> tuple[Placeholder, ...]:
        """The prompt's images with the work that the encoder has on each."""
        encoder = self._model.encoder
        pairs = zip(prompt.placeholders, prompt.images, strict=True)
        return tuple(
            replace(run, slices=tuple(part.work for part in encoder.slices(image))) for run, image in pairs
        )

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

    def _forget(self, sequence: Sequence) -> None:
        name = sequence.request_id
        self._runner.remove(name)
        del self._sequences[name], self._texts[name]
        del self._answers[sequence.parent_id].running[name]
