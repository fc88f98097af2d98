"""Settings that no engine could keep."""

import math
from typing import Any

import pytest

from vlm_engine import EngineConfig, RequestError, SamplingParams, StructuredOutput, TurnConfig


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0, -1.0, 1e300])
@pytest.mark.parametrize(
    "name", ["chat_itl_ms", "chat_ttft_ms", "background_ttft_ms", "kv_cache_memory", "background_share"]
)
def test_numbers_that_are_none_are_named(name: str, value: float) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"{name}: must be above 0 and at most"):
        EngineConfig("m", **settings)


@pytest.mark.parametrize("value", [math.inf, math.nan, 1.0])
def test_a_reserve_leaves_something(value: float) -> None:
    with pytest.raises(ValueError, match="chat_kv_reserve: must be at least 0 and below 1"):
        EngineConfig("m", chat_kv_reserve=value)


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0])
def test_turns_come_so_often(value: float) -> None:
    with pytest.raises(ValueError, match="min_per_s: must be above 0"):
        TurnConfig("x", value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_tokens", 2**31),
        ("min_tokens", -1),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("temperature", math.nan),
        ("top_p", math.inf),
        ("stop", ("half \ud83d",)),
    ],
)
def test_sampling_out_of_bounds_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name


def test_half_a_character_in_a_form_names_its_field() -> None:
    with pytest.raises(RequestError, match="here must be a text of"):
        StructuredOutput("regex", "\udc4d+", "here")
