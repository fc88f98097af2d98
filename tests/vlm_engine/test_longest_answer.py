"""How long an answer becomes that may have any length: as the checkpoint says, if it says so."""

import json
import shutil
from pathlib import Path

import pytest

from tests.vlm_engine.test_answers import answer, wish
from tests.vlm_engine.test_engine import make_engine
from vlm_engine import EngineConfig
from vlm_engine.models import VisionLanguageModel, load_model


@pytest.fixture(scope="module")
def model(qwen3_vl_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> VisionLanguageModel:
    folder = tmp_path_factory.mktemp("limited") / "model"
    shutil.copytree(qwen3_vl_checkpoint, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_new_tokens": 5}))
    return load_model(EngineConfig(str(folder), dtype="float32", device="cpu"))


@pytest.mark.parametrize(
    ("max_tokens", "min_tokens", "length"), [(None, 0, 5), (None, 7, 7), (3, 0, 3), (9, 0, 9)]
)
def test_a_request_goes_before_the_checkpoint(
    model: VisionLanguageModel, max_tokens: int | None, min_tokens: int, length: int
) -> None:
    request = wish("r", max_tokens=max_tokens, min_tokens=min_tokens, ignore_eos=True, temperature=0.0)
    event = answer(make_engine(model), request)

    assert event.finish_reason == "length"
    assert event.usage
    assert event.usage.completion_tokens == length


def test_a_checkpoint_that_says_nothing(qwen3_vl_checkpoint: Path) -> None:
    model = load_model(EngineConfig(str(qwen3_vl_checkpoint), dtype="float32", device="cpu"))

    assert model.spec.max_new_tokens is None
    assert model.spec.usual_tokens(3) is None
