"""Weights in eight bits: near to the wide ones, the same in every chunk, refused clearly without torchao."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.vlm_engine.test_engine import picture
from vlm_engine import Engine, EngineConfig, EngineProcess, GenerationRequest, ModelLoadError, SamplingParams
from vlm_engine.models import FAMILIES, VisionLanguageModel, load_model
from vlm_engine.models.loading import _load_weights, describe, read_config
from vlm_engine.models.weight_files import read_tensors
from vlm_engine.native.ops import is_coded

TOKENS_PER_STEP = (7, 256)


@pytest.fixture(scope="module", params=["qwen3_vl_checkpoint", "gemma3_checkpoint"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def load(folder: Path, quantization: str, dtype: str = "float32") -> VisionLanguageModel:
    config = EngineConfig(str(folder), device="cpu", dtype=dtype, quantization=quantization)  # type: ignore[arg-type]
    return load_model(config)


def run(model: VisionLanguageModel, num_tokens: int) -> tuple[list[int], Tensor]:
    """Greedy tokens about a picture, and the logits of the first."""
    config = EngineConfig(model.spec.name, kv_cache_tokens=512, max_num_batched_tokens=num_tokens)
    engine, logits = Engine(config, model=model), []
    stock = model.logits
    model.logits = lambda hidden: logits.append(stock(hidden)) or logits[-1]  # type: ignore[func-returns-value, method-assign]
    content = [{"type": "image", "image": picture(1)}, {"type": "text", "text": "What is this?"}]
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    engine.add(GenerationRequest("r", [{"role": "user", "content": content}], sampling))
    tokens: list[int] = []
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            tokens += event.token_ids
    model.logits = stock  # type: ignore[method-assign]
    return tokens, logits[0]


def test_near_to_the_wide_weights_in_every_chunk(folder: Path) -> None:
    model = load(folder, "int8")
    answers: Sequence[tuple[list[int], Tensor]] = [run(model, count) for count in TOKENS_PER_STEP]
    assert answers[0][0] == answers[1][0]
    exact = run(load(folder, "none"), 256)[1]
    error = (answers[1][1] - exact).norm() / exact.norm()
    assert 0 < error < 0.05


def test_decoder_and_head_are_quantized_and_nothing_else(qwen3_vl_checkpoint: Path) -> None:
    """Its head is tied: the embedding stays wide."""
    config = EngineConfig(str(qwen3_vl_checkpoint), device="cpu", quantization="int8")
    settings = read_config(config.model)
    demand = describe(config, settings, read_tensors(config.model))
    model = _load_weights(demand, FAMILIES[settings.model_type])
    coded = {name for name, each in model.named_modules() if is_coded(getattr(each, "weight", None))}
    layers = {f"model.language_model.layers.{layer}" for layer in range(3)}
    assert {name.rsplit(".", 2)[0] for name in coded - {"lm_head"}} == layers
    assert len(coded) == 3 * 7 + 1
    held = sum(each.numel() * each.element_size() for each in model.parameters() if not is_coded(each))
    codes = [each for each in model.parameters() if is_coded(each)]
    held += sum(each.numel() + 5 * len(each) for each in codes)
    assert held == demand.needs().weights


def test_in_bfloat16_eight_bits_add_little_to_its_own_roundings(qwen3_vl_checkpoint: Path) -> None:
    model = load(qwen3_vl_checkpoint, "int8", "bfloat16")
    int8 = run(model, 256)[1]
    exact, half = (run(load(qwen3_vl_checkpoint, "none", dtype), 256)[1] for dtype in ("float32", "bfloat16"))
    assert (int8 - exact).norm() < 1.5 * (half - exact).norm() + 0.02 * exact.norm()
    # invariant: the CPU kernels' numbers depend on no chunk
    assert not model.spec.use_kernels or torch.equal(run(model, 7)[1], int8)


def test_without_torchao_the_error_says_what_to_install(
    qwen3_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ModelLoadError, match=r"quantization: int8 needs torchao: pip install .*\[int8\]"):
        load(qwen3_checkpoint, "int8")


async def test_a_missing_torchao_is_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the front as well, which does not wait for the engine's process then."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else real(name))
    with pytest.raises(ModelLoadError, match=r"pip install -e '\.\[int8\]'"):
        load(Path("/nowhere"), "int8")
    engine = EngineProcess(EngineConfig("/nowhere", quantization="int8"))
    with pytest.raises(ModelLoadError, match=r"pip install -e '\.\[int8\]'"):
        await engine.start()


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="quantization: must be one of none, int8, not int3"):
        EngineConfig("m", quantization="int3")  # type: ignore[arg-type]
