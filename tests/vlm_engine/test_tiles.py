"""Families that cut images into tiles: slices, positions, reserved text, odd pictures, hub files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionConfig, Idefics3VisionEmbeddings

from tests.checkpoints import tiny_idefics3, tiny_smolvlm
from tests.vlm_engine.reference import Case, Family, drain, images_of, run, sliced_features, stock_features
from vlm_engine import EngineConfig, GenerationRequest, SamplingParams
from vlm_engine.errors import ModelLoadError, RequestError
from vlm_engine.models import load_model
from vlm_engine.models.smolvlm import learned_positions
from vlm_engine.models.tile_tower import TileTower

MAKERS: dict[str, Callable[..., Path]] = {"smolvlm": tiny_smolvlm, "idefics3": tiny_idefics3}


@pytest.fixture(scope="module", params=[*MAKERS, "internvl", "gemma3"])
def family(request: pytest.FixtureRequest) -> Family:
    return Family.load(request.getfixturevalue(f"{request.param}_checkpoint"))


@pytest.fixture(scope="module", params=MAKERS)
def unsplit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """The picture of the whole alone, as when the checkpoint's splitting is switched off."""
    folder = tmp_path_factory.mktemp("unsplit")
    return Family.load(MAKERS[request.param](folder, split=False))


@pytest.mark.parametrize("rows", [1, 16, 30, 10_000])
@pytest.mark.parametrize("size", [(7, 5), (3, 8)])
def test_slices_equal_the_stock_tower(family: Family, size: tuple[int, int], rows: int) -> None:
    image = family.picture(1, *size)
    wanted, given = stock_features(family, image), sliced_features(family, image, rows)
    assert (wanted - given).abs().max() / wanted.abs().max() < 1e-5


def test_a_lost_slice_changes_the_answer(family: Family) -> None:
    image = family.picture(1)
    tile = family.model.prompts.prepare(Case("x", (image,)).messages).images[0]
    lost = next(part for part in family.tower(16).slices(tile) if (part.stage, part.index) == ("rows", 1))
    wanted, given = stock_features(family, image), sliced_features(family, image, 16, lost)
    assert (wanted - given).abs().max() > 1e-3


@pytest.mark.parametrize("side", [1, 8, 14, 26, 27, 32])
def test_positions_are_the_stock_embeddings(side: int) -> None:
    """For full tiles of any size against the size that the tower learned."""
    config = Idefics3VisionConfig(hidden_size=1, num_attention_heads=1, image_size=side, patch_size=1)
    stock = Idefics3VisionEmbeddings(config)
    with torch.no_grad():
        stock.patch_embedding.weight.zero_()
        stock.patch_embedding.bias.zero_()
        stock.position_embedding.weight[:] = torch.arange(side * side)[:, None]
        for count in range(1, 41):
            mask = torch.ones(1, count, count, dtype=torch.bool)
            wanted = stock(torch.zeros(1, 3, count, count), mask).view(count, count)
            one = learned_positions(count, side, torch.device("cpu"))
            assert torch.equal(wanted, (one[:, None] * side + one).float()), count


def test_without_splitting_an_image_is_one_tile(unsplit: Family) -> None:
    a, b = unsplit.picture(1), unsplit.picture(2, 3, 7)
    cases = [
        Case("end", ("Look: ", a)),
        Case("two", (a, "and", b, "What changed?")),
        Case("side by side", (a, b)),
        Case("none", ("What is this?",)),
    ]
    expected = {case.name: unsplit.greedy(case) for case in cases}
    engine = unsplit.engine(max_num_batched_tokens=7)
    assert len(images_of(engine, *cases)) == 2
    assert run(engine, cases) == expected


def test_images_side_by_side_keep_their_tiles_apart(family: Family) -> None:
    """E11: nothing but markers stands between two images; each tile's digest is its image's."""
    a, b = family.picture(1), family.picture(2, 3, 7)
    engine = family.engine()
    alone = [images_of(engine, Case("x", (image,))) for image in (a, b)]
    together = engine.prepare(Case("x", (a, b, a)).request)[0].placeholders
    digests = [[tile.digest for tile in tiles] for tiles in alone]
    assert [tile.digest for tile in together] == digests[0] + digests[1] + digests[0]
    assert len({*digests[0], *digests[1]}) == len(digests[0]) + len(digests[1])


@pytest.mark.parametrize("size", [(1, 1), (499, 1), (1, 499), (2000, 3), (37, 39)])
def test_pictures_of_any_size_are_read(family: Family, size: tuple[int, int]) -> None:
    """Both processors scale every picture to whole tiles."""
    case = Case("x", (family.picture(3).resize(size), "What is this?"), 6)
    assert run(family.engine(max_num_batched_tokens=16), [case])["x"] == family.greedy(case)


