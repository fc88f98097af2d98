"""What steps cost, kept on disk: found again, told apart, and left aside when it cannot be used."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tests.vlm_engine.test_engine import ask, drain
from vlm_engine import Engine, EngineConfig
from vlm_engine.calibration import cost_cache
from vlm_engine.cost_cache import CostCache, cache_folder
from vlm_engine.cost_model import CostModel, SliceWork, StepWork
from vlm_engine.models import VisionLanguageModel, load_model
from vlm_engine.warm_up import CALIBRATION_S, keep_costs, warm_up

WORK, SLICES = StepWork(64, 2, 500, 3000), SliceWork(4, 256, 512, 256, 200_000)


@pytest.fixture(scope="module")
def model(qwen3_vl_checkpoint: Path) -> VisionLanguageModel:
    return load_model(EngineConfig(str(qwen3_vl_checkpoint), dtype="float32", device="cpu"))


def make_engine(model: VisionLanguageModel, folder: Path | str) -> Engine:
    return Engine(EngineConfig(model.spec.name, kv_cache_tokens=4096, cost_cache=str(folder)), model=model)


def learned() -> CostModel:
    cost = CostModel()
    for step in range(200):
        cost.learn_step(StepWork(1 + step % 90, step % 3, step, step * 10), 3.0 + step % 90 / 10)
        cost.learn_slices(SliceWork(1 + step % 4, 64, 64 * (step % 3), 64, step * 100), 2.0 + step % 4)
    return cost


def test_costs_are_found_again(tmp_path: Path) -> None:
    first, second = learned(), CostModel()
    CostCache(tmp_path / "new" / "folder", {"model": "a"}).store(first)
    assert CostCache(tmp_path / "new" / "folder", {"model": "a"}).load_into(second)
    assert second.step_ms(WORK) == first.step_ms(WORK)
    assert second.slice_ms(SLICES) == first.slice_ms(SLICES)
    assert second.step.residual_ms == pytest.approx(first.step.residual_ms, rel=0.3)
    assert second.step.relative_error == pytest.approx(first.step.relative_error, rel=0.3)
    assert len(list((tmp_path / "new" / "folder").iterdir())) == 1, "something is left beside the file"


def test_what_is_found_again_gives_way_to_what_is_measured(tmp_path: Path) -> None:
    cost, cache = CostModel(), CostCache(tmp_path, {})
    cache.store(learned())
    cache.load_into(cost)
    slower_ms = 3 * cost.step_ms(WORK)
    for _ in range(60):
        cost.learn_step(WORK, slower_ms)
    assert cost.step_ms(WORK) == pytest.approx(slower_ms, rel=0.05)


def test_another_identity_has_another_file(tmp_path: Path) -> None:
    CostCache(tmp_path, {"model": "a", "num_threads": 1}).store(learned())
    assert not CostCache(tmp_path, {"model": "a", "num_threads": 2}).load_into(CostModel())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace("weights", "wheights"),
        lambda text: text.replace('"model": "a"', '"model": "b"'),
        lambda text: json.dumps(json.loads(text) | {"step": {"weights": [1.0, 2.0]}}),
        lambda text: json.dumps(json.loads(text) | {"step": {"weights": [1.0, 2.0, 3.0, 4.0, -5.0]}}),
        lambda text: json.dumps(json.loads(text) | {"step": {"weights": [1.0, 2.0, 3.0, 4.0, 1e999]}}),
        lambda text: json.dumps(json.loads(text) | {"step": {"weights": ["fast"] * 5}}),
    ],
)
def test_a_spoiled_file_is_left_aside_and_told(tmp_path: Path, caplog, spoil) -> None:
    cost, cache = CostModel(), CostCache(tmp_path, {"model": "a"})
    cache.store(learned())
    cache.path.write_text(spoil(cache.path.read_text()))
    with caplog.at_level(logging.WARNING):
        assert not cache.load_into(cost)
    assert str(cache.path) in caplog.text
    assert cost.step_ms(WORK) == CostModel().step_ms(WORK)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("")
    CostCache(tmp_path / "file" / "folder", {}).store(learned())
    assert "the next start measures again" in caplog.text


def test_where_the_files_are(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("auto") == tmp_path / "vlm-engine" / "costs"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder("auto").is_relative_to(tmp_path / "home")
    assert cache_folder("off") is None
    assert cache_folder("~/costs") == tmp_path / "home" / "costs"


def test_the_second_start_measures_less(
    model: VisionLanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # why: the machine may be busy
    monkeypatch.setattr("vlm_engine.warm_up.NEAR", 1e9)
    monkeypatch.setattr("vlm_engine.warm_up.CALIBRATION_S", 60.0)
    first, second = make_engine(model, tmp_path), make_engine(model, tmp_path)
    warm_up(first)
    num_first = first.cost_model.step.num_learned + first.cost_model.encoder.num_learned
    warm_up(second)
    num_second = second.cost_model.step.num_learned + second.cost_model.encoder.num_learned
    assert num_second < num_first / 2
    assert not second.has_work
    second.check_integrity()


def test_costs_of_another_machine_are_measured_anew(
    model: VisionLanguageModel, tmp_path: Path, caplog
) -> None:
    """A file that fits by name, but tells of a device a hundred times slower."""
    engine = make_engine(model, tmp_path)
    wrong = CostModel([500.0] * 5, [500.0] * 5)
    cost_cache(engine.config, model.spec).store(wrong)
    warm_up(engine)
    assert "measured anew" in caplog.text
    assert engine.cost_model.step_ms(StepWork(2, 2, 60)) < 400
    again = CostModel()
    assert cost_cache(engine.config, model.spec).load_into(again)
    assert again.step_ms(StepWork(2, 2, 60)) < 400


def test_what_decides_the_costs(model: VisionLanguageModel, tmp_path: Path, monkeypatch) -> None:
    config = EngineConfig(model.spec.name, cost_cache=str(tmp_path))

    def path(config: EngineConfig = config) -> Path | None:
        return cost_cache(config, model.spec).path

    assert path(replace(config, chat_itl_ms=20.0, max_num_seqs=3)) == path()
    assert path(replace(config, block_size=32)) != path()
    here = path()
    monkeypatch.setattr("torch.__version__", "0.0")
    assert path() != here


def test_calibration_ends_in_time(model: VisionLanguageModel, monkeypatch) -> None:
    """What is not measured by then ends, and leaves nothing behind."""
    assert CALIBRATION_S <= 5.0
    monkeypatch.setattr("vlm_engine.warm_up.CALIBRATION_S", 0.0)
    engine = make_engine(model, "off")
    warm_up(engine)
    assert not engine.has_work
    engine.check_integrity()


def test_what_was_learned_online_is_kept(model: VisionLanguageModel, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("vlm_engine.warm_up.WORTH_KEEPING", 5)
    engine = make_engine(model, tmp_path)
    warm_up(engine)
    path = cost_cache(engine.config, model.spec).path
    calibrated = path.read_text()
    keep_costs(engine)
    assert path.read_text() == calibrated
    engine.add(ask("one", "hello", max_tokens=8))
    drain(engine)
    keep_costs(engine)
    assert path.read_text() != calibrated
