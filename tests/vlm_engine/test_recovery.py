"""Steps that a request makes fail, in every family: that one ends, the others give the same tokens."""

import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.vlm_engine.guesses import Guesses
from tests.vlm_engine.reference import Case, Family, images_of
from tests.vlm_engine.test_engine import Faulty
from tests.vlm_engine.test_equality import FAMILIES
from vlm_engine import Engine, EngineConfig, GenerationRequest, StructuredOutput, TokenEvent
from vlm_engine.grammar import GrammarMatcher
from vlm_engine.models import ImageInput

POISON = "q"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return Family.load(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def qwen(qwen3_vl_checkpoint: Any) -> Family:
    return Family.load(qwen3_vl_checkpoint)


class PickyTower(Faulty):
    """A tower that has no memory for one picture."""

    refused: Tensor | None = None

    def __init__(self, part: Any, failed_in: list[str]) -> None:
        self._part, self.failed_in = part, failed_in

    def start(self, image: ImageInput) -> Any:
        if self.refused is not None and torch.equal(image.pixels, self.refused):
            self.failed_in.append(threading.current_thread().name)
            raise torch.OutOfMemoryError("none left for this picture")
        return self._part.start(image)


class Picky(Faulty):
    """A model whose steps fail with one token among theirs, or give no numbers then.

    Args:
        family: Of the model.
        gives_nan: Whether nobody in the step gets a number, instead of an error.
    """

    def __init__(self, family: Family, *, gives_nan: bool = False) -> None:
        self._part = family.model
        (self._poison,) = family.processor.tokenizer.encode(POISON, add_special_tokens=False)
        self._gives_nan = gives_nan
        self.failed_in: list[str] = []
        """Names of the threads in which something failed."""
        self.encoder = PickyTower(family.model.encoder, self.failed_in)

    def forward(self, token_ids: Tensor, *more: Any) -> Tensor:
        hidden: Tensor = self._part.forward(token_ids, *more)  # type: ignore[attr-defined]
        if self._poison in token_ids.tolist():
            self.failed_in.append(threading.current_thread().name)
            if not self._gives_nan:
                raise RuntimeError("an index is out of bounds")
            hidden[:] = torch.nan
        return hidden


def engine_of(family: Family, model: Any, **limits: Any) -> Engine:
    config = {"kv_cache_tokens": 4096, "scheduler": "static", "max_num_batched_tokens": 64} | limits
    return Engine(EngineConfig(family.model.spec.name, **config), model=model)


def outcome(
    engine: Engine, requests: Sequence[GenerationRequest], *, together: bool = False
) -> dict[str, list[TokenEvent]]:
    """The events of each request; they come one a step, or all at once."""
    told: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    queue = list(requests)
    while queue or engine.has_work:
        for _ in range(len(queue) if together else min(1, len(queue))):
            engine.add(queue.pop(0))
        for event in engine.step():
            told[event.request_id].append(event)
        engine.check_integrity()
    return told


def tokens(events: Sequence[TokenEvent]) -> dict[int, list[int]]:
    """The tokens of each answer."""
    said: dict[int, list[int]] = {}
    for event in events:
        said[event.index] = said.get(event.index, []) + list(event.token_ids)
    return said


def test_a_request_that_makes_steps_fail_ends_alone(family: Family) -> None:
    """Beside it are pictures, a prompt in pieces, and decodes with right and wrong guesses."""
    long = "It is night and the street is empty. " * 4
    cases = [
        Case("chat", ("What is happening here?",), 24),
        Case("shows", (family.picture(1), "What is this?"), 12),
        Case("frame", ("and", family.picture(2, 7, 6), "What?"), 6, {"priority": "background"}),
        Case("long", (long, family.picture(3, 4, 4), long), 8),
    ]
    expected = {case.name: family.greedy(case) for case in cases}
    bad = Case("bad", (family.picture(4, 3, 3), f"What is this {POISON}?"), 8)
    model = Picky(family)
    engine = engine_of(family, model)
    engine.scheduler.speculator = guesses = Guesses(expected)
    told = outcome(engine, [case.request for case in (*cases[:2], bad, *cases[2:])])
    assert [event.error for event in told.pop("bad")] == ["RuntimeError: an index is out of bounds"]
    assert {name: tokens(events)[0] for name, events in told.items()} == expected
    assert len(model.failed_in) == 2, "in the step, and alone"
    assert engine.stats().num_encoded_images == len(images_of(engine, *cases, bad))
    assert guesses.stats.num_accepted_tokens > 5
    assert engine.health.reason is None


def test_a_picture_for_which_there_is_no_memory_ends_its_request_alone(family: Family) -> None:
    """Pictures that were booked behind it in the same step are encoded later, and whole."""
    names = ("a", "b", "c", "bad")
    cases = [Case(name, ("and", family.picture(20 + i, 7, 6), "What?"), 6) for i, name in enumerate(names)]
    expected = {case.name: family.greedy(case) for case in cases[:3]}
    model = Picky(family)
    engine = engine_of(family, model, max_num_batched_tokens=4096)
    model.encoder.refused = engine.prepare(cases[3].request)[0].images[0].pixels
    order = [cases[i].request for i in (0, 3, 1, 2)]
    told = outcome(engine, order, together=True)
    assert [event.error for event in told.pop("bad")] == ["OutOfMemoryError: none left for this picture"]
    assert {name: tokens(events)[0] for name, events in told.items()} == expected
    assert engine.stats().num_encoded_images == len(images_of(engine, *cases[:3]))
    told = outcome(engine, order, together=True)
    assert {name: tokens(events)[0] for name, events in told.items() if name != "bad"} == expected


def test_two_requests_with_the_bad_picture_end_both(family: Family) -> None:
    """The second reads what the first was to encode."""
    cases = [Case(name, (family.picture(20, 7, 6), name), 6) for name in ("bad", "bad as well")]
    cases.append(Case("good", (family.picture(21, 7, 6), "What?"), 6))
    model = Picky(family)
    engine = engine_of(family, model)
    model.encoder.refused = engine.prepare(cases[0].request)[0].images[0].pixels
    told = outcome(engine, [case.request for case in cases], together=True)
    assert [told[case.name][-1].finish_reason for case in cases] == ["error", "error", "length"]
    assert tokens(told["good"])[0] == family.greedy(cases[2])


@pytest.mark.parametrize("is_picture", [False, True], ids=["forward", "encoder"])
def test_what_fails_on_the_side_thread_ends_alone(qwen: Family, is_picture: bool) -> None:
    """A chat decodes; of three frames one makes its plan fail, which the steps then take apart."""
    chat = Case("chat", ("What is happening here?",), 60)
    texts = ("What?", "What?" if is_picture else f"What {POISON}?", "What?")
    frames = [
        Case(f"frame {i}", ("and", qwen.picture(20 + i, 7, 6), text), 6, {"priority": "background"})
        for i, text in enumerate(texts)
    ]
    model, before = Picky(qwen), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        limits = {"background_ttft_ms": 60_000.0, "max_num_batched_tokens": 512}
        engine = engine_of(qwen, model, scheduler="latency", encode="beside", **limits)
        if is_picture:
            model.encoder.refused = engine.prepare(frames[1].request)[0].images[0].pixels
        told = outcome(engine, [case.request for case in (chat, *frames)])
    finally:
        torch.set_num_threads(before)
        engine.close()
    assert [event.finish_reason for event in told.pop("frame 1")] == ["error"]
    assert model.failed_in[0].startswith("side")
    good = (chat, frames[0], frames[2])
    assert {name: tokens(events)[0] for name, events in told.items()} == {
        case.name: qwen.greedy(case) for case in good
    }


def wishes(family: Family) -> list[GenerationRequest]:
    """What keeps something from step to step: random numbers, forms, penalties, logprobs, several answers."""
    plain = Case("plain", (family.picture(1), "What is this?"), 16).request
    settings: list[dict[str, Any]] = [
        {"temperature": 1.3, "seed": 3},
        {"temperature": 1.1, "seed": 4, "n": 3, "top_p": 0.9, "logprobs": 2},
        {"structured": StructuredOutput("regex", "[a-p]{4} [0-9]{9}"), "temperature": 0.9, "seed": 5},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {40: 2.0}},
    ]
    changed = [
        replace(plain, request_id=f"wish {i}", sampling=replace(plain.sampling, **each))
        for i, each in enumerate(settings)
    ]
    return [*changed[:2], plain, *changed[2:]]