def test_a_smaller_scale_spares_tokens(family: Family) -> None:
    """A picture is enlarged to whole tiles however small it comes; `scale` says to how many."""
    case = Case("x", (family.picture(3, 12, 12), "What is this?"), 6)
    messages = case.messages
    messages[0]["content"][0]["scale"] = 0.5
    full, small = family.model.prompts.prepare(case.messages), family.model.prompts.prepare(messages)
    if family.name == "gemma3":
        # why: a picture has one size there, and so many tokens.
        assert small.token_ids == full.token_ids
        return
    assert sum(run.length for run in small.placeholders) < sum(run.length for run in full.placeholders)
    assert not {run.digest for run in small.placeholders} & {run.digest for run in full.placeholders}
    engine = family.engine()
    engine.add(GenerationRequest("x", messages, SamplingParams(max_tokens=4, ignore_eos=True)))
    assert [event.error for event in drain(engine) if event.is_last] == [None]
    messages[0]["content"][0]["scale"] = 0.0
    with pytest.raises(RequestError, match="scale"):
        family.model.prompts.prepare(messages)


CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is happening?"},
    {"role": "assistant", "content": [{"type": "text", "text": "Two people are walking."}]},
]


def test_a_conversation_is_the_processors_own(family: Family) -> None:
    """Turns, system text and images as `apply_chat_template` reads them; plain strings are kept."""
    image = family.picture(4)
    last = {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Now?"}]}
    parts = [
        m if isinstance(m["content"], list) else m | {"content": [{"type": "text", "text": m["content"]}]}
        for m in CHAT
    ]
    wanted = family.processor.apply_chat_template(
        [*parts, last], tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    prompt = family.model.prompts.prepare([*CHAT, last])
    assert prompt.token_ids == wanted["input_ids"][0].tolist()
    text = family.processor.tokenizer.decode(prompt.token_ids)
    assert all(words in text for words in ("helpful assistant", "What is happening?", "walking.", "Now?"))


@pytest.mark.parametrize("token", ["<image>", "<fake_token_around_image>", "<row_1_col_2>", "<global-img>"])
def test_text_that_looks_like_an_image_makes_none(family: Family, token: str) -> None:
    prompt = family.engine().prepare(Case("x", (token,)).request)[0]
    assert not prompt.images
    assert token in family.model.prompts.tokenizer.decode(prompt.token_ids)


def rewrite(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


@pytest.fixture(params=MAKERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return MAKERS[request.param](tmp_path)


def test_files_as_they_lie_on_the_hub(folder: Path) -> None:
    """Older names of keys, two element types, a template in its own file, no end token in the config."""
    config = json.loads((folder / "config.json").read_text())
    text = {k: v for k, v in config["text_config"].items() if k not in {"dtype", "rope_parameters"}}
    for gone in ("eos_token_id", "bos_token_id", "pad_token_id"):
        text.pop(gone, None)
    text |= {"torch_dtype": "bfloat16", "rope_theta": 100000, "is_llama_config": True}
    vision = {k: v for k, v in config["vision_config"].items() if k != "dtype"}
    del config["dtype"]
    config |= {"text_config": text, "vision_config": vision, "torch_dtype": "float32"}
    config |= {"pad_token_id": 128002, "use_cache": False, "vocab_size": text["vocab_size"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    template = (folder / "chat_template.jinja").rename(folder / "template.txt")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    model = load_model(EngineConfig(str(folder), device="cpu"))
    assert model.spec.dtype == torch.float32
    assert model.prompts.tokenizer.convert_tokens_to_ids("<end_of_utterance>") in model.spec.stop_token_ids
    family = Family.load(folder)
    assert {weight.dtype for weight in family.stock.parameters()} == {torch.float32}
    case = Case("x", (family.picture(1), "What is this?"), 8)
    assert run(family.engine(), [case])["x"] == family.greedy(case)


def test_bfloat16_runs(folder: Path) -> None:
    family = Family.load(folder)
    model = load_model(EngineConfig(str(folder), dtype="bfloat16", device="cpu"))
    tower = model.encoder
    assert isinstance(tower, TileTower)
    prompt = model.prompts.prepare(Case("x", (family.picture(1),)).messages)
    state = tower.start(prompt.images[0])
    tower.run(state, tower.slices(prompt.images[0]))
    wanted = stock_features(family, family.picture(1))[: prompt.placeholders[0].length]
    (given,) = tower.features(state)
    assert given.dtype == torch.bfloat16
    assert (wanted - given).abs().max() / wanted.abs().max() < 0.1


def test_a_processor_of_another_model_is_refused(folder: Path) -> None:
    rewrite(folder / "processor_config.json", image_seq_len=25)
    with pytest.raises(ModelLoadError, match="writes 25 image tokens a tile, the model makes"):
        load_model(EngineConfig(str(folder)))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", None)
    with pytest.raises(ModelLoadError, match="pip install num2words"):
        load_model(EngineConfig(str(tiny_smolvlm(tmp_path))))
