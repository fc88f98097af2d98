"""What the engine counts: plain numbers and histograms that travel as a snapshot; pure Python.

Recording takes about a microsecond a token. How the numbers are published is the user's business.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import get_args

from vlm_engine.books import Histogram, HistogramSnapshot, WorkBooks, WorkStats, sums
from vlm_engine.request import FinishReason, Priority
from vlm_engine.sequence import Sequence
from vlm_engine.speculation import SpeculationStats
from vlm_engine.turn import TurnStats

# why: fine around what chats are promised, coarse behind it; upper bounds in seconds.
_FINE = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.075, 0.09, 0.1, 0.11, 0.125, 0.15, 0.2, 0.3)
TOKEN_BOUNDS = (*_FINE, 0.5, 1.0, 2.5, 5.0)
REQUEST_BOUNDS = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    3.0,
    5.0,
    8.0,
    13.0,
    20.0,
    30.0,
    60.0,
)


@dataclass(frozen=True, slots=True)
class ClassStats:
    """The requests of one priority; counts are since the start.

    Times to the first token and to the end count from before the preprocessing. Queue, prefill, decode and
    encode times are of requests that gave a token (encode: and had an image), times to the end of
    those that ended by themselves.

    Args:
        prompt_tokens: Of requests that gave a token; image tokens are part of it.
        cached_tokens: How many of these were found in the KV cache.
        finished: Requests by how they ended.
    """

    num_running: int
    num_waiting: int
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    finished: dict[FinishReason, int]
    inter_token: HistogramSnapshot
    first_token: HistogramSnapshot
    queue: HistogramSnapshot
    encode: HistogramSnapshot
    prefill: HistogramSnapshot
    decode: HistogramSnapshot
    whole: HistogramSnapshot

    def ended(self) -> "ClassStats":
        """After the engine's death: what ran or waited ended with an error."""
        lost: dict[FinishReason, int] = {"error": self.num_running + self.num_waiting}
        return replace(self, num_running=0, num_waiting=0, finished=sums(self.finished, lost))

    def after(self, earlier: "ClassStats") -> "ClassStats":
        """This state with the counts of an earlier engine added."""
        return ClassStats(
            self.num_running,
            self.num_waiting,
            earlier.prompt_tokens + self.prompt_tokens,
            earlier.cached_tokens + self.cached_tokens,
            earlier.generation_tokens + self.generation_tokens,
            sums(earlier.finished, self.finished),
            earlier.inter_token + self.inter_token,
            earlier.first_token + self.first_token,
            earlier.queue + self.queue,
            earlier.encode + self.encode,
            earlier.prefill + self.prefill,
            earlier.decode + self.decode,
            earlier.whole + self.whole,
        )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine's books; counts are since the start.

    Args:
        num_encoder_tokens: Image tokens in the encoder cache, of `encoder_cache_tokens`.
        counts: ``floor_overruns``, and why sequences got nothing in a step.
        preemptions: Sequences sent back to the queue, by what was short: ``memory`` or ``slots`` for
            another one, or ``deadlock`` when all waited for each other's memory.
        allowance_ms: What the last step could take; None where steps are counted in tokens.
        steps: Forward passes with batch building and sampling.
        slices: Encoder slices.
        classes: Requests by priority.
        num_restarts: Earlier engines whose counts are part of these.
        turns: Detectors that share the device.
        speculation: Tokens that were proposed.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_encoder_tokens: int
    encoder_cache_tokens: int
    num_steps: int
    num_encoded_images: int
    counts: dict[str, int]
    preemptions: dict[str, int]
    allowance_ms: float | None
    steps: WorkStats
    slices: WorkStats
    classes: dict[Priority, ClassStats]
    num_restarts: int = 0
    turns: TurnStats = field(default_factory=TurnStats)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def num_preemptions(self) -> int:
        """Preemptions for all reasons."""
        return sum(self.preemptions.values())

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that are held, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks

    def ended(self) -> "EngineStats":
        """After the engine's death: the counts stay, nothing is held, what ran ended with an error."""
        return replace(
            self,
            num_running=0,
            num_waiting=0,
            num_free_blocks=self.num_blocks,
            num_encoder_tokens=0,
            classes={name: stats.ended() for name, stats in self.classes.items()},
            turns=self.turns.ended(),
        )

    def after(self, earlier: "EngineStats") -> "EngineStats":
        """This state with the counts of the engine before it added, so that no count ever falls."""
        return replace(
            self,
            num_steps=earlier.num_steps + self.num_steps,
            num_encoded_images=earlier.num_encoded_images + self.num_encoded_images,
            counts=sums(earlier.counts, self.counts),
            preemptions=sums(earlier.preemptions, self.preemptions),
            steps=self.steps.after(earlier.steps),
            slices=self.slices.after(earlier.slices),
            classes={name: stats.after(earlier.classes[name]) for name, stats in self.classes.items()},
            num_restarts=earlier.num_restarts + self.num_restarts + 1,
            turns=self.turns.after(earlier.turns),
            speculation=self.speculation.after(earlier.speculation),
        )