def test_nothing_is_drawn_or_accepted_twice(qwen: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails behind its draws, when the forms of some requests have moved on already."""
    requests, form = wishes(qwen), StructuredOutput("regex", "x{30}")
    expected = {r.request_id: tokens(outcome(qwen.engine(), [r])[r.request_id]) for r in requests}
    bad = replace(requests[2], request_id="bad", sampling=replace(requests[2].sampling, structured=form))
    (x,) = qwen.processor.tokenizer.encode("x", add_special_tokens=False)
    accept, num_failed = GrammarMatcher.accept, 0

    def broken(matcher: GrammarMatcher, token_id: int) -> bool:
        nonlocal num_failed
        if token_id == x:
            num_failed += 1
            raise RuntimeError("the form is lost")
        return accept(matcher, token_id)

    monkeypatch.setattr(GrammarMatcher, "accept", broken)
    for place in (0, 2, 5):
        engine = qwen.engine()
        order = [*requests[:place], bad, *requests[place:]]
        outcome(engine, [replace(order[0], request_id="first")] if order[0] is not bad else [])
        told = outcome(engine, order, together=True)
        assert told.pop("bad")[-1].error == "RuntimeError: the form is lost"
        assert {name: tokens(events) for name, events in told.items()} == expected
    assert num_failed == 2 * 3


def test_bad_requests_without_end_are_no_broken_engine(family: Family) -> None:
    """Not if nothing else comes: what the engine asks itself tells; steps, pictures and numbers that fail."""
    now = [0.0]
    text = Case("text", (f"a {POISON}",), 8)
    picture = Case("picture", (family.picture(20, 7, 6), "What?"), 6)
    good = Case("good", (family.picture(1), "What is this?"), 12)
    for case, gives_nan in ((text, False), (text, True), (picture, False)):
        model = Picky(family, gives_nan=gives_nan)
        config = EngineConfig(family.model.spec.name, kv_cache_tokens=4096)
        engine = Engine(config, model=model, clock=lambda: now[0])  # type: ignore[arg-type]
        if case is picture:
            model.encoder.refused = engine.prepare(case.request)[0].images[0].pixels
        for _ in range(12):
            now[0] += 2.0
            (event,) = outcome(engine, [case.request])[case.name]
            assert event.finish_reason == "error"
            assert engine.health.reason is None
        assert tokens(outcome(engine, [good.request])["good"])[0] == family.greedy(good)
        assert not engine.runner._prompts
        assert set(engine.runner._features) == {image.digest for image in images_of(engine, good)}


def test_a_long_prompt_begun_is_no_sign_that_steps_succeed(qwen: Family) -> None:
    """A model that never gives a number, asked in pieces of which only the last one wants any."""

    class Mute(Faulty):
        def __init__(self, part: object) -> None:
            self._part = part

        def logits(self, hidden: Tensor) -> Tensor:
            return torch.full((len(hidden), qwen.model.spec.vocab_size), torch.nan)

    engine = engine_of(qwen, Mute(qwen.model), max_num_batched_tokens=8)
    for number in range(3):
        outcome(engine, [Case(f"{number}", ("a long question " * 4, qwen.picture(number)), 4).request])
    assert re.match("the last 3 steps failed: the model gave no finite", engine.health.reason or "")
