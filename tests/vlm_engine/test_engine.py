"""The engine on a tiny real model: limits, faults, cancels, books."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vlm_engine import Engine, EngineConfig, GenerationRequest, RequestError, SamplingParams, TokenEvent
from vlm_engine.errors import ImageRejected, ModelLoadError, PromptTooLong, UnsupportedModel
from vlm_engine.logits import LogitEditor
from vlm_engine.models import ImageInput, VisionLanguageModel, load_model
from vlm_engine.warm_up import warm_up


@pytest.fixture(scope="module")
def model(qwen3_vl_checkpoint: Path) -> VisionLanguageModel:
    return load_model(EngineConfig(str(qwen3_vl_checkpoint), dtype="float32", device="cpu"))


def make_engine(model: VisionLanguageModel, **limits: int) -> Engine:
    config = EngineConfig(model.spec.name, **({"kv_cache_tokens": 2048} | limits))  # type: ignore[arg-type]
    return Engine(config, model=model)


def picture(seed: int = 0, size: tuple[int, int] = (96, 64)) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(noise)


def ask(
    request_id: str, *parts: str | Image.Image, max_tokens: int | None = 6, **more: object
) -> GenerationRequest:
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts
    ]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(request_id, [{"role": "user", "content": content}], sampling, **more)  # type: ignore[arg-type]


def drain(engine: Engine) -> dict[str, tuple[list[int], str | None]]:
    """Token ids and finish reason of every request."""
    answers: dict[str, tuple[list[int], str | None]] = {}
    while engine.has_work:
        for event in engine.step():
            ids, _ = answers.get(event.request_id, ([], None))
            answers[event.request_id] = (ids + list(event.token_ids), event.finish_reason)
    engine.check_integrity()
    return answers


def num_prompt_tokens(engine: Engine, request: GenerationRequest) -> int:
    return len(engine.prepare(request)[0].token_ids)


def test_a_prompt_that_can_never_fit_is_refused_and_others_go_on(model: VisionLanguageModel) -> None:
    """E14, E15: a KV cache of 96 tokens, a prompt of more."""
    engine = make_engine(model, kv_cache_tokens=96)
    engine.add(ask("good", "hello"))
    with pytest.raises(PromptTooLong, match=r"at most 95 fit") as error:
        engine.add(ask("long", "many words " * 60))
    assert error.value.field == "messages"
    with pytest.raises(
        PromptTooLong, match=r"over 3072 characters, more than any that fits into 96"
    ) as error:
        engine.add(ask("endless", "many words " * 280))
    assert error.value.field == "messages[0].content[0]"
    assert drain(engine)["good"][1] == "length"


def test_prompt_at_the_limit_runs_and_one_token_more_does_not(model: VisionLanguageModel) -> None:
    """E15: over the maximum by one token, then a normal request."""
    length = num_prompt_tokens(make_engine(model), ask("x", "hello there"))
    engine = make_engine(model, max_model_len=length)
    with pytest.raises(PromptTooLong):
        engine.add(ask("over", "hello there"))
    engine.add(ask("next", "hi"))
    assert drain(engine)["next"][1] == "length"
    engine = make_engine(model, max_model_len=length + 1)
    engine.add(ask("fits", "hello there"))
    ids, reason = drain(engine)["fits"]
    assert (len(ids), reason) == (1, "length")


def test_max_tokens_above_the_remaining_context_is_clamped(model: VisionLanguageModel) -> None:
    """E23."""
    length = num_prompt_tokens(make_engine(model), ask("x", "hello there"))
    engine = make_engine(model, max_model_len=length + 9)
    engine.add(ask("asked", "hello there", max_tokens=500))
    engine.add(ask("unasked", "hello there", max_tokens=None))
    answers = drain(engine)
    assert [(len(ids), reason) for ids, reason in answers.values()] == [(9, "length")] * 2


def test_an_image_over_the_encoder_limit_is_refused(model: VisionLanguageModel) -> None:
    """E5."""
    engine = make_engine(model, encoder_cache_tokens=10)
    with pytest.raises(ImageRejected, match="raise encoder_cache_tokens"):
        engine.add(ask("big", picture(size=(160, 160))))
    engine.add(ask("small", picture(size=(96, 64))))
    assert drain(engine)["small"][1] == "length"


def test_kv_full_preempts_one_and_changes_no_token(model: VisionLanguageModel) -> None:
    """E8, E16: three sequences with images in a cache for two."""
    requests = [ask(f"r{i}", picture(i), f"question {i}", max_tokens=40) for i in range(3)]
    roomy, tight = make_engine(model), make_engine(model, kv_cache_tokens=192, max_num_batched_tokens=24)
    for engine in (roomy, tight):
        for request in requests:
            engine.add(request)
    assert drain(tight) == drain(roomy)
    assert tight.stats().num_preemptions >= 1


def test_what_was_prepared_elsewhere_is_checked_too(model: VisionLanguageModel) -> None:
    roomy, tight = make_engine(model), make_engine(model, kv_cache_tokens=96)
    request = ask("long", "many words " * 60)
    with pytest.raises(PromptTooLong, match="at most 95 fit"):
        tight.submit(request, *roomy.prepare(request))
    assert not tight.has_work


@pytest.mark.parametrize("steps", range(8))
def test_cancel_in_every_state_frees_all(model: VisionLanguageModel, steps: int) -> None:
    """E20: in the queue, mid-chunk, inside the image, in decode."""
    engine = make_engine(model, max_num_batched_tokens=5, max_num_seqs=1)
    engine.add(ask("gone", picture(), "and some text"))
    for _ in range(steps):
        engine.step()
    event = engine.abort("gone")
    assert event is not None
    assert event.finish_reason == "cancelled"
    assert not engine.has_work
    engine.check_integrity()
    assert engine.abort("gone") is None


def test_who_is_cancelled_hears_nothing_more(model: VisionLanguageModel) -> None:
    """What a step had to tell later, as it waited for the side thread, is told to the others only."""
    engine = make_engine(model)
    engine.add(ask("gone", "hello"))
    engine.add(ask("other", "hello"))
    engine._untold = [TokenEvent("gone", "late"), TokenEvent("other", "late")]
    engine.abort("gone")
    assert {event.request_id for event in engine.step()} == {"other"}
    drain(engine)


def test_expired_in_the_queue_never_runs(model: VisionLanguageModel) -> None:
    """E19."""
    now = [0.0]
    config = EngineConfig(model.spec.name, kv_cache_tokens=512, max_num_seqs=1)
    engine = Engine(config, model=model, clock=lambda: now[0])
    engine.add(ask("first", "hello"))
    engine.step()
    engine.add(ask("late", "hello", expires_at=5.0))
    now[0] = 5.0
    (event,) = [event for event in engine.step() if event.request_id == "late"]
    assert event.finish_reason == "expired"
    assert event.usage is not None
    assert event.usage.completion_tokens == 0


def test_one_bad_item_among_good_ones(model: VisionLanguageModel) -> None:
    """E24: preprocessing of one raises; the field is named, eight answers are good."""
    engine = make_engine(model)
    for i in range(8):
        engine.add(ask(f"r{i}", picture(i), "what?"))
    with pytest.raises(ImageRejected) as error:
        engine.add(ask("bad", "look:", picture(9), Image.new("RGB", (1093, 5))))
    assert error.value.field == "messages[0].content[2]"
    assert [reason for _, reason in drain(engine).values()] == ["length"] * 8


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "sound"}]}], "messages[0].content[0]"),
    ],
)
def test_bad_messages_name_their_field(
    model: VisionLanguageModel, messages: list[object], field: str
) -> None:
    with pytest.raises(RequestError) as error:
        make_engine(model).add(GenerationRequest("x", messages))  # type: ignore[arg-type]
    assert error.value.field == field


class Faulty:
    """Something of the model that fails for images of one size."""

    def __init__(self, part: object) -> None:
        self._part = part
        if hasattr(part, "encoder"):
            self.encoder = Faulty(part.encoder)

    def __getattr__(self, name: str) -> object:
        return getattr(self._part, name)

    def start(self, image: ImageInput) -> object:
        if image.grid[1] > 6:
            raise torch.OutOfMemoryError("tower out of memory")
        return self._part.start(image)  # type: ignore[attr-defined]


def test_a_fault_in_a_step_fails_its_plan_and_the_loop_goes_on(model: VisionLanguageModel) -> None:
    engine = make_engine(Faulty(model))  # type: ignore[arg-type]
    engine.add(ask("bad", picture(size=(160, 160))))
    (event,) = engine.step()
    assert (event.finish_reason, event.text) == ("error", "")
    assert "tower out of memory" in (event.error or "")
    engine.check_integrity()
    engine.add(ask("good", picture()))
    assert drain(engine)["good"][1] == "length"
    engine.add(ask("bad again", picture(size=(160, 160))))
    assert engine.step()[0].finish_reason == "error"


class Poisoned(Faulty):
    """A model whose tower turns pictures of one size into NaN."""

    def __init__(self, part: object) -> None:
        super().__init__(part)
        if hasattr(part, "encoder"):
            self.encoder = Poisoned(part.encoder)

    def start(self, image: ImageInput) -> object:
        state = self._part.start(image)  # type: ignore[attr-defined]
        state.pixels.fill_(torch.nan if image.grid[1] > 6 else 0.5)
        return state


def test_nan_is_an_error_of_its_request_and_poisons_nobody(model: VisionLanguageModel) -> None:
    engine = make_engine(Poisoned(model))  # type: ignore[arg-type]
    for number in range(2):
        engine.add(ask(f"bad {number}", "a long text before it " * 4, picture(size=(160, 160))))
        engine.add(ask(f"good {number}", "a long text before it " * 4, picture(size=(96, 64))))
        answers = drain(engine)
        assert answers[f"bad {number}"] == ([], "error")
        assert answers[f"good {number}"][1] == "length"
        assert len(answers[f"good {number}"][0]) == 6
    assert engine.stats().num_encoded_images == 3, "what was poisoned is encoded again, the rest is not"


@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"top_k": 5}, {"logprobs": 1}])
def test_a_row_that_edits_make_unsound_fails_alone(
    model: VisionLanguageModel, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """As a penalty of next to nothing did: infinite logits, a draw behind the vocabulary, a failed step."""
    monkeypatch.setattr(LogitEditor, "edit", lambda self, row, run=(): row[3].fill_(torch.inf))
    engine = make_engine(model)
    engine.add(ask("good", "hello"))
    bad = ask("bad", "hello")
    engine.add(replace(bad, sampling=replace(bad.sampling, temperature=1.0, min_tokens=1, **more)))
    answers = drain(engine)
    assert answers["bad"] == ([], "error")
    assert answers["good"][1] == "length"


def test_usage_counts_along_and_timings_come_with_the_last_event(model: VisionLanguageModel) -> None:
    engine = make_engine(model)
    request = ask("first", picture(size=(96, 64)), "a long question " * 8)
    engine.add(request)
    drain(engine)
    engine.add(request)
    events: list[object] = []
    while engine.has_work:
        events += engine.step()
    *early, last = events
    assert [event.usage.completion_tokens for event in early] == [1, 2, 3, 4, 5]  # type: ignore[attr-defined]
    assert all(event.timings is None for event in early)  # type: ignore[attr-defined]
    usage, timings = last.usage, last.timings  # type: ignore[attr-defined]
    assert usage.prompt_tokens == num_prompt_tokens(engine, request)
    assert usage.completion_tokens == 6
    assert usage.image_tokens == 6
    assert usage.cached_tokens >= usage.prompt_tokens - 16
    assert timings.decode_ms > 0
    assert timings.preprocess_ms > 0


def test_generate_is_the_one_line_way_in(model: VisionLanguageModel) -> None:
    engine = make_engine(model)
    text = engine.generate(ask("x", picture(), "hello"))
    engine.add(ask("y", picture(), "hello"))
    assert model.prompts.tokenizer.decode(drain(engine)["y"][0], skip_special_tokens=True) == text


def test_the_same_id_twice_is_refused(model: VisionLanguageModel) -> None:
    engine = make_engine(model)
    engine.add(ask("x", "hello"))
    with pytest.raises(RequestError, match="already running"):
        engine.add(ask("x", "hello"))


@pytest.fixture
def gpt2_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    return tmp_path


def test_unknown_families_and_missing_models_are_named(gpt2_folder: Path) -> None:
    known = "gemma3, gemma3_text, idefics3, internvl, llama, qwen2_5_vl, qwen2_vl, qwen3, qwen3_vl, smolvlm"
    with pytest.raises(UnsupportedModel, match=f"'gpt2' is not supported; supported are {known}$"):
        load_model(EngineConfig(str(gpt2_folder)))
    with pytest.raises(ModelLoadError, match="no such directory"):
        load_model(EngineConfig("/nowhere/model"))
    with pytest.raises(ModelLoadError, match="nobody/nothing"):
        load_model(EngineConfig("nobody/nothing"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for CUDA where there is none")
def test_cuda_without_a_gpu_is_a_clear_error(qwen3_vl_checkpoint: Path) -> None:
    with pytest.raises(ModelLoadError, match="finds no CUDA device"):
        load_model(EngineConfig(str(qwen3_vl_checkpoint), device="cuda"))


def test_a_checkpoint_that_lacks_tensors_is_refused(qwen3_vl_checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in qwen3_vl_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in tensors if "o_proj" in name)
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensors: .*o_proj"):
        load_model(EngineConfig(str(tmp_path)))


def test_a_new_start_leaves_nothing_of_what_ran(model: VisionLanguageModel) -> None:
    """Cached blocks, encoded images and their tensors, counts, debts; a request that runs ends."""
    engine = make_engine(model)
    engine.add(ask("chat", "Is anybody there?", max_tokens=20))
    engine.add(ask("frame", "What?", picture(), priority="background"))
    while engine.scheduler.encoder_cache.num_used == 0 or engine.scheduler.encoder_cache.num_held:
        engine.step()
    engine.scheduler.budget.counts["floor_overruns"] += 1
    engine.start_over()
    assert not engine.has_work
    assert not engine.runner._features
    stats, fresh = engine.stats(), make_engine(model).stats()
    assert replace(stats, steps=fresh.steps, slices=fresh.slices) == fresh
    engine.add(ask("frame", "What?", picture()))
    drain(engine)
    assert engine.stats().num_encoded_images == 1


def test_warm_up_leaves_nothing_behind_but_known_costs(model: VisionLanguageModel) -> None:
    engine, fresh = make_engine(model), make_engine(model)
    warm_up(engine)
    engine.check_integrity()
    assert engine.cost_model.step.num_learned > 8
    assert engine.cost_model.encoder.num_learned > 0
    request = ask("x", picture(), "hello")
    assert engine.generate(request) == fresh.generate(request)
    assert engine.stats().num_encoded_images == 1
    warm_up(make_engine(model, max_model_len=40))
