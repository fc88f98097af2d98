"""Recorded steps: what they say of a real engine's steps, that they are bounded, and that they travel."""

from pathlib import Path

import pytest

from tests.vlm_engine.test_engine import ask, drain, picture
from vlm_engine import AsyncEngine, Engine, EngineConfig, EngineProcess, wire
from vlm_engine.models import VisionLanguageModel, load_model
from vlm_engine.trace import StepTrace
from vlm_engine.warm_up import warm_up


@pytest.fixture(scope="module")
def model(qwen3_vl_checkpoint: Path) -> VisionLanguageModel:
    return load_model(EngineConfig(str(qwen3_vl_checkpoint), dtype="float32", device="cpu"))


def traced(model: VisionLanguageModel, **more: object) -> Engine:
    config = EngineConfig(model.spec.name, **({"kv_cache_tokens": 2048, "trace_steps": 100} | more))  # type: ignore[arg-type]
    return Engine(config, model=model)


def test_a_chat_and_a_frame_are_told_apart(model: VisionLanguageModel) -> None:
    engine = traced(model)
    engine.add(ask("chat", "hello", max_tokens=4))
    engine.add(ask("frame", picture(), max_tokens=2, priority="background"))
    drain(engine)
    steps = engine.trace()
    assert [step.number for step in steps] == list(range(engine.num_steps))
    parts = [part for step in steps for part in step.parts]
    done = {
        (p.request_id, p.kind): sum(
            q.amount for q in parts if (q.request_id, q.kind) == (p.request_id, p.kind)
        )
        for p in parts
    }
    assert done["chat", "decode"] == 3
    assert done["frame", "decode"] == 1
    assert done["chat", "prefill"] > 0
    assert done["frame", "prefill"] > 0
    assert done["frame", "encode"] > 0
    assert ("chat", "encode") not in done
    assert sum(p.samples for p in parts if p.request_id == "chat") == 4
    assert {p.request_id for p in parts if p.is_chat} == {"chat"}


def test_times_add_up(model: VisionLanguageModel) -> None:
    engine = traced(model)
    for name in ("one", "two"):
        engine.add(ask(name, picture(), "hello", max_tokens=4))
    drain(engine)
    previous_s = 0.0
    for step in engine.trace():
        times = step.times
        assert previous_s <= times.start_s <= times.planned_s <= times.lent_s <= times.end_s
        previous_s = times.end_s
        measured_ms = times.encode_ms + times.forward_ms
        assert sum(part.ms for part in step.parts) == pytest.approx(measured_ms, abs=0.01)
        assert measured_ms <= 1e3 * (times.end_s - times.lent_s) * 1.001
        assert step.predicted_ms > 0
        assert step.allowance_ms is not None
    assert traced(model, scheduler="static").trace() == []


def test_the_ring_keeps_the_newest(model: VisionLanguageModel) -> None:
    engine = traced(model, trace_steps=5)
    engine.add(ask("one", "hello", max_tokens=12))
    drain(engine)
    assert [step.number for step in engine.trace()] == list(range(engine.num_steps - 5, engine.num_steps))
    assert [step.number for step in engine.trace(engine.num_steps - 2)] == [
        engine.num_steps - 2,
        engine.num_steps - 1,
    ]
    assert engine.trace(engine.num_steps) == []


def test_nothing_is_recorded_unless_asked_for(model: VisionLanguageModel) -> None:
    engine = traced(model, trace_steps=0)
    engine.add(ask("one", "hello"))
    drain(engine)
    assert engine.trace() is None
    warm = traced(model)
    warm_up(warm)
    assert warm.trace() == [], "made-up requests are nobody's business"
    with pytest.raises(ValueError, match="trace_steps: must be 0 or more, not -1"):
        EngineConfig("m", trace_steps=-1)


@pytest.mark.parametrize("kind", [AsyncEngine, EngineProcess])
async def test_both_clients_tell_it(kind: type, qwen3_vl_checkpoint: Path) -> None:
    folder = str(qwen3_vl_checkpoint)
    engine = kind(EngineConfig(folder, device="cpu", kv_cache_tokens=2048, trace_steps=50, num_threads=1))
    await engine.start()
    try:
        assert await engine.trace() == []
        async for _ in engine.generate(ask("one", "hello", max_tokens=3)):
            pass
        steps = await engine.trace()
        assert all(isinstance(step, StepTrace) for step in steps)
        assert sum(part.samples for step in steps for part in step.parts) == 3
        assert await engine.trace(steps[-1].number) == steps[-1:]
    finally:
        await engine.close()
    message = wire.Trace(0, steps)
    assert wire.decode_to_client(wire.encode(message)) == message
