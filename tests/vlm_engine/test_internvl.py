"""InternVL beyond what all families with tiles share: its towers' variants, decoders, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import tiny_internvl
from tests.vlm_engine.reference import Case, Family, run, sliced_features, stock_features
from vlm_engine import EngineConfig
from vlm_engine.errors import ModelLoadError, UnsupportedModel
from vlm_engine.models import load_model

VARIANTS: dict[str, dict[str, Any]] = {
    "norms": {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": False},
    "plain": {"use_absolute_position_embeddings": False, "use_mean_pooling": False},
    "llama": {"decoder": "llama"},
    "qwen3": {"decoder": "qwen3"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_the_stock_model(tmp_path: Path, variant: str) -> None:
    """The large towers have norms on queries and keys, older ones a last norm; decoders differ."""
    family = Family.load(tiny_internvl(tmp_path, **VARIANTS[variant]))
    image = family.picture(1)
    wanted, given = stock_features(family, image), sliced_features(family, image, 20)
    assert (wanted - given).abs().max() / wanted.abs().max() < 1e-5
    case = Case("x", (image, "and", family.picture(2, 3, 7), "What changed?"), 12)
    assert run(family.engine(max_num_batched_tokens=16), [case])["x"] == family.greedy(case)


def test_bfloat16_with_norms_on_queries_and_keys(tmp_path: Path) -> None:
    family = Family.load(tiny_internvl(tmp_path, **VARIANTS["norms"]))
    model = load_model(EngineConfig(str(tmp_path), dtype="bfloat16", device="cpu"))
    tile = model.prompts.prepare(Case("x", (family.picture(1),)).messages).images[0]
    state = model.encoder.start(tile)
    model.encoder.run(state, model.encoder.slices(tile))
    (given,) = model.encoder.features(state)
    wanted = stock_features(family, family.picture(1))[: len(given)]
    assert (wanted - given).abs().max() / wanted.abs().max() < 0.1


def test_a_row_behind_the_patches_is_no_slice_of_its_own(internvl_checkpoint: Path) -> None:
    """36 patches and the class row, in slices of about 12: no slice is a single row."""
    family = Family.load(internvl_checkpoint)
    tile = family.model.prompts.prepare(Case("x", (family.picture(1),)).messages).images[0]
    sizes = [part.end - part.start for part in family.tower(12).slices(tile) if part.stage == "rows"]
    assert sum(sizes) == 37 * 3
    assert min(sizes) > 1


@pytest.mark.parametrize("token", ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"])
def test_text_that_looks_like_an_image_makes_none(internvl_checkpoint: Path, token: str) -> None:
    prompts = load_model(EngineConfig(str(internvl_checkpoint), device="cpu")).prompts
    prompt = prompts.prepare(Case("x", (token,)).messages)
    assert not prompt.images
    assert token in prompts.tokenizer.decode(prompt.token_ids)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("processor_config.json", {"image_seq_length": 25}, "25 image tokens a tile, the model makes 9"),
        ("preprocessor_config.json", {"size": {"height": 28, "width": 28}}, r"tiles of \(28, 28\) pixels"),
        ("config.json", {"vision_feature_layer": -2}, r"image tokens made of \(-2, 'default'\)"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    path = tiny_internvl(tmp_path) / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelLoadError, match=message):
        load_model(EngineConfig(str(tmp_path), device="cpu"))


def test_another_decoder_is_refused(tmp_path: Path) -> None:
    tiny_internvl(tmp_path, decoder="mistral")
    with pytest.raises(UnsupportedModel, match="'mistral' is not supported; supported are llama, qwen2"):
        load_model(EngineConfig(str(tmp_path), device="cpu"))
