"""How the tokens of one request are chosen, and when it ends."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from vlm_engine.errors import RequestError

GREEDY_BELOW = 1e-5
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 200_000
MOST = 2**31
"""Numbers are smaller than that, so that every part of the way can carry them."""

GrammarKind = Literal["json", "regex", "choice", "grammar"]


_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that an answer must have; whether it can be compiled is checked with the request.

    Args:
        kind: What `value` is.
        value: A JSON schema (`json`), a regular expression, a JSON list of strings (`choice`), or a grammar
            in llguidance's dialect of Lark.
        field: What errors call it: the field of the request in which it came.
    """

    kind: GrammarKind
    value: str
    field: str = dataclasses.field(default="structured", compare=False)

    def __post_init__(self) -> None:
        _check(self.field, self.kind in get_args(GrammarKind), f"one of {', '.join(get_args(GrammarKind))}")
        is_text = isinstance(self.value, str) and 0 < len(self.value) <= MAX_GRAMMAR_CHARS
        is_text = is_text and is_whole_text(self.value)
        _check(self.field, is_text, f"a text of 1 to {MAX_GRAMMAR_CHARS} whole characters")
        if self.kind == "choice":
            words = json.loads(self.value)
            _check(self.field, bool(words) and all(words), "a list of strings that are not empty")

    @classmethod
    def of_json(
        cls, schema: Mapping[str, Any] | None = None, field: str = "structured"
    ) -> "StructuredOutput":
        """JSON of a schema, or any object, in one line; the schema's own `x-guidance` may say otherwise."""
        return cls("json", json.dumps(schema or _OBJECT), field)

    @classmethod
    def of_choice(cls, words: Iterable[str], field: str = "structured") -> "StructuredOutput":
        """One of some texts."""
        return cls("choice", json.dumps(list(words)), field)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one request; a bad value raises `RequestError` that names its field.

    Args:
        max_tokens: Most tokens to generate; None takes the `max_new_tokens` of the checkpoint's
            ``generation_config.json``, without one as many as the context holds.
        temperature: Divides the logits; 0 (and anything below 1e-5) takes the best token always.
        top_p: Keeps the smallest set of tokens with this much probability together, in (0, 1].
        top_k: Keeps this many best tokens; 0 keeps all.
        min_p: Keeps tokens with at least this share of the best one's probability, from 0 to 1.
        seed: Makes the request's own random numbers repeatable, whatever runs beside it; choice i of
            several takes ``seed + i``.
        presence_penalty: Taken from the logit of every token that the output holds, from -2 to 2.
        frequency_penalty: The same, once for each time that the output holds it.
        repetition_penalty: Divides the positive logits of tokens in prompt or output, multiplies the
            negative ones; above 0, and 1 changes nothing.
        logit_bias: Added to the logits of these token ids, each from -100 to 100.
        logprobs: Tell the logarithm of each token's probability and of this many best ones beside it
            (0: its own only), at most 20; None tells none. They are those of the model itself, before
            anything above has changed them.
        n: Answers to make, 1 to 128.
        stop: Strings that end the text; the text returned ends before them.
        stop_token_ids: Token ids that end it as the model's own end token does.
        min_tokens: Nothing ends the text before it has so many tokens.
        ignore_eos: Goes on after the model's end token.
        structured: The form that the answer must have; it ends when that is complete, whatever
            `min_tokens` and `ignore_eos` say.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        self._check_draw()
        self._check_edits()
        self._check_end()

    def _check_draw(self) -> None:
        _check("temperature", _is_number(self.temperature, 0, 100), "a number from 0 to 100")
        _check("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1")
        _check("top_k", _is_int(self.top_k, 0), "an integer of at least 0 (0 keeps all tokens)")
        _check("min_p", _is_number(self.min_p, 0, 1), "a number from 0 to 1")
        _check("seed", self.seed is None or _is_int(self.seed, -(2**63), 2**64), "an integer of 64 bits")
        _check("n", _is_int(self.n, 1, MAX_CHOICES + 1), f"an integer from 1 to {MAX_CHOICES}")

    def _check_edits(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, _is_number(getattr(self, name), -2, 2), "a number from -2 to 2")
        # why: beyond that a logit becomes infinite, which no token can be drawn from
        _check(
            "repetition_penalty", _is_number(self.repetition_penalty, 0.01, 100), "a number from 0.01 to 100"
        )
        _check("logit_bias", _is_bias(self.logit_bias), "token ids with numbers from -100 to 100")
        is_count = self.logprobs is None or _is_int(self.logprobs, 0, MAX_TOP_LOGPROBS + 1)
        _check("logprobs", is_count, f"an integer from 0 to {MAX_TOP_LOGPROBS}")

    def _check_end(self) -> None:
        most = self.max_tokens
        _check("max_tokens", most is None or _is_int(most, 1), "an integer of at least 1")
        _check("stop", _are_texts(self.stop), "a tuple of strings that are not empty")
        are_ids = isinstance(self.stop_token_ids, tuple) and all(_is_int(i, 0) for i in self.stop_token_ids)
        _check("stop_token_ids", are_ids, "a tuple of token ids")
        _check("min_tokens", _is_int(self.min_tokens, 0), "an integer of at least 0")
        _check("min_tokens", most is None or self.min_tokens <= most, f"at most max_tokens ({most})")
        _check("ignore_eos", isinstance(self.ignore_eos, bool), "true or false")
        is_form = self.structured is None or isinstance(self.structured, StructuredOutput)
        _check("structured", is_form, "a StructuredOutput")

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is needed."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalty(self) -> bool:
        """Whether tokens that were there before count."""
        is_even = self.presence_penalty == self.frequency_penalty == 0 and self.repetition_penalty == 1
        return not is_even

    def of_choice(self, index: int) -> "SamplingParams":
        """The settings of answer `index` of several, from 0: one answer, with random numbers of its own."""
        seed = self.seed if self.seed is None or not index else (self.seed + index) % 2**64
        return replace(self, n=1, seed=seed)


def _check(field: str, is_valid: bool, wanted: str) -> None:
    if not is_valid:
        raise RequestError(f"{field} must be {wanted}", field=field)


def _is_int(value: Any, low: int, end: int | None = None) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and low <= value < (MOST if end is None else end)


def _is_number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < MOST and low <= value <= high


def _is_bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _is_int(token_id, 0) and _is_number(bias, -100, 100) for token_id, bias in value.items()
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(text, str) and text and is_whole_text(text) for text in value
    )


def is_whole_text(text: str) -> bool:
    """Whether a text can be written: half of a pair of surrogates has no bytes, and tokenizers fail at it."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
