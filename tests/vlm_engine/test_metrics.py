"""What the engine counts, against counts by hand on a clock that the test moves."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.vlm_engine.test_engine import ask, drain, picture
from vlm_engine import Engine, EngineConfig, EngineStats, HistogramSnapshot, wire
from vlm_engine.books import Histogram
from vlm_engine.metrics import REQUEST_BOUNDS, TOKEN_BOUNDS
from vlm_engine.models import VisionLanguageModel, load_model
from vlm_engine.speculation import SpeculationStats
from vlm_engine.warm_up import warm_up


@pytest.fixture(scope="module")
def model(qwen3_vl_checkpoint: Path) -> VisionLanguageModel:
    return load_model(EngineConfig(str(qwen3_vl_checkpoint), dtype="float32", device="cpu"))


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_engine(model: VisionLanguageModel, clock: Clock | None = None, **more: object) -> Engine:
    config = EngineConfig(model.spec.name, **({"kv_cache_tokens": 2048} | more))  # type: ignore[arg-type]
    return Engine(config, model=model, clock=clock or Clock())


def filled(histogram: HistogramSnapshot) -> dict[float, int]:
    """Counts by the upper bound of their bucket, empty buckets left out."""
    bounds = (*histogram.bounds, float("inf"))
    return {bound: n for bound, n in zip(bounds, histogram.counts, strict=True) if n}


def test_buckets_hold_their_upper_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.0, 0.1, 0.11, 1.0, 1.01, 70.0):
        histogram.observe(value)
    snapshot = histogram.snapshot()
    assert snapshot.counts == (2, 2, 2)
    assert snapshot.sum == pytest.approx(72.22)
    assert (snapshot + snapshot).counts == (4, 4, 4)
    assert (snapshot + snapshot).sum == pytest.approx(144.44)


@pytest.mark.parametrize("bounds", [TOKEN_BOUNDS, REQUEST_BOUNDS])
def test_bounds_rise(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_times_and_counts_by_class(model: VisionLanguageModel) -> None:
    """A chat of four tokens beside a frame of two: a step every so many milliseconds."""
    clock = Clock()
    engine = make_engine(model, clock, scheduler="static")
    chat, frame = (
        ask("chat", "hello", max_tokens=4),
        ask("frame", picture(), max_tokens=2, priority="background"),
    )
    num_prompt = {}
    for request in (chat, frame):
        prompt, _ = engine.prepare(request)
        num_prompt[request.request_id] = len(prompt.token_ids)
        engine.submit(request, prompt, preprocess_s=0.125)
    waiting = engine.stats()
    assert {name: (c.num_running, c.num_waiting) for name, c in waiting.classes.items()} == {
        "interactive": (0, 1),
        "background": (0, 1),
    }
    for pause_s in (0.25, 0.035, 0.07, 0.2001):
        clock.now_s += pause_s
        engine.step()
    assert not engine.has_work
    stats = engine.stats()
    chats, frames = stats.classes["interactive"], stats.classes["background"]
    assert filled(chats.inter_token) == {0.04: 1, 0.075: 1, 0.3: 1}
    assert chats.inter_token.sum == pytest.approx(0.3051)
    assert filled(frames.inter_token) == {0.04: 1}
    assert filled(chats.queue) == filled(frames.queue) == {0.3: 1}
    assert chats.queue.sum == pytest.approx(0.25)
    assert filled(chats.first_token) == filled(frames.first_token) == {0.5: 1}
    assert chats.first_token.sum == pytest.approx(0.375)
    assert filled(chats.whole) == {0.75: 1}
    assert chats.whole.sum == pytest.approx(0.125 + 0.25 + 0.3051)
    assert frames.whole.sum == pytest.approx(0.125 + 0.25 + 0.035)
    assert (chats.encode.num_values, frames.encode.num_values) == (0, 1)
    assert frames.encode.sum > 0
    assert chats.prefill.num_values == frames.prefill.num_values == 1
    assert (chats.prompt_tokens, frames.prompt_tokens) == (num_prompt["chat"], num_prompt["frame"])
    assert (chats.generation_tokens, frames.generation_tokens) == (4, 2)
    assert chats.finished == frames.finished == {"length": 1}


def test_who_never_ran_is_counted_but_not_timed(model: VisionLanguageModel) -> None:
    """E20: aborted in the queue."""
    engine = make_engine(model)
    engine.add(ask("gone", "hello"))
    engine.abort("gone")
    chats = engine.stats().classes["interactive"]
    assert chats.finished == {"cancelled": 1}
    assert chats.whole.num_values == chats.queue.num_values == chats.first_token.num_values == 0


def test_steps_beside_their_predictions(model: VisionLanguageModel) -> None:
    engine = make_engine(model, chat_itl_ms=80.0)
    engine.add(ask("one", picture(), "hello", max_tokens=5))
    drain(engine)
    stats = engine.stats()
    assert stats.steps.total_ms > stats.steps.last_ms > 0
    assert stats.steps.total_predicted_ms > stats.steps.last_predicted_ms > 0
    assert stats.slices.total_ms > 0
    assert stats.steps.relative_error == engine.cost_model.step.relative_error > 0
    assert stats.allowance_ms is not None
    assert 0 <= stats.allowance_ms <= 250.0
    assert 0 < stats.num_encoder_tokens <= stats.encoder_cache_tokens
    assert stats.kv_cache_usage == 0.0
    assert make_engine(model, scheduler="static").stats().allowance_ms is None


def test_warming_up_leaves_no_counts(model: VisionLanguageModel) -> None:
    engine = make_engine(model)
    warm_up(engine)
    stats = engine.stats()
    assert stats.num_steps == stats.num_encoded_images == stats.steps.total_ms == 0
    assert not stats.counts
    assert not stats.preemptions
    assert all(c.generation_tokens == 0 and not c.finished for c in stats.classes.values())


def test_snapshots_travel(model: VisionLanguageModel) -> None:
    engine = make_engine(model)
    engine.add(ask("one", picture(), "hello"))
    drain(engine)
    stats = engine.stats()
    received = wire.decode_to_client(wire.encode(wire.Heartbeat(stats)))
    assert received == wire.Heartbeat(stats)


def after_one_request(model: VisionLanguageModel) -> EngineStats:
    engine = make_engine(model)
    engine.add(ask("one", picture(), "hello"))
    drain(engine)
    return engine.stats()


def test_counts_go_on_where_a_dead_engine_ended(model: VisionLanguageModel) -> None:
    """A7, E25: what ran ended with an error; after a restart both engines are counted."""
    first, second = after_one_request(model), after_one_request(model)
    first = replace(first, counts={"budget": 2}, preemptions={"memory": 1})
    first = replace(first, speculation=SpeculationStats(2, 8, 5))
    second = replace(second, counts={"budget": 1, "slots": 1}, preemptions={"memory": 1, "slots": 3})
    chats = replace(first.classes["interactive"], num_running=2, num_waiting=1)
    dying = replace(
        first,
        num_running=2,
        num_waiting=1,
        num_free_blocks=0,
        classes={**first.classes, "interactive": chats},
    )
    dead = dying.ended()
    assert (dead.num_running, dead.num_waiting, dead.kv_cache_usage) == (0, 0, 0.0)
    assert dead.classes["interactive"].finished == {"length": 1, "error": 3}
    both = second.after(dead)
    assert both.num_restarts == 1
    assert second.after(both).num_restarts == 2
    assert both.num_steps == first.num_steps + second.num_steps
    assert both.counts == {"budget": 3, "slots": 1}
    assert both.preemptions == {"memory": 2, "slots": 3}
    assert both.speculation == SpeculationStats(2, 8, 5)
    assert both.steps.total_ms == first.steps.total_ms + second.steps.total_ms
    assert both.steps.last_ms == second.steps.last_ms
    added, mine = both.classes["interactive"], second.classes["interactive"]
    assert added.finished == {"length": 2, "error": 3}
    assert added.inter_token == first.classes["interactive"].inter_token + mine.inter_token
    assert added.generation_tokens == 2 * mine.generation_tokens
    assert added.num_running == 0
