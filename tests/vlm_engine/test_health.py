"""Steps that fail or move nothing, on a tiny real model."""

from pathlib import Path

import pytest
import torch

from tests.vlm_engine.test_engine import Faulty, ask, drain, make_engine
from vlm_engine import Engine, EngineBroken, EngineConfig, EngineError
from vlm_engine.models import VisionLanguageModel, load_model
from vlm_engine.plan import StepPlan


@pytest.fixture(scope="module")
def model(qwen3_vl_checkpoint: Path) -> VisionLanguageModel:
    return load_model(EngineConfig(str(qwen3_vl_checkpoint), dtype="float32", device="cpu"))


class Broken(Faulty):
    """A model of which no step succeeds while it has an `error`."""

    error: Exception | None = None

    def forward(self, *args: object) -> object:
        if self.error is not None:
            raise self.error
        return self._part.forward(*args)  # type: ignore[attr-defined]


def fail(engine: Engine, times: int) -> None:
    for number in range(times):
        engine.add(ask(f"bad{number}", "hello"))
        assert engine.step()[0].finish_reason == "error"


def test_steps_that_fail_again_and_again_are_told_and_then_end_the_engine(model: VisionLanguageModel) -> None:
    broken, now = Broken(model), [0.0]
    engine = Engine(EngineConfig(model.spec.name), model=broken, clock=lambda: now[0])  # type: ignore[arg-type]
    broken.error = RuntimeError("no kernel")
    fail(engine, 2)
    assert engine.health.reason is None, "bad requests fail alone"
    fail(engine, 1)
    assert engine.health.reason == "the last 3 steps failed: RuntimeError: no kernel"
    broken.error = None
    engine.add(ask("good", "hello"))
    engine.step()
    assert engine.health.reason is None
    drain(engine)
    broken.error = RuntimeError("no kernel")
    fail(engine, 20)
    now[0] += 16
    assert engine.health.reason is None, "somebody has to try"
    with pytest.raises(EngineBroken, match="21 steps in a row failed: RuntimeError: no kernel"):
        fail(engine, 1)


def test_one_request_of_a_script_fails_as_the_engines_other_errors(model: VisionLanguageModel) -> None:
    broken = Broken(model)
    engine = make_engine(broken)  # type: ignore[arg-type]
    broken.error = RuntimeError("no kernel")
    with pytest.raises(EngineError, match="no kernel"):
        engine.generate(ask("a", "hello"))


def test_a_lost_device_ends_the_engine_at_once(model: VisionLanguageModel) -> None:
    broken = Broken(model)
    engine = make_engine(broken)  # type: ignore[arg-type]
    broken.error = torch.OutOfMemoryError("CUDA out of memory")
    fail(engine, 1)
    broken.error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(EngineBroken, match="the device is lost: AcceleratorError: CUDA error"):
        fail(engine, 1)


def test_steps_that_move_nothing_end_the_engine(
    model: VisionLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    engine = Engine(EngineConfig(model.spec.name), model=model, clock=lambda: now[0])
    monkeypatch.setattr(engine.scheduler, "plan", lambda now: StepPlan())
    engine.add(ask("x", "hello"))
    for now[0] in range(0, 31, 5):
        assert not engine.step()
    now[0] = 31
    with pytest.raises(EngineBroken, match="no step has moved anything for 30 s while requests wait"):
        engine.step()


def test_clients_that_give_up_do_not_hide_that_nothing_moves(
    model: VisionLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E25: each waits for ten seconds; as soon as nobody waits, the time begins anew."""
    now, plan = [0.0], StepPlan()
    engine = Engine(EngineConfig(model.spec.name), model=model, clock=lambda: now[0])
    monkeypatch.setattr(engine.scheduler, "plan", lambda now: plan)
    for number in range(2):
        engine.add(ask(f"{number}", "hello"))
    for now[0] in range(0, 30, 10):
        engine.step()
        engine.abort(f"{now[0] // 10}")
        engine.add(ask(f"{now[0] // 10 + 2}", "hello"))
    now[0] = 31
    with pytest.raises(EngineBroken):
        engine.step()
    for number in range(3, 5):
        engine.abort(f"{number}")
    engine.add(ask("x", "hello"))
    assert engine.step() == []
