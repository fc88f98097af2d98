"""How the tokens of one request are chosen, and when it ends."""

import math
from dataclasses import dataclass
from typing import Any

from vlm_engine.errors import RequestError

GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one request; a bad value raises `RequestError` that names its field.

    Args:
        max_tokens: Most tokens to generate; None means as many as the context holds.
        temperature: Divides the logits; 0 (and anything below 1e-5) takes the best token always.
        top_p: Keeps the smallest set of tokens with this much probability together, in (0, 1].
        top_k: Keeps this many best tokens; 0 keeps all.
        seed: Makes the request's own random numbers repeatable, whatever runs beside it.
        stop: Strings that end the text; the text returned ends before them.
        ignore_eos: Goes on after the model's end token.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check(
            "max_tokens", self.max_tokens is None or _is_int(self.max_tokens, 1), "an integer of at least 1"
        )
        _check(
            "temperature", _is_number(self.temperature) and self.temperature >= 0, "a number of at least 0"
        )
        _check("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1")
        _check("top_k", _is_int(self.top_k, 0), "an integer of at least 0 (0 keeps all tokens)")
        _check("seed", self.seed is None or _is_int(self.seed, -(2**63), 2**64), "an integer of 64 bits")
        _check("stop", _are_texts(self.stop), "a tuple of strings that are not empty")
        _check("ignore_eos", isinstance(self.ignore_eos, bool), "true or false")

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is needed."""
        return self.temperature < GREEDY_BELOW


def _check(field: str, is_valid: bool, wanted: str) -> None:
    if not is_valid:
        raise RequestError(f"{field} must be {wanted}", field=field)


def _is_int(value: Any, low: int, end: int | None = None) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and value >= low and (end is None or value < end)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)
