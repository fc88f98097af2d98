"""What a chat completion request may say. Strict: a number in quotes is an error, not a number."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from appliance.api.errors import bad_request, clipped, invalid_body
from vlm_engine import SamplingParams, StructuredOutput
from vlm_engine.request import Priority
from vlm_engine.sampling_params import MAX_CHOICES, MAX_TOP_LOGPROBS

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
# why: with these values they mean nothing; with any other they would change the answer.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template_kwargs": ({},),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": ("none",),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
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
    return [] if value in (None, "") else [value] if isinstance(value, str) else value


def _as_whole(value: object) -> object:
    """A whole number that a client wrote with a point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


MAX_MESSAGES = 10_000
MAX_PARTS = 10_000
_MAX_ID_DIGITS = 19

Whole = Annotated[int, BeforeValidator(_as_whole)]


def _as_ids(value: object) -> object:
    """Token ids as numbers: JSON's keys are strings."""
    if not isinstance(value, dict):
        return {} if value is None else value
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_DIGITS):
            raise ValueError(f"its keys have to be token ids, not '{clipped(key)}'")
    return {int(key): bias for key, bias in value.items()}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class ImageUrl(_Strict):
    """An image: a `data:` URI, or `camera://NAME` for a camera's newest frame; `detail` changes nothing."""

    url: str
    detail: str | None = None


Fps = Annotated[float, Field(gt=0, le=240)]


class VideoUrl(_Strict):
    """A video as a `data:` URI: a file, or JPEG frames; `fps` frames a second are taken, or were."""

    url: str
    fps: Fps | None = None


class Part(_Strict):
    """One piece of a message's content.

    Our extensions are `camera`, a camera's newest frame, and `video`, pictures as `data:` URIs in the order
    of time, `fps` of them a second (2 unless given).
    """

    type: Literal["text", "image_url", "camera", "video_url", "video"]
    text: str | None = None
    image_url: Annotated[ImageUrl | None, BeforeValidator(_as_url_object)] = None
    camera: str | None = None
    video_url: Annotated[VideoUrl | None, BeforeValidator(_as_url_object)] = None
    video: list[str] | None = None
    fps: Fps | None = None

    @property
    def is_video(self) -> bool:
        """Whether it is a clip."""
        return self.type in ("video_url", "video")

    @property
    def urls(self) -> Sequence[str]:
        """Where its pixels are."""
        if self.type == "video":
            return self.video or ()
        target = self.video_url if self.type == "video_url" else self.image_url
        return (target.url,) if target and self.type != "text" else ()

    @model_validator(mode="after")
    def _has_its_field(self) -> "Part":
        if getattr(self, self.type) is None:
            raise ValueError(f"a part of type '{self.type}' needs the field '{self.type}'")
        return self


class Message(_Strict):
    """One turn of the conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[Part], FailFast(), BeforeValidator(_as_parts)]

    @field_validator("content", mode="before")
    @classmethod
    def _may_be_nothing(cls, value: object, info: ValidationInfo) -> object:
        return "" if value is None and info.data.get("role") == "assistant" else value

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


class JsonSchema(_Strict):
    """A named JSON schema; it is kept to whether `strict` or not."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """What the answer is: text, any JSON object, or JSON of a schema."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        schema = self.json_schema and self.json_schema.schema_
        if self.type == "json_schema" and not isinstance(schema, dict):
            raise ValueError("a format of type 'json_schema' needs the field 'json_schema.schema', an object")
        return self

    def form(self) -> StructuredOutput | None:
        """The same for the engine."""
        if self.type == "json_schema" and self.json_schema is not None:
            schema = self.json_schema.schema_
            assert isinstance(schema, dict)
            return StructuredOutput.of_json(schema, "response_format.json_schema.schema")
        return None if self.type == "text" else StructuredOutput.of_json(field="response_format")


class StructuredOutputs(_Strict):
    """vLLM's field for the form of an answer; one of its parts is given."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "StructuredOutputs":
        given = [self.json_, self.json_object or None, self.regex, self.choice, self.grammar]
        if sum(value is not None for value in given) != 1:
            raise ValueError("give exactly one of 'json', 'json_object', 'regex', 'choice' and 'grammar'")
        return self

    def form(self) -> StructuredOutput:
        """The same for the engine."""
        where = "structured_outputs"
        if self.regex is not None:
            return StructuredOutput("regex", self.regex, f"{where}.regex")
        if self.choice is not None:
            return StructuredOutput.of_choice(self.choice, f"{where}.choice")
        if self.grammar is not None:
            return StructuredOutput("grammar", self.grammar, f"{where}.grammar")
        if isinstance(self.json_, str):
            return StructuredOutput("json", self.json_, f"{where}.json")
        return StructuredOutput.of_json(self.json_, f"{where}.json")


class ChatRequest(_Strict):
    """The body of `POST /v1/chat/completions`, as far as this server supports it.

    Extensions that other servers have too: `top_k` (0 or -1: all), `min_p`, `repetition_penalty`,
    `structured_outputs`, `stop_token_ids`, `min_tokens`, `ignore_eos` (do not stop at the model's end token)
    and `priority` (above 0: background work, that gives way to chats as camera frames do).
    """

    model_config = ConfigDict(extra="allow")

    model: str
    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = Field(default=None, ge=1)
    max_completion_tokens: Whole | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: Whole | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: Whole | None = Field(default=None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_as_ids)] = {}
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    n: Whole | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1000)]],
        BeforeValidator(_as_list),
        Field(max_length=4),
    ] = []
    stop_token_ids: list[Annotated[Whole, Field(ge=0)]] | None = Field(default=None, max_length=10_000)
    min_tokens: Whole | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Whole | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _has_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("'top_logprobs' needs 'logprobs': true")
        return value

    @field_validator("structured_outputs")
    @classmethod
    def _is_the_only_form(
        cls, value: StructuredOutputs | None, info: ValidationInfo
    ) -> StructuredOutputs | None:
        other = info.data.get("response_format")
        if value is not None and other is not None and other.type != "text":
            raise ValueError("'structured_outputs' and 'response_format' exclude each other")
        return value

    @property
    def form(self) -> StructuredOutput | None:
        """What the answer must keep to."""
        if self.structured_outputs is not None:
            return self.structured_outputs.form()
        return self.response_format.form() if self.response_format is not None else None

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
            min_p=self.min_p or 0.0,
            seed=self.seed,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self.logit_bias,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            n=self.n or 1,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            structured=self.form,
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
            shown = clipped(name)
            raise bad_request(f"unknown parameter: '{shown}'", param=shown, code="unknown_parameter")
    if sum(len(message.content) for message in chat.messages) > MAX_PARTS:
        raise bad_request(f"messages: more than {MAX_PARTS} parts in one request", param="messages")
    return chat


def _unsupported(name: str) -> str:
    accepted = " or ".join(repr(value) for value in _NEUTRAL[name])
    hint = f"leave it out or send {accepted}" if accepted else "leave it out"
    return f"'{name}' is not supported by this server: {hint}"
