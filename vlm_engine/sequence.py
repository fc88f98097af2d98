"""The one mutable state of a request."""

from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

from vlm_engine.cost_model import SliceWork
from vlm_engine.request import FinishReason, GenerationRequest, Timings, Usage


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The run of token positions that one image takes in a prompt.

    Args:
        start: Position of the first image token.
        length: Number of image tokens.
        digest: Content hash of pixels, size and mode.
        index: Which image of the request it is.
        slices: The encoder's work on it, in pieces that may run in different steps.
        attends_both_ways: Whether its tokens see each other, later ones too, so that they are computed
            together.
    """

    start: int
    length: int
    digest: bytes
    index: int = 0
    slices: tuple[SliceWork, ...] = (SliceWork(num_slices=1),)
    attends_both_ways: bool = False
    _sums: tuple[SliceWork, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sums", tuple(accumulate(self.slices, initial=SliceWork())))

    def work(self, first: int, last: int) -> SliceWork:
        """The work of slices ``[first, last)`` together."""
        return self._sums[last] - self._sums[first]

    @property
    def end(self) -> int:
        """Position after the last image token."""
        return self.start + self.length


class Status(Enum):
    """Where a sequence stands; there is no prefill or decode state, only tokens left to compute."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one request, how many of them are computed, and the blocks that hold them.

    Args:
        request: The request, frozen.
        token_ids: Prompt and output; grows by one with each sampled token.
        num_prompt_tokens: How many of `token_ids` are the prompt.
        placeholders: Images in the prompt, in order.
        max_tokens: Output tokens at which it ends, already clamped to the context.
        stop_token_ids: Ids that end it.
        arrival_s: When it was submitted, on the engine's clock.
        place: Where it stands among background work, by the fair share of its tenant.
        index: Which answer of the request it is, if that wants several.
        parent_id: Id of the request as it was asked for.
        forgiven_s: How much of its lateness is not made up for by shorter steps.
    """

    request: GenerationRequest
    token_ids: list[int]
    num_prompt_tokens: int
    placeholders: tuple[Placeholder, ...]
    max_tokens: int
    stop_token_ids: frozenset[int]
    arrival_s: float
    index: int = 0
    parent_id: str = ""
    status: Status = Status.WAITING
    place: float = 0.0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    finish_reason: FinishReason | None = None
    first_step_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    forgiven_s: float = 0.0
    preprocess_s: float = 0.0
    encode_s: float = 0.0

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    @property
    def is_interactive(self) -> bool:
        """Whether a person waits for it."""
        return self.request.priority == "interactive"

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Tokens whose keys and values are not computed yet; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_together(self) -> int:
        """Least that can be computed next: what is left of an image that attends both ways, else 1 token.

        why: an image that a cached prefix ends in is not computed from its start again; its cached keys
        and values were computed with all of it in sight, and its digest is in their blocks' hashes.
        """
        here = self.num_computed_tokens
        if here >= self.num_prompt_tokens:
            return 1
        images = self.images_between(here, here + 1)
        return images[0].end - here if images and images[0].attends_both_ways else 1

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.num_left == 1 and self.num_output_tokens > 0

    def has_expired(self, now: float) -> bool:
        """Whether nobody wants it any more at `now` (seconds on the engine's clock)."""
        return self.request.expires_at is not None and self.request.expires_at <= now

    def images_between(self, start: int, end: int) -> list[Placeholder]:
        """Images with at least one token in positions ``[start, end)``."""
        return [image for image in self.placeholders if image.start < end and start < image.end]

    @property
    def images_left(self) -> list[Placeholder]:
        """Images with tokens that are not computed yet."""
        return self.images_between(self.num_computed_tokens, self.num_tokens)

    def append(self, token_id: int) -> FinishReason | None:
        """Add a sampled token; returns why the sequence ends with it, if it does."""
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids and self.num_output_tokens > self.request.sampling.min_tokens:
            return "stop"
        return "length" if self.num_output_tokens >= self.max_tokens else None

    def usage(self) -> Usage:
        """Token counts so far."""
        num_image = sum(image.length for image in self.placeholders)
        return Usage(self.num_prompt_tokens, self.num_output_tokens, self.num_cached_tokens, num_image)

    def timings(self, now: float) -> Timings:
        """Where its time went until `now` (seconds on the engine's clock)."""
        started = now if self.first_step_s is None else self.first_step_s
        answered = now if self.first_token_s is None else self.first_token_s
        return Timings(
            queue_ms=1e3 * max(0.0, started - self.arrival_s),
            preprocess_ms=1e3 * self.preprocess_s,
            encode_ms=1e3 * self.encode_s,
            prefill_ms=1e3 * max(0.0, answered - started - self.encode_s),
            decode_ms=1e3 * max(0.0, now - answered),
        )
