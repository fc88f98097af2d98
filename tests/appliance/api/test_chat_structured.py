"""Forms of answers as clients ask for them."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import BadRequestError, InternalServerError, OpenAI
from pydantic import BaseModel

from tests.appliance.api.serving import MODEL
from tests.appliance.api.test_chat import HELLO, answer, streamed, text_of
from vlm_engine import grammar

LONG = {"max_tokens": 120}


def test_choice_regex_and_grammar(client: OpenAI) -> None:
    def ask(**form: Any) -> str:
        return answer(client, HELLO, extra_body={"structured_outputs": form}, **LONG)

    assert ask(choice=["red", "blue"]) in {"red", "blue"}
    assert ask(regex="[0-9]{4}").isdecimal()
    assert ask(grammar='start: "on" | "off"') in {"on", "off"}
    assert isinstance(json.loads(ask(json={"type": "array", "items": {"const": 1}, "maxItems": 2})), list)


class Counts(BaseModel):
    people: int
    seen: bool


def test_the_sdks_own_parsing(client: OpenAI) -> None:
    """`parse` sends a strict schema of the class and reads the answer back into it."""
    reply = client.chat.completions.parse(
        model=MODEL,
        messages=HELLO,
        response_format=Counts,
        temperature=0,
        seed=1,
        logit_bias={},
        **LONG,  # type: ignore[arg-type]
    )
    choice = reply.choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(choice.message.parsed, Counts)


@pytest.mark.parametrize("n", [1, 2])
def test_a_schema_streamed(client: OpenAI, n: int) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    chunks = streamed(client, HELLO, response_format=form, n=n, **LONG)
    for index in range(n):
        mine = [chunk for chunk in chunks if chunk.choices[0].index == index]
        assert set(json.loads(text_of(mine))) == {"ok"}
        assert mine[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("form", ["grammar", "json"])
def test_a_form_that_takes_too_much_is_refused_and_others_go_on(client: OpenAI, form: str) -> None:
    """A thousand levels end a process by its stack, a large divisor takes minutes."""
    rules = "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(3000))
    costly = {
        "grammar": f'start: r0\n{rules}\nr3000: "x"',
        "json": {"multipleOf": 999_983, "type": "integer"},
    }
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(answer, client, HELLO, extra_body={"structured_outputs": {form: costly[form]}})
        assert answer(client, HELLO, max_tokens=4)
        with pytest.raises(BadRequestError, match="cannot be compiled: it takes more than") as caught:
            refused.result()
    assert caught.value.param == f"structured_outputs.{form}"
    assert answer(client, HELLO, max_tokens=4)


def test_more_new_forms_than_can_wait_are_told_to_come_later(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MAX_COMPILING", 0)
    hurried = client.with_options(max_retries=0)
    with pytest.raises(InternalServerError, match="send it again later") as caught:
        answer(hurried, HELLO, extra_body={"structured_outputs": {"regex": "a{1,77}"}})
    assert (caught.value.status_code, caught.value.code) == (503, "engine_busy")
    assert caught.value.response.headers["Retry-After"]
