"""What goes into the engine and what comes out of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vlm_engine.sampling_params import SamplingParams

Priority = Literal["interactive", "background"]
FinishReason = Literal["stop", "length", "cancelled", "expired", "error"]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One conversation to be continued.

    Args:
        request_id: Unique among the requests that are running.
        messages: ``[{"role": …, "content": str | [{"type": "text", "text": str} |
            {"type": "image", "image": PIL.Image, "scale": 1.0} |
            {"type": "video", "frames": [PIL.Image, …], "fps": float}]}]``. ``scale`` (0 to 1, may be
            missing) is the share of the size to which a family enlarges every picture; the least of a request
            holds for all its images. Families that read a picture in its own size have no use for it.
        sampling: How tokens are chosen and when to end.
        priority: Interactive work goes before background work and may preempt it.
        expires_at: On the engine's clock, in seconds; a request that waits then, or whose images are
            not encoded then, ends with ``finish_reason="expired"``.
        tenant: Who sends it, as a camera; background work is shared fairly between tenants.
        wanted_at: On the engine's clock; when background work should be done at the latest. A time that
            is past asks for all that chats leave, as is right while more waits outside of the engine.
    """

    request_id: str
    messages: Sequence[Message]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: Priority = "interactive"
    expires_at: float | None = None
    tenant: str = ""
    wanted_at: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; image tokens are part of the prompt's."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    image_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one request went, in milliseconds.

    ``queue_ms`` is arrival to first step, ``prefill_ms`` first step to first token without the
    encoder's share, ``encode_ms`` the encoder's share, ``decode_ms`` first token to the end.
    """

    queue_ms: float = 0.0
    preprocess_ms: float = 0.0
    encode_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token as bytes, and the natural logarithm of its probability.

    The bytes of a token need not be whole characters; those of an answer's tokens joined are its text.
    """

    token_id: int
    data: bytes
    logprob: float

    @property
    def text(self) -> str:
        """The token for people, with a replacement for what is no character."""
        return self.data.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token taken at one position, and the model's best ones there, best first."""

    taken: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """News of one request after one step: new text, or its end.

    ``text`` is the delta and may be empty while a character or a possible stop string is not
    complete. ``usage`` counts so far; ``timings`` come with the last event only. ``index`` says which
    answer of the request it is about, if that wants several; each has a last event, but an answer that
    ends other than with ``stop`` or ``length`` ends the request. ``logprobs`` has an entry for each new
    token but one that ends the text, for requests that want them. ``is_unanswered`` tells an error of which
    the request is not the cause: there is no engine any more, or it is silent.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: str | None = None
    index: int = 0
    logprobs: tuple[PositionLogprobs, ...] = ()
    is_unanswered: bool = False

    @property
    def is_last(self) -> bool:
        """Whether nothing follows this event in its answer."""
        return self.finish_reason is not None

    @property
    def is_failure(self) -> bool:
        """Whether it ends its request, with all the answers that it wants."""
        return self.finish_reason not in (None, "stop", "length")

    def merged(self, later: "TokenEvent") -> "TokenEvent":
        """This event and the one after it as a single one, for a reader that fell behind."""
        usage, logprobs = later.usage or self.usage, self.logprobs + later.logprobs
        text, token_ids = self.text + later.text, self.token_ids + later.token_ids
        return replace(later, text=text, token_ids=token_ids, usage=usage, logprobs=logprobs)