def _token_histogram() -> Histogram:
    return Histogram(TOKEN_BOUNDS)


def _request_histogram() -> Histogram:
    return Histogram(REQUEST_BOUNDS)


@dataclass(slots=True)
class _ClassBooks:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    inter_token: Histogram = field(default_factory=_token_histogram)
    first_token: Histogram = field(default_factory=_request_histogram)
    queue: Histogram = field(default_factory=_request_histogram)
    encode: Histogram = field(default_factory=_request_histogram)
    prefill: Histogram = field(default_factory=_request_histogram)
    decode: Histogram = field(default_factory=_request_histogram)
    whole: Histogram = field(default_factory=_request_histogram)

    def snapshot(self, num_running: int, num_waiting: int) -> ClassStats:
        return ClassStats(
            num_running,
            num_waiting,
            self.prompt_tokens,
            self.cached_tokens,
            self.generation_tokens,
            dict(self.finished),
            self.inter_token.snapshot(),
            self.first_token.snapshot(),
            self.queue.snapshot(),
            self.encode.snapshot(),
            self.prefill.snapshot(),
            self.decode.snapshot(),
            self.whole.snapshot(),
        )


class EngineMetrics:
    """The books that an engine keeps while it runs."""

    def __init__(self) -> None:
        self.steps, self.slices = WorkBooks(), WorkBooks()
        self._books: dict[Priority, _ClassBooks] = {name: _ClassBooks() for name in get_args(Priority)}

    def add_token(self, sequence: Sequence, now: float) -> None:
        """Book a token of `now` (engine's clock), before the sequence's own times are moved on."""
        books = self._books[sequence.request.priority]
        books.generation_tokens += 1
        if sequence.last_token_s is None:
            books.first_token.observe(now - sequence.arrival_s + sequence.preprocess_s)
            books.prompt_tokens += sequence.num_prompt_tokens
            books.cached_tokens += sequence.num_cached_tokens
        else:
            books.inter_token.observe(now - sequence.last_token_s)

    def add_end(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """Book the end of a request at `now` (engine's clock)."""
        books, timings = self._books[sequence.request.priority], sequence.timings(now)
        books.finished[reason] += 1
        if sequence.first_token_s is not None:
            books.queue.observe(timings.queue_ms / 1e3)
            books.prefill.observe(timings.prefill_ms / 1e3)
            books.decode.observe(timings.decode_ms / 1e3)
            if sequence.placeholders:
                books.encode.observe(timings.encode_ms / 1e3)
        if reason in ("stop", "length"):
            books.whole.observe(now - sequence.arrival_s + sequence.preprocess_s)

    def classes(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> dict[Priority, ClassStats]:
        """The books of all priorities, with how many requests of each run and wait now."""
        num_running = Counter(sequence.request.priority for sequence in running)
        num_waiting = Counter(sequence.request.priority for sequence in waiting)
        return {
            name: books.snapshot(num_running[name], num_waiting[name]) for name, books in self._books.items()
        }
