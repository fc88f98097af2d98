"""What requests want around their tokens, on the engine with a tiny real model."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.tiny_tokenizers import qwen_tokenizer
from tests.vlm_engine.test_engine import Poisoned, ask, make_engine, picture
from vlm_engine import Engine, EngineConfig, GenerationRequest, RequestError, TokenEvent
from vlm_engine.models import VisionLanguageModel, load_model
from vlm_engine.request import PositionLogprobs
from vlm_engine.token_bytes import TokenBytes


@pytest.fixture(scope="module")
def model(qwen3_vl_checkpoint: Path) -> VisionLanguageModel:
    return load_model(EngineConfig(str(qwen3_vl_checkpoint), dtype="float32", device="cpu"))


def wish(request_id: str, *parts: object, **settings: object) -> GenerationRequest:
    request = ask(request_id, *(parts or ("hello",)), max_tokens=12)  # type: ignore[arg-type]
    return replace(request, sampling=replace(request.sampling, **settings))  # type: ignore[arg-type]


def answers(engine: Engine, *requests: GenerationRequest) -> dict[tuple[str, int], TokenEvent]:
    """All events of each answer, merged."""
    for request in requests:
        engine.add(request)
    merged: dict[tuple[str, int], TokenEvent] = {}
    while engine.has_work:
        for event in engine.step():
            key = (event.request_id, event.index)
            merged[key] = merged[key].merged(event) if key in merged else event
    engine.check_integrity()
    return merged


def answer(engine: Engine, request: GenerationRequest) -> TokenEvent:
    return answers(engine, request)[request.request_id, 0]


def test_answers_of_one_request_differ_and_share_its_prompt(model: VisionLanguageModel) -> None:
    """The picture is encoded once, and the prompt of later answers is found in the cache."""
    engine = make_engine(model)
    request = wish("r", picture(size=(160, 160)), "what is it?", n=3, temperature=1.5, seed=7)
    several = answers(engine, request)
    assert set(several) == {("r", 0), ("r", 1), ("r", 2)}
    assert len({event.token_ids for event in several.values()}) == 3
    assert {event.finish_reason for event in several.values()} == {"length"}
    assert engine.runner.num_encoded == 1
    usages = [event.usage for event in several.values()]
    assert all(usage and usage.completion_tokens == 12 for usage in usages)
    assert all(usage and usage.cached_tokens >= usage.prompt_tokens - 17 for usage in usages[1:])


def test_a_request_may_be_called_as_an_answer_of_another(model: VisionLanguageModel) -> None:
    settings = {"temperature": 1.2, "seed": 5}
    mine = wish("r answer 1", "something else", **settings)
    alone, several = answer(make_engine(model), mine), answers(make_engine(model), wish("r", n=2, **settings))
    for order in ((wish("r", n=2, **settings), mine), (mine, wish("r", n=2, **settings))):
        together = answers(make_engine(model), *order)
        assert together["r answer 1", 0].token_ids == alone.token_ids
        assert all(together[key].token_ids == event.token_ids for key, event in several.items())


def test_answer_i_is_that_of_seed_plus_i(model: VisionLanguageModel) -> None:
    settings = {"temperature": 1.2, "top_p": 0.9, "min_p": 0.02, "presence_penalty": 0.5}
    several = answers(make_engine(model), wish("r", n=3, seed=20, **settings))
    for index in range(3):
        alone = answer(make_engine(model), wish("r", seed=20 + index, **settings))
        assert several["r", index].token_ids == alone.token_ids


def test_a_seed_gives_the_same_answer_in_any_company(model: VisionLanguageModel) -> None:
    """With chunks of 7 tokens, others beside it, and in a cache so small that some are preempted."""
    mine = wish("mine", "tell me", seed=3, temperature=1.3, top_k=40, frequency_penalty=0.4, max_tokens=60)
    alone = answer(make_engine(model), mine)
    others = [
        wish(f"o{i}", picture(i), "what?", n=2, temperature=1.0, seed=i, max_tokens=30) for i in range(3)
    ]
    engine = make_engine(model, kv_cache_tokens=160, max_num_batched_tokens=7)
    engine.add(replace(mine, priority="background"))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [t for event in engine.step() if event.request_id == "mine" for t in event.token_ids]
        if len(tokens) == 9 and others:
            engine.add(others.pop())
    assert tuple(tokens) == alone.token_ids
    assert engine.stats().num_preemptions


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_request_is_cancelled_with_all_its_answers(model: VisionLanguageModel, steps: int) -> None:
    engine = make_engine(model, max_num_batched_tokens=9)
    engine.add(wish("r", "hello there", n=3))
    for _ in range(steps):
        engine.step()
    event = engine.abort("r")
    assert event is not None
    assert event.is_failure
    assert not engine.has_work
    engine.check_integrity()


def test_an_answer_that_fails_ends_its_request(model: VisionLanguageModel) -> None:
    engine = make_engine(Poisoned(model))  # type: ignore[arg-type]
    engine.add(wish("bad", picture(size=(160, 160)), n=2))
    events = [event for _ in range(20) if engine.has_work for event in engine.step()]
    assert [event.finish_reason for event in events] == ["error"]
    engine.check_integrity()


def test_an_id_is_in_use_until_the_last_answer_ends(model: VisionLanguageModel) -> None:
    engine = make_engine(model)
    engine.add(wish("r", n=2))
    while engine.has_work:
        with pytest.raises(RequestError, match="already running"):
            engine.add(wish("r"))
        engine.step()
    assert answer(engine, wish("r")).finish_reason == "length"


def test_an_end_token_of_the_request(model: VisionLanguageModel) -> None:
    whole = answer(make_engine(model), wish("r"))
    end = whole.token_ids[5]
    cut = answer(make_engine(model), wish("r", stop_token_ids=(end,)))
    first = whole.token_ids.index(end)
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[: first + 1], "stop")
    assert whole.text.startswith(cut.text)
    assert cut.usage is not None
    assert cut.usage.completion_tokens == first + 1


def test_nothing_ends_an_answer_before_its_least_tokens(model: VisionLanguageModel) -> None:
    """Neither an end token, which cannot be drawn, nor a stop string, which is not looked for."""
    whole = answer(make_engine(model), wish("r"))
    banned = whole.token_ids[2]
    longer = answer(make_engine(model), wish("r", stop_token_ids=(banned,), min_tokens=9))
    assert banned not in longer.token_ids[:9]
    assert len(longer.token_ids) >= 10
    stop = whole.text[1]
    text = answer(make_engine(model), wish("r", stop=(stop,), min_tokens=9)).text
    assert stop in text
    assert len(answer(make_engine(model), wish("r", stop=(stop,))).text) == whole.text.index(stop)


def test_logprobs_come_with_every_token_and_their_bytes_are_the_text(model: VisionLanguageModel) -> None:
    request = wish("r", logprobs=2, temperature=0.8, seed=1)
    event = answer(make_engine(model), request)
    assert [each.taken.token_id for each in event.logprobs] == list(event.token_ids)
    assert b"".join(each.taken.data for each in event.logprobs).decode(errors="replace") == event.text
    for each in event.logprobs:
        assert len(each.top) == 2
        assert each.top[0].logprob >= max(each.taken.logprob, each.top[1].logprob)
    again = answers(make_engine(model), wish("x"), request, wish("y", temperature=2.0))["r", 0]
    assert [e.taken.logprob for e in again.logprobs] == pytest.approx(
        [e.taken.logprob for e in event.logprobs], abs=1e-4
    )


def test_the_token_that_ends_an_answer_has_no_logprob(model: VisionLanguageModel) -> None:
    whole = answer(make_engine(model), wish("r"))
    event = answer(make_engine(model), wish("r", stop_token_ids=whole.token_ids[-1:], logprobs=0))
    assert len(event.logprobs) == len(event.token_ids) - 1
    assert all(isinstance(each, PositionLogprobs) and not each.top for each in event.logprobs)


def test_a_token_id_that_is_not_there_is_refused(model: VisionLanguageModel) -> None:
    for field, value in (("logit_bias", {model.spec.vocab_size: 1.0}), ("stop_token_ids", (10**6,))):
        with pytest.raises(RequestError, match="there is no token") as caught:
            make_engine(model).add(wish("r", **{field: value}))
        assert caught.value.field == field


TEXT = "Zwölf Boxkämpfer 🥊 jagen Viktor 한국어 — a b\n\n  c"


def test_bytes_of_byte_level_tokens() -> None:
    tokenizer = qwen_tokenizer()
    token_bytes, ids = TokenBytes(tokenizer), tokenizer(TEXT)["input_ids"]
    assert b"".join(map(token_bytes, ids)).decode() == TEXT
    assert token_bytes(tokenizer.convert_tokens_to_ids("<|im_end|>")) == b"<|im_end|>"
    assert token_bytes(10**6) == b""


def test_bytes_of_pieces_with_byte_fallback() -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {f"<0x{value:02X}>": value for value in range(256)} | {"▁a": 256, "▁": 257, "b": 258}
    base = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    base.normalizer = normalizers.Replace(" ", "▁")
    base.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    token_bytes = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=base))
    assert b"".join(map(token_bytes, [256, 257, 258, *"é".encode()])).decode() == " a bé"
