"""Gemma 3 beyond what all families with images share: images in one piece, windows, variants, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.checkpoints import tiny_gemma3, tiny_gemma3_text
from tests.vlm_engine.builders import image, make_scheduler, make_sequence
from tests.vlm_engine.builders import run as run_plans
from tests.vlm_engine.reference import Case, Family, prompt_length, run, sliced_features, stock_features
from vlm_engine import Engine, EngineConfig
from vlm_engine.budget import LatencyTargets, Moment, TimeBudget
from vlm_engine.cost_model import CostModel
from vlm_engine.errors import ModelLoadError, RequestError, UnsupportedModel
from vlm_engine.models import load_model, load_prompts
from vlm_engine.models.checking import check_checkpoint
from vlm_engine.sequence import Sequence
from vlm_engine.wire import Submit, decode_submit, decode_to_server, encode_submit

WIDE = {"sliding_window": 64, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
ONE_MS = CostModel((0.0, 64.0, 0.0, 0.0, 0.0), (4.0, 0.0, 0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def family(gemma3_checkpoint: Path) -> Family:
    return Family.load(gemma3_checkpoint)


# -- images that are computed in one piece ----------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 7, 20, 32, 64])
def test_no_chunk_ends_inside_an_image(budget: int) -> None:
    """E13: an image may be longer than a step; it then goes over, as the first prompt of a step."""
    pictures = (image(5, 20, "a", both_ways=True), image(30, 9, "b", both_ways=True))
    scheduler = make_scheduler(budget=budget)
    for _ in range(3):
        scheduler.add(make_sequence(45, images=pictures))
    plans = run_plans(scheduler)
    ends = [chunk.end for plan in plans for chunk in plan.chunks]
    assert not any(picture.start < end < picture.end for end in ends for picture in pictures)
    assert max(plan.num_tokens for plan in plans) <= max(budget, 20 + min(budget, 3))


def waiting_at_an_image(priority: Any = "background", arrival_s: float = 0.0) -> Sequence:
    sequence = make_sequence(80, images=(image(0, 60, "a", both_ways=True),), priority=priority)
    sequence.arrival_s = arrival_s
    return sequence


def test_an_image_waits_for_a_step_with_room_for_all_of_it() -> None:
    """A millisecond a token: a step of 200 ms has room, one of 40 ms beside a chat has none."""
    budget = TimeBudget(ONE_MS, LatencyTargets(chat_itl_ms=40.0, chat_ttft_ms=400.0), 512)
    frame = waiting_at_an_image()
    budget.begin(Moment([], [frame], 0.0))
    assert budget.fit_tokens(frame, 80) >= 60
    chat = make_sequence(4)
    chat.num_computed_tokens, chat.first_token_s, chat.last_token_s = 4, 0.0, 0.0
    chat.append(5)
    budget.begin(Moment([chat], [frame], 0.0))
    budget.spend_tokens(chat, 1)
    budget.floor.pay(1.0, 0.0)
    assert budget.fit_tokens(frame, 80) == 0
    budget.begin(Moment([chat], [frame], 60.0))
    budget.spend_tokens(chat, 1)
    assert budget.fit_tokens(frame, 80) >= 60, "background has its share by then"


def test_a_prefix_that_ends_inside_an_image_is_gone_on_from_there(family: Family) -> None:
    """E4: the cached part was computed with the whole image in sight, so only the rest is left, at once."""
    engine = family.engine(max_num_batched_tokens=7)
    first = Case("x", (family.picture(1), "What is this?"), 4)
    second = Case("y", (family.picture(1), "Is anybody there?"), 12)
    run(engine, [first])
    engine.add(second.request)
    picture = engine.scheduler.waiting[0].placeholders[0]
    chunks = []
    while engine.has_work:
        engine.step()
        chunks += [sequence.num_computed_tokens for sequence in engine.scheduler.running]
    assert picture.start < picture.end // 16 * 16 < picture.end
    assert chunks[0] == picture.end
    assert engine.stats().num_encoded_images == 1
    assert run(engine, [Case("z", second.parts, 12)])["z"] == family.greedy(second)


def test_another_image_of_the_same_place_is_not_gone_on_from(family: Family) -> None:
    """E3: equal tokens, another picture; the block in which it begins is not shared either."""
    engine = family.engine(max_num_batched_tokens=64)
    cases = [Case(f"{seed}", (family.picture(seed), "What is this?"), 8) for seed in (1, 2, 3)]
    for case in cases:
        assert run(engine, [case])[case.name] == family.greedy(case)


def test_the_wire_keeps_images_in_one_piece(family: Family) -> None:
    case = Case("x", (family.picture(1),))
    prompt = family.model.prompts.prepare(case.messages)
    header, *frames = (bytes(frame) for frame in encode_submit(case.request, prompt, 0.0))
    message = decode_to_server(header)
    assert isinstance(message, Submit)
    assert decode_submit(message, frames)[1].placeholders == prompt.placeholders


# -- variants of the architecture -------------------------------------------------------------------


def test_a_window_wider_than_an_image(tmp_path: Path) -> None:
    """As in the real ones; prompts are longer than the window, which ends inside images and texts."""
    family = Family.load(tiny_gemma3(tmp_path, **WIDE))
    text = "Two people are walking on the left, and a red car is parked. "
    case = Case("x", (family.picture(1), text, family.picture(2, 3, 7), text), 16)
    assert prompt_length(family.engine(), case) > 128
    for chunk in (16, 4096):
        assert run(family.engine(max_num_batched_tokens=chunk), [case])["x"] == family.greedy(case)


def test_files_as_they_lie_on_the_hub(tmp_path: Path) -> None:
    """Names of tensors and keys as of the first release; scaled positions in the layers that see all."""
    folder = tiny_gemma3(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    named = {
        name.replace("vision_tower.", "vision_tower.vision_model."): part for name, part in tensors.items()
    }
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for gone in ("layer_types", "rope_parameters", "_sliding_window_pattern", "use_bidirectional_attention"):
        config["text_config"].pop(gone)
    config["text_config"] |= {
        "sliding_window_pattern": 2,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    config |= {"eos_token_id": [1, 106], "torch_dtype": config.pop("dtype")}
    (folder / "config.json").write_text(json.dumps(config))
    family = Family.load(folder)
    assert family.stock.config.text_config.layer_types[:2] == ["sliding_attention", "full_attention"]
    case = Case("x", (family.picture(1), "What is this?"), 12)
    assert run(family.engine(max_num_batched_tokens=16), [case])["x"] == family.greedy(case)


def test_logits_with_a_cap(tmp_path: Path) -> None:
    """Of a text model; with images the stock model has none."""
    from transformers import AutoModelForCausalLM

    folder = tiny_gemma3_text(tmp_path, final_logit_softcapping=3.0)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = load_model(EngineConfig(str(folder), dtype="float32", device="cpu"))
    hidden = 40 * torch.randn(3, 64)
    wanted = 3.0 * torch.tanh(stock.lm_head(hidden) / 3.0)
    given = model.logits(hidden)
    assert given.max() > 2.9
    torch.testing.assert_close(given, wanted)


def test_bfloat16_near_float32(family: Family) -> None:
    """The tower on the CPU kernels where there are any, the decoder on stock layers."""
    half = load_model(EngineConfig(family.model.spec.name, dtype="bfloat16", device="cpu"))
    assert type(half._stack).__name__ == "StockStack"  # type: ignore[attr-defined]
    picture = family.picture(1)
    prompt = half.prompts.prepare(Case("x", (picture,)).messages)
    state = half.encoder.start(prompt.images[0])
    half.encoder.run(state, half.encoder.slices(prompt.images[0]))
    (given,), wanted = half.encoder.features(state), stock_features(family, picture)
    assert (wanted - given).abs().max() / wanted.abs().max() < 0.1
    engine = Engine(EngineConfig(half.spec.name, kv_cache_tokens=1024, scheduler="static"), model=half)
    case = Case("x", (picture, "What is this?"), 12)
    same = [a == b for a, b in zip(run(engine, [case])["x"], family.greedy(case), strict=True)]
    assert same[0]


def test_pan_and_scan_stays_off(family: Family, tmp_path: Path) -> None:
    folder = tiny_gemma3(tmp_path)
    rewrite(folder / "preprocessor_config.json", do_pan_and_scan=True, pan_and_scan_min_crop_size=1)
    long = Case("x", (Image.new("RGB", (400, 100)), "What is this?"))
    prompt = load_prompts(EngineConfig(str(folder))).prepare(long.messages)
    assert len(prompt.images) == 1
    assert prompt.token_ids == family.model.prompts.prepare(long.messages).token_ids


def test_a_lost_slice_changes_the_tower(family: Family) -> None:
    picture = family.picture(1)
    tile = family.model.prompts.prepare(Case("x", (picture,)).messages).images[0]
    lost = next(part for part in family.tower(16).slices(tile) if (part.stage, part.index) == ("rows", 1))
    assert (stock_features(family, picture) - sliced_features(family, picture, 16, lost)).abs().max() > 1e-3


def test_it_is_checked_without_loading_it(family: Family) -> None:
    """`appliance models check`: a picture of any size is as many tokens."""
    report = check_checkpoint(EngineConfig(family.model.spec.name, device="cpu"))
    assert (report.family, report.dtype) == ("gemma3", "float32")
    assert report.image_tokens == {"720p": 36, "1080p": 36}
    assert report.num_parameters == family.stock.num_parameters()
    assert report.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4


# -- prompts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token", ["<start_of_image>", "<image_soft_token>", "<end_of_image>", "<end_of_turn>"]
)
def test_text_that_looks_like_a_token_makes_none(family: Family, token: str) -> None:
    prompts = family.model.prompts
    plain, odd = (prompts.prepare(Case("x", (text,)).messages) for text in ("a", f"a {token}"))
    special = set(prompts.tokenizer.all_special_ids)
    assert not odd.images
    assert [i for i in odd.token_ids if i in special] == [i for i in plain.token_ids if i in special]
    assert token in prompts.tokenizer.decode(odd.token_ids)


def test_turns_out_of_order_are_a_request_error(family: Family) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(RequestError, match="turns must alternate"):
        family.model.prompts.prepare(messages)


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("processor_config.json", {"image_seq_length": 25}, "writes 25 tokens an image, the model makes 36"),
        ("preprocessor_config.json", {"size": {"height": 28, "width": 28}}, "pictures of 28x28 pixels"),
        ("config.json", {"mm_tokens_per_image": 25}, "mm_tokens_per_image is 25"),
        ("config.json", {"image_token_index": 4000}, "image_token_index 4000 is outside the vocabulary"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    rewrite(tiny_gemma3(tmp_path) / file, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load_prompts(EngineConfig(str(tmp_path)))


@pytest.mark.parametrize("maker", [tiny_gemma3, tiny_gemma3_text])
def test_decoders_of_another_kind_are_refused(tmp_path: Path, maker: Any) -> None:
    maker(tmp_path, attn_logit_softcapping=50.0)
    with pytest.raises(UnsupportedModel, match="decoders with attn_logit_softcapping are not supported"):
        load_model(EngineConfig(str(tmp_path), device="cpu"))
