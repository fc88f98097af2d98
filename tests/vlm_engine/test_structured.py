"""Answers that must have a form, on the engine with a tiny model that would never write it by itself."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_tokenizers import qwen_tokenizer
from tests.vlm_engine.test_answers import answer, answers, wish
from tests.vlm_engine.test_engine import make_engine, picture
from vlm_engine import EngineBusy, EngineConfig, EngineStopped, RequestError, StructuredOutput
from vlm_engine.grammar import Grammars
from vlm_engine.models import VisionLanguageModel, load_model
from vlm_engine.trial import FormTrial, check_grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
        "colors": {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 1, "maxItems": 3},
        "summary": {"type": "string", "maxLength": 12},
    },
    "required": ["people", "colors", "summary"],
    "additionalProperties": False,
}
CHOICES = ["a car", "a bus", 'the "bus"', "C:\\x", "é\n🥊"]
FORMS = {
    "schema": StructuredOutput.of_json(SCHEMA),
    "regex": StructuredOutput("regex", r"(red|blue) (car|bus){2}[0-9]{3}"),
    "choice": StructuredOutput.of_choice(CHOICES),
    "grammar": StructuredOutput("grammar", 'start: pair ("," pair)~2\npair: /[a-z]{2}/ "=" /[0-9]/'),
}


@pytest.fixture(scope="module")
def model(qwen3_vl_checkpoint: Path) -> VisionLanguageModel:
    return load_model(EngineConfig(str(qwen3_vl_checkpoint), dtype="float32", device="cpu"))


def has_form(kind: str, text: str) -> bool:
    if kind == "schema":
        value = json.loads(text)
        return (
            list(value) == SCHEMA["required"]
            and value["people"] < 100
            and set(value["colors"]) <= {"red", "blue"}
        )
    if kind == "choice":
        return text in CHOICES
    pattern = FORMS["regex"].value if kind == "regex" else r"[a-z]{2}=\d(,[a-z]{2}=\d){2}"
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_every_answer_has_its_form_and_ends_with_it(
    model: VisionLanguageModel, kind: str, temperature: float
) -> None:
    request = wish("r", structured=FORMS[kind], temperature=temperature, seed=4, max_tokens=200, n=2)
    for event in answers(make_engine(model), request).values():
        assert has_form(kind, event.text), event.text
        assert event.finish_reason == "stop"


def test_forms_in_any_company(model: VisionLanguageModel) -> None:
    """Chunks of 7 tokens, pictures, preemption: each answer is the one that its request gets alone."""
    requests = [
        wish(kind, picture(i), "what?", structured=form, temperature=1.2, seed=i, max_tokens=60)
        for i, (kind, form) in enumerate(FORMS.items())
    ]
    alone = {request.request_id: answer(make_engine(model), request).text for request in requests}
    engine = make_engine(model, kv_cache_tokens=160, max_num_batched_tokens=7)
    for request in requests:
        engine.add(replace(request, priority="background"))
    early = [event for _ in range(40) for event in engine.step()]
    late = answers(engine, wish("chat", "hello there", max_tokens=100))
    assert engine.stats().num_preemptions
    for name, text in alone.items():
        begin = "".join(event.text for event in early if event.request_id == name)
        assert begin + (late[name, 0].text if (name, 0) in late else "") == text


def test_any_json_object(model: VisionLanguageModel) -> None:
    """With random weights it may go on for ever; what comes is the start of an object until it is one."""
    event = answer(
        make_engine(model), wish("r", structured=StructuredOutput.of_json(), max_tokens=60, seed=2)
    )
    assert event.text.startswith("{")
    if event.finish_reason == "stop":
        assert isinstance(json.loads(event.text), dict)


def test_a_form_that_is_cut_ends_with_length(model: VisionLanguageModel) -> None:
    event = answer(make_engine(model), wish("r", structured=FORMS["schema"], max_tokens=3))
    assert event.finish_reason == "length"


def test_stop_strings_and_logprobs_beside_a_form(model: VisionLanguageModel) -> None:
    request = wish("r", structured=FORMS["schema"], stop=("colors",), logprobs=1, max_tokens=60)
    event = answer(make_engine(model), request)
    assert event.finish_reason == "stop"
    assert event.text.endswith('"')
    assert len(event.logprobs) == len(event.token_ids)


def test_a_form_decides_when_it_ends(model: VisionLanguageModel) -> None:
    """Not `min_tokens`, and not `ignore_eos`; an end token that the form allows is no part of the text."""
    form = StructuredOutput("regex", "a+")
    end = next(iter(model.spec.stop_token_ids))
    bias = {end: 100.0}
    for more in ({"min_tokens": 20}, {"ignore_eos": True}):
        settings = {"ignore_eos": False, "max_tokens": 30} | more
        event = answer(make_engine(model), wish("r", structured=form, logit_bias=bias, **settings))
        assert (event.text, event.finish_reason) == ("a", "stop")
        assert event.token_ids[-1] == end


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (StructuredOutput.of_json({"type": "foo"}), "Invalid type: foo"),
        (StructuredOutput.of_json({"not": {"type": "string"}}), "Unimplemented keys"),
        (StructuredOutput("json", "{bad"), "cannot be compiled"),
        (StructuredOutput("regex", "(?=a)b"), "look-around"),
        (StructuredOutput("grammar", "start: nothing"), "cannot be compiled"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_refused(
    model: VisionLanguageModel, form: StructuredOutput, message: str
) -> None:
    form = replace(form, field="response_format.here")
    engine = make_engine(model)
    for refuse in (lambda: engine.add(wish("r", structured=form)), lambda: check_grammar(form)):
        with pytest.raises(RequestError, match=message) as caught:
            refuse()
        assert caught.value.field == "response_format.here"
    assert answer(engine, wish("r")).finish_reason == "length"


DEEP = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(5000)) + '\nr5000: "x"'
COSTLY = {
    "hours": StructuredOutput.of_json({"type": "integer", "multipleOf": 999_983}),
    "a stack of 5000 levels": StructuredOutput("grammar", DEEP),
    "slow tokens": StructuredOutput("regex", "(a{1000}){1000}"),
    "properties": StructuredOutput.of_json(
        {"properties": {f"p{i}": {"type": "string"} for i in range(6000)}}
    ),
}


@pytest.mark.parametrize("kind", COSTLY)
def test_a_form_that_takes_too_much_is_refused_in_seconds(kind: str) -> None:
    tokenizer = qwen_tokenizer()
    grammars = Grammars(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    started_s = time.monotonic()
    compiling = grammars.begin(COSTLY[kind])
    assert grammars.begin(COSTLY[kind]) is compiling, "equal forms are compiled once"
    good = grammars.begin(FORMS["regex"])
    with pytest.raises(RequestError, match=r"structured cannot be compiled: .+; change it"):
        grammars.compiled(COSTLY[kind], compiling)
    assert grammars.compiled(FORMS["regex"], good).start()
    assert time.monotonic() - started_s < 40, "three seconds of a processor that others use too"
    assert grammars.begin(COSTLY[kind]).done(), "what was refused is not tried again"
    grammars.close()


def test_too_many_new_forms_at_once_are_told_to_come_later() -> None:
    tokenizer = qwen_tokenizer()
    grammars = Grammars(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    grammars.compile(FORMS["regex"])
    forms = [StructuredOutput("regex", f"a{{{number + 1}}}") for number in range(100)]
    with pytest.raises(EngineBusy, match="send it again later"):
        list(map(grammars.begin, forms))
    assert grammars.begin(FORMS["regex"]).done(), "known ones do not wait"
    grammars.close()


def test_the_process_that_tries_forms_out_is_started_again() -> None:
    trial = FormTrial()
    trial.start().kill()
    with pytest.raises(EngineStopped, match="cannot be tried out now"):
        trial.check(FORMS["schema"])
    trial.check(FORMS["schema"])
    process = trial.start()
    trial.close()
    assert process.poll() is not None


@pytest.mark.parametrize(
    ("kind", "value"), [("xml", "a"), ("regex", ""), ("regex", 3), ("choice", "[]"), ("json", "x" * 200_001)]
)
def test_a_form_with_a_bad_value_names_its_field(kind: Any, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutput(kind, value, "here")
    assert caught.value.field == "here"


def test_no_special_token_and_no_padding_inside_a_text() -> None:
    tokenizer = qwen_tokenizer()
    grammars = Grammars(tokenizer, len(tokenizer) + 40, frozenset({tokenizer.eos_token_id, 10**6}))
    matcher = grammars.compile(StructuredOutput.of_json({"type": "string"})).start()
    quote = tokenizer.convert_tokens_to_ids('"')
    row = torch.zeros(len(tokenizer) + 48)
    matcher.edit(row)
    assert row[quote] == 0
    assert not matcher.accept(quote)
    row = torch.zeros(len(tokenizer) + 48)
    matcher.edit(row)
    assert (row == 0).sum() > 200
    assert torch.isinf(row[[tokenizer.convert_tokens_to_ids("<|im_start|>"), tokenizer.eos_token_id]]).all()
    assert torch.isinf(row[len(tokenizer) :]).all()
    assert matcher.accept(quote)


def test_json_is_laid_out_in_one_line_unless_its_schema_says_otherwise() -> None:
    tokenizer = qwen_tokenizer()
    grammars = Grammars(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    brace, line = (tokenizer.convert_tokens_to_ids(piece) for piece in ("{", "Ċ"))

    def may_break(schema: dict[str, Any]) -> bool:
        matcher = grammars.compile(StructuredOutput.of_json(schema)).start()
        matcher.accept(brace)
        row = torch.zeros(len(tokenizer))
        matcher.edit(row)
        return bool(row[line] == 0)

    assert not may_break({})
    assert not may_break(SCHEMA)
    assert may_break({**SCHEMA, "x-guidance": {"whitespace_flexible": True}})


def test_matchers_of_one_form_are_apart() -> None:
    tokenizer = qwen_tokenizer()
    grammars = Grammars(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    form = StructuredOutput("regex", "ab")
    a, b = tokenizer("a")["input_ids"][0], tokenizer("b")["input_ids"][0]
    first = grammars.compile(form).start()
    assert not first.accept(a)
    assert first.accept(b)
    second = grammars.compile(form).start()
    row = torch.zeros(len(tokenizer))
    second.edit(row)
    assert row[a] == 0
