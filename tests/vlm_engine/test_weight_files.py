"""Checkpoints as people have them: in shards, in other element types, with tied heads, and broken."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import tiny_qwen3
from vlm_engine import Engine, EngineConfig, GenerationRequest, ModelLoadError, SamplingParams
from vlm_engine.models.checking import check_checkpoint

INDEX = "model.safetensors.index.json"
LAYERS = ("layers.0.", "layers.1.")


@pytest.fixture
def sharded(qwen3_checkpoint: Path, tmp_path: Path) -> Path:
    """A Qwen3 in three shards."""
    folder = copied(qwen3_checkpoint, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = [{name: each for name, each in tensors.items() if part in name} for part in LAYERS]
    parts.append({name: each for name, each in tensors.items() if not any(part in name for part in LAYERS)})
    places = {}
    for number, part in enumerate(parts, 1):
        save_file(part, folder / shard(number), {"format": "pt"})
        places |= dict.fromkeys(part, shard(number))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    return folder


def shard(number: int) -> str:
    return f"model-{number:05}-of-00003.safetensors"


def copied(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))


def answer(folder: Path, **settings: str) -> list[int]:
    """Eight greedy tokens."""
    engine = Engine(EngineConfig(str(folder), device="cpu", kv_cache_tokens=128, **settings))  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    engine.add(GenerationRequest("r", [{"role": "user", "content": "What is this?"}], sampling))
    token_ids: list[int] = []
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            token_ids += event.token_ids
    return token_ids


def change(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Write a checkpoint's tensors again."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def refusal(folder: Path) -> str:
    """Why a folder is not loaded; a look at it says the same."""
    with pytest.raises(ModelLoadError) as loading:
        Engine(EngineConfig(str(folder), device="cpu", kv_cache_tokens=64))
    with pytest.raises(ModelLoadError) as looking:
        check_checkpoint(EngineConfig(str(folder), device="cpu"))
    assert str(loading.value) == str(looking.value)
    return str(loading.value)


def test_shards_are_one_checkpoint(sharded: Path, qwen3_checkpoint: Path) -> None:
    assert answer(sharded) == answer(qwen3_checkpoint)
    config = EngineConfig(str(sharded), device="cpu")
    whole = EngineConfig(str(qwen3_checkpoint), device="cpu")
    assert check_checkpoint(config).num_parameters == check_checkpoint(whole).num_parameters


def test_a_shard_that_is_not_there(sharded: Path) -> None:
    (sharded / shard(2)).unlink()
    reason = refusal(sharded)
    assert f"names {shard(2)} for model.layers.1." in reason
    assert "no such file; download it" in reason


def test_a_shard_that_is_cut_off(sharded: Path) -> None:
    path = sharded / shard(1)
    last = max(load_file(path), key=lambda name: _end(path, name))
    path.write_bytes(path.read_bytes()[:-5])
    reason = refusal(sharded)
    assert f"{path}: is cut off" in reason
    assert f"so lacks {last}; download it again" in reason


def _end(path: Path, name: str) -> int:
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return int(header[name]["data_offsets"][1])


@pytest.mark.parametrize(
    "content", [b"", b"\x10", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"]
)
def test_a_shard_without_a_header(sharded: Path, content: bytes) -> None:
    (sharded / shard(3)).write_bytes(content)
    assert f"{sharded / shard(3)}: has no whole safetensors header" in refusal(sharded)


def test_an_index_that_names_a_tensor_which_is_nowhere(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text(encoding="utf-8"))
    index["weight_map"]["model.layers.7.mlp.up_proj.weight"] = shard(3)
    (sharded / INDEX).write_text(json.dumps(index), encoding="utf-8")
    reason = refusal(sharded)
    assert f"{sharded / shard(3)}: has no tensor model.layers.7.mlp.up_proj.weight" in reason
    assert INDEX in reason


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content, encoding="utf-8")
    assert f"{sharded / INDEX}" in refusal(sharded)


def test_other_element_types(tmp_path: Path) -> None:
    """The numbers of a half are exact in float32, so both ways to them give the same."""
    folder = tiny_qwen3(tmp_path / "half", dtype="float16")
    wide = copied(folder, tmp_path)
    change(wide, lambda tensors: tensors.update({name: each.float() for name, each in tensors.items()}))
    assert answer(folder, dtype="float32") == answer(wide, dtype="float32")
    report = check_checkpoint(EngineConfig(str(folder), device="cpu"))
    assert report.dtype == "float16"
    assert len(answer(folder)) == 8


def test_a_tied_head_may_be_in_the_file_too(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    folder = copied(qwen3_checkpoint, tmp_path)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    change(
        folder,
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    assert answer(folder) == answer(qwen3_checkpoint)
    config = EngineConfig(str(folder), device="cpu")
    plain = EngineConfig(str(qwen3_checkpoint), device="cpu")
    assert check_checkpoint(config).num_parameters == check_checkpoint(plain).num_parameters


def test_a_head_of_its_own_must_be_there(llama_checkpoint: Path, tmp_path: Path) -> None:
    folder = copied(llama_checkpoint, tmp_path)
    change(folder, lambda tensors: tensors.__delitem__("lm_head.weight"))
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensors: lm_head\.weight"):
        Engine(EngineConfig(str(folder), device="cpu", kv_cache_tokens=64))


def test_a_checkpoint_that_is_quantized_already(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    folder = copied(qwen3_checkpoint, tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert "is quantized already" in refusal(folder)


def test_a_tensor_of_another_shape(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    folder = copied(qwen3_checkpoint, tmp_path)
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(ModelLoadError, match=r"other shapes than config.json tells: model\.norm\.weight"):
        Engine(EngineConfig(str(folder), device="cpu", kv_cache_tokens=64))
