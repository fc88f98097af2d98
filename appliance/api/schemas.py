"""What a chat completion request may say. Strict: a number in quotes is an error, not a number."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from appliance.api.errors import bad_request, invalid_body
from vlm_engine import SamplingParams
from vlm_engine.request import Priority

_HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# The values with which these mean nothing; with any other they would change the answer.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template_kwargs": ({},),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_json": (),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_UNSUPPORTED_IN_MESSAGE = ("audio", "function_call", "tool_call_id", "tool_calls")


def _as_url_object(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        return value
    raise ValueError("has to be a string or a list of parts")


def _as_list(value: object) -> object:
    return [] if value is None else [value] if isinstance(value, str) else value


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class ImageUrl(_Strict):
    """An image: a `data:` URI, or `camera://NAME` for a camera's newest frame; `detail` changes nothing."""

    url: str
    detail: str | None = None


class Part(_Strict):
    """One piece of a message's content; `camera` (our extension) is a camera's newest frame."""

    type: Literal["text", "image_url", "camera"]
    text: str | None = None
    image_url: Annotated[ImageUrl | None, BeforeValidator(_as_url_object)] = None
    camera: str | None = None

    @model_validator(mode="after")
    def _has_its_field(self) -> "Part":
        if getattr(self, self.type) is None:
            raise ValueError(f"a part of type '{self.type}' needs the field '{self.type}'")
        return self


class Message(_Strict):
    """One turn of the conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[Part], BeforeValidator(_as_parts)]

    @model_validator(mode="after")
    def _has_nothing_unsupported(self) -> "Message":
        for name in _UNSUPPORTED_IN_MESSAGE:
            if (self.model_extra or {}).get(name):
                raise ValueError(f"'{name}' is not supported by this server")
        return self


class StreamOptions(_Strict):
    """`include_usage` adds a last chunk of token counts, `continuous_usage_stats` counts in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatRequest(_Strict):
    """The body of `POST /v1/chat/completions`, as far as this server supports it.

    `top_k` (0 or -1: all), `ignore_eos` (do not stop at the model's end token) and `priority` (above 0:
    background work, that gives way to chats as camera frames do) are extensions that other servers have too.
    """

    model_config = ConfigDict(extra="allow")

    model: str
    messages: list[Message] = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list), Field(max_length=4)
    ] = []
    ignore_eos: bool | None = None
    priority: int | None = None

    @property
    def urgency(self) -> Priority:
        """Whether a person waits for the answer."""
        return "background" if (self.priority or 0) > 0 else "interactive"

    @property
    def is_usage_wanted(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def is_usage_continuous(self) -> bool:
        """Whether every chunk of a stream carries token counts."""
        return self.is_usage_wanted and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def sampling(self) -> SamplingParams:
        """The request's part for the sampler, OpenAI's defaults filled in."""
        return SamplingParams(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            seed=self.seed,
            stop=tuple(self.stop),
            ignore_eos=bool(self.ignore_eos),
        )


def parse_chat(body: bytes) -> ChatRequest:
    """The request in a body; raises `ApiError` (400) that names the field.

    OpenAI's fields that change nothing here are accepted; those that would change the answer are refused
    unless they say what this server does anyway, and so is every name that nobody knows.
    """
    try:
        chat = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error) from None
    for name, value in (chat.model_extra or {}).items():
        if name in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[name]:
                raise bad_request(_unsupported(name), param=name, code="unsupported_parameter")
        elif name not in _HARMLESS:
            raise bad_request(f"unknown parameter: '{name}'", param=name, code="unknown_parameter")
    return chat


def _unsupported(name: str) -> str:
    accepted = " or ".join(repr(value) for value in _NEUTRAL[name])
    hint = f"leave it out or send {accepted}" if accepted else "leave it out"
    return f"'{name}' is not supported by this server: {hint}"
