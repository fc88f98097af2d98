"""The test checkpoints themselves: loadable like one from the hub, sensitive to what an engine could lose."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlm_engine.errors import ModelLoadError
from vlm_engine.models.loading import read_config

FAMILIES = (
    "qwen3_vl_checkpoint",
    "qwen2_5_vl_checkpoint",
    "qwen2_vl_checkpoint",
    "smolvlm_checkpoint",
    "idefics3_checkpoint",
    "internvl_checkpoint",
    "gemma3_checkpoint",
)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def _picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((192, 160))


def _greedy(
    folder: Path, content: list[dict[str, str]], images: list[Image.Image]
) -> tuple[list[int], float]:
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[text], images=images or None, return_tensors="pt")
    output = model.generate(
        **inputs, max_new_tokens=40, eos_token_id=None, output_logits=True, return_dict_in_generate=True
    )
    best = torch.cat(output.logits).topk(2).values
    return output.sequences[0, inputs.input_ids.shape[1] :].tolist(), float((best[:, 0] - best[:, 1]).min())


def test_greedy_output_depends_on_the_picture_and_on_the_order(folder: Path) -> None:
    image, text = {"type": "image"}, {"type": "text", "text": "What is this?"}
    cases = [
        ([text], []),
        ([image, text], [_picture(1)]),
        ([image, text], [_picture(2)]),
        ([text, image], [_picture(1)]),
    ]
    answers = [_greedy(folder, content, images) for content, images in cases]
    assert len({tuple(tokens) for tokens, _ in answers}) == len(cases)
    assert all(len(set(tokens)) > 15 for tokens, _ in answers)
    assert all(lead > 1e-4 for _, lead in answers)


def test_code_that_a_checkpoint_brings_along_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even with somebody at the terminal who would say yes."""
    code, ran = tmp_path / "configuration_own.py", tmp_path / "ran"
    code.write_text(f"open({str(ran)!r}, 'w')\nclass OwnConfig: pass\n")
    config = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ModelLoadError, match="no readable checkpoint"):
        read_config(str(tmp_path))
    assert not ran.exists()


def test_unknown_scripts_are_bytes(folder: Path) -> None:
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    for text in ("한글", "😀", "👨‍👩‍👧"):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(token_ids) == len(text.encode())
        assert tokenizer.decode(token_ids) == text
    assert tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=True) == ""
