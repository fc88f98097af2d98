"""`appliance models check` on tiny checkpoints."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from typer.testing import CliRunner

from appliance.cli import app
from tests.checkpoints import tiny_qwen3
from vlm_engine import Engine, EngineConfig, ModelLoadError
from vlm_engine.models import checking, load_model
from vlm_engine.models.checking import check_checkpoint


def test_a_file_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "yolo.pt"
    path.touch()
    with pytest.raises(ModelLoadError, match=r"yolo\.pt is a file, and .* is a folder with config\.json"):
        check_checkpoint(EngineConfig(str(path), device="cpu", kv_cache_tokens=64))


def test_it_tells_what_the_loaded_model_is(qwen3_vl_checkpoint: Path) -> None:
    config = EngineConfig(str(qwen3_vl_checkpoint), device="cpu", kv_cache_tokens=64)
    report = check_checkpoint(config)
    stock = AutoModelForImageTextToText.from_pretrained(qwen3_vl_checkpoint)
    assert report.num_parameters == stock.num_parameters()
    assert report.needs.weights == 4 * report.num_parameters
    assert (report.family, report.dtype) == ("qwen3_vl", "float32")
    assert report.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4
    prompt = load_model(config).prompts.prepare(
        [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (1280, 720))}]}]
    )
    assert report.image_tokens["720p"] == prompt.placeholders[0].length
    assert (report.image_tokens["1080p"] or 0) >= prompt.placeholders[0].length
    assert report.fits


def test_the_command(qwen3_vl_checkpoint: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["models", "check", str(qwen3_vl_checkpoint), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "qwen3_vl" in result.output
    assert "720p" in result.output
    text = CliRunner().invoke(
        app, ["models", "check", str(tiny_qwen3(tmp_path / "t")), "--dtype", "bfloat16"]
    )
    assert "reads no images" in text.output
    assert "bfloat16" in text.output
    missing = CliRunner().invoke(app, ["models", "check", str(tmp_path / "none")])
    assert missing.exit_code == 2


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        hub = f"http://127.0.0.1:{closed.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        code = "from appliance.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, "models", "check", "Nobody/Has-This-1B"],
            env={**environment, "TRANSFORMERS_OFFLINE": "0"},
            capture_output=True,
            text=True,
            check=False,
        )

    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("appliance: Nobody/Has-This-1B: is not on this machine, and ")
    assert f"{hub} cannot be reached (" in line


def test_a_model_that_does_not_fit(qwen3_vl_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = check_checkpoint(EngineConfig(str(qwen3_vl_checkpoint), device="cpu")).needs
    monkeypatch.setattr(checking, "free_memory", lambda device: needs.total - 1)
    command = ["models", "check", str(qwen3_vl_checkpoint), "--device", "cpu"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "no; it would fit with" in result.output
    fits = CliRunner().invoke(app, [*command, "--dtype", "bfloat16"])
    assert fits.exit_code == 0, fits.output


def test_a_checkpoint_without_weights(qwen3_vl_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(qwen3_vl_checkpoint, tmp_path / "c", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ModelLoadError, match=r"no \.safetensors weights"):
        check_checkpoint(EngineConfig(str(tmp_path / "c"), device="cpu"))


@pytest.mark.parametrize("change", ["more", "fewer"])
def test_other_tensors_than_the_family_has_are_refused_by_name(tmp_path: Path, change: str) -> None:
    folder = tiny_qwen3(tmp_path / "c")
    tensors = load_file(folder / "model.safetensors")
    if change == "more":
        tensors["model.layers.0.extra.weight"] = torch.zeros(2)
    else:
        tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    name = (
        "has 1 unknown tensors: .*extra.weight"
        if change == "more"
        else "lacks 1 tensors: .*model.norm.weight"
    )
    with pytest.raises(ModelLoadError, match=name):
        Engine(EngineConfig(str(folder), device="cpu", kv_cache_tokens=64))
