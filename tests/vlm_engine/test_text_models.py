"""Text-only families: the tokens of `generate()`, and no images."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoints import tiny_qwen3
from tests.vlm_engine.reference import MIN_LEAD, Case, prompt_length, run
from vlm_engine import Engine, EngineConfig, GenerationRequest
from vlm_engine.errors import ImageRejected, UnsupportedModel
from vlm_engine.models import VisionLanguageModel, load_model

LONG = "It is night and the street is empty. " * 6


@pytest.fixture(scope="module", params=["llama_checkpoint", "qwen3_checkpoint", "gemma3_text_checkpoint"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> VisionLanguageModel:
    return load_model(EngineConfig(str(folder), dtype="float32", device="cpu"))


def make_engine(model: VisionLanguageModel, **limits: Any) -> Engine:
    options = {"kv_cache_tokens": 2048, "scheduler": "static"} | limits
    return Engine(EngineConfig(model.spec.name, **options), model=model)


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[tuple[Case, list[int]]]:
    """Eight questions, some that begin alike, and what the stock model says."""
    texts = ["What is this?", LONG, LONG + "Is anybody there?", "x", LONG[:50], "Who? " * 9, "a b", LONG[9:]]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cases = [Case(f"case {i}", (text,), 8 + 3 * i) for i, text in enumerate(texts)]
    return [(case, greedy(tokenizer, stock, case)) for case in cases]


def greedy(tokenizer: Any, stock: Any, case: Case) -> list[int]:
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": case.parts[0]}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = stock.generate(
        **inputs,
        max_new_tokens=case.num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(output.logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > MIN_LEAD, f"{case.name}: a token is not clear"
    token_ids: list[int] = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return token_ids


@pytest.mark.parametrize("chunk", [1, 7, 32, 256])
def test_tokens_are_those_of_generate(
    model: VisionLanguageModel, answers: list[tuple[Case, list[int]]], chunk: int
) -> None:
    for case, expected in answers:
        engine = make_engine(model, max_num_batched_tokens=chunk, enable_prefix_caching=False)
        assert run(engine, [case])[case.name] == expected, case.name


@pytest.mark.parametrize("chunk", [9, 64])
def test_eight_sequences_side_by_side(
    model: VisionLanguageModel, answers: list[tuple[Case, list[int]]], chunk: int
) -> None:
    """E16: in memory for the longest and little more."""
    expected = {case.name: tokens for case, tokens in answers}
    cases = [case for case, _ in answers]
    room = max(prompt_length(make_engine(model), case) + case.num_tokens for case in cases) + 32
    engine = make_engine(model, max_num_batched_tokens=chunk, kv_cache_tokens=room)
    assert run(engine, cases, every=2) == expected
    assert engine.stats().num_preemptions > 0


def test_parts_are_joined(model: VisionLanguageModel) -> None:
    """The chat templates of text models take a string."""
    prompts = model.prompts
    joined = prompts.prepare(Case("x", ("What is this? Who is there?",)).messages)
    in_parts = prompts.prepare(Case("x", ("What is this?", " Who is there?")).messages)
    as_string = prompts.prepare([{"role": "user", "content": "What is this? Who is there?"}])
    assert joined.token_ids == in_parts.token_ids == as_string.token_ids


def test_images_are_refused(model: VisionLanguageModel) -> None:
    from PIL import Image

    engine = make_engine(model)
    with pytest.raises(ImageRejected, match="reads no images") as error:
        engine.add(Case("x", ("look", Image.new("RGB", (8, 8)))).request)
    assert error.value.field == "messages[0].content[1]"
    assert not engine.has_work


def test_the_end_token_ends_the_answer(
    model: VisionLanguageModel, answers: list[tuple[Case, list[int]]]
) -> None:
    case, expected = answers[7]
    spec, end = model.spec, next(i for i in range(3, 20) if expected[i] not in expected[:i])
    model.spec = replace(spec, stop_token_ids=frozenset({expected[end]}))
    try:
        sampling = replace(case.request.sampling, ignore_eos=False)
        text = make_engine(model).generate(GenerationRequest("x", case.messages, sampling))
    finally:
        model.spec = spec
    assert text == model.prompts.tokenizer.decode(expected[:end])


def with_layers(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_layers_with_a_window(tmp_path: Path) -> None:
    """Whatever the family: here Qwen3, on stock layers, since the CPU kernels know no window."""
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": None}
    folder = with_layers(tiny_qwen3(tmp_path), **window)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    case = Case("x", (LONG,), 12)
    model = load_model(EngineConfig(str(folder), dtype="float32", device="cpu"))
    assert run(make_engine(model, max_num_batched_tokens=20), [case])["x"] == greedy(tokenizer, stock, case)
    half = load_model(EngineConfig(str(folder), dtype="bfloat16", device="cpu"))
    assert type(half._stack).__name__ == "StockStack"  # type: ignore[attr-defined]
    assert len(run(make_engine(half), [case])["x"]) == 12


def test_layers_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    folder = with_layers(
        tiny_qwen3(tmp_path), layer_types=["full_attention", "chunked_attention", "full_attention"]
    )
    with pytest.raises(UnsupportedModel, match="chunked_attention are not supported"):
        load_model(EngineConfig(str(folder)))
