"""Chat completions as clients use them: the OpenAI SDK and ultralytics' LLM class against the real engine."""

from pathlib import Path
from typing import Any

import cv2
import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI, OpenAI
from ultralytics import LLM

from tests.appliance.api.serving import MODEL, Running, is_idle, wait_until
from tests.appliance.pictures import data_uri, encoded, quadrants

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PICTURE = data_uri(encoded(quadrants(96, 64)))


def look(url: str, text: str = "What is it?") -> list[Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "text", "text": text},
    ]
    return [{"role": "user", "content": parts}]


def answer(client: OpenAI, messages: list[Any], **options: Any) -> str:
    options = {"max_tokens": 8, "temperature": 0} | options
    reply = client.chat.completions.create(model=MODEL, messages=messages, **options)
    return reply.choices[0].message.content or ""


def streamed(client: OpenAI, messages: list[Any], **options: Any) -> list[Any]:
    options = {"max_tokens": 8, "temperature": 0} | options
    return list(client.chat.completions.create(model=MODEL, messages=messages, stream=True, **options))


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_a_whole_answer(client: OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, temperature=0)
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == MODEL
    assert reply._request_id == reply.id
    choice = reply.choices[0]
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content
    usage = reply.usage
    assert usage is not None
    assert usage.completion_tokens == 8
    assert usage.prompt_tokens > 8
    assert usage.total_tokens == usage.prompt_tokens + 8
    assert reply.model_extra is not None
    assert reply.model_extra["timings"]["decode_ms"] > 0


def test_a_streamed_answer_is_the_whole_one(client: OpenAI) -> None:
    chunks = streamed(client, HELLO)
    assert text_of(chunks) == answer(client, HELLO)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_at_the_end_of_a_stream(client: OpenAI) -> None:
    *chunks, last = streamed(client, HELLO, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 8


def test_usage_in_every_chunk(client: OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(client, HELLO, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 8)


def test_a_picture_is_seen(client: OpenAI) -> None:
    """The answer depends on the pixels, and its tokens are counted."""
    reply = client.chat.completions.create(model=MODEL, messages=look(PICTURE), max_tokens=8, temperature=0)
    assert reply.usage is not None
    details = reply.usage.prompt_tokens_details
    assert details is not None
    assert getattr(details, "image_tokens", None) == 6
    other = data_uri(encoded(quadrants(96, 64).rotate(180)))
    assert answer(client, look(PICTURE), max_tokens=24) != answer(client, look(other), max_tokens=24)


def test_a_bare_string_as_image_url(client: OpenAI) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": PICTURE}]}]
    assert answer(client, messages)


@pytest.mark.parametrize(
    "part",
    [{"type": "camera", "camera": "street"}, {"type": "image_url", "image_url": {"url": "camera://street"}}],
)
def test_a_cameras_newest_frame_is_seen(client: OpenAI, server: Running, part: dict[str, Any]) -> None:
    frame = data_uri(server.cameras.frames["street"], "image/jpeg")
    content = [part, {"type": "text", "text": "What is it?"}]
    by_camera = answer(client, [{"role": "user", "content": content}], max_tokens=24)
    assert by_camera == answer(client, look(frame), max_tokens=24)


def test_roles(client: OpenAI) -> None:
    """`developer` is the newer name of `system`; what was said before counts."""
    system = answer(client, [{"role": "system", "content": "Be short."}, *HELLO])
    developer = answer(client, [{"role": "developer", "content": "Be short."}, *HELLO])
    parts = [{"type": "text", "text": "Be short."}]
    assert system == developer == answer(client, [{"role": "system", "content": parts}, *HELLO])
    assert system != answer(client, HELLO)
    assert answer(client, [*HELLO, {"role": "assistant", "content": "Hi."}, *HELLO]) != answer(client, HELLO)


def test_stop_strings(client: OpenAI) -> None:
    whole = answer(client, HELLO, max_tokens=24)
    stop = whole[5:7]
    reply = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=24, temperature=0, stop=[stop, "never"]
    )
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].message.content == whole[: whole.index(stop)]
    assert answer(client, HELLO, max_tokens=24, stop=stop) == whole[: whole.index(stop)]


def test_seed_temperature_and_the_cuts(client: OpenAI) -> None:
    hot = {"temperature": 1.5, "max_tokens": 16}
    assert answer(client, HELLO, seed=1, **hot) == answer(client, HELLO, seed=1, **hot)
    assert len({answer(client, HELLO, seed=seed, **hot) for seed in range(4)}) > 1
    greedy = answer(client, HELLO, max_tokens=16)
    assert answer(client, HELLO, extra_body={"top_k": 1}, **hot) == greedy
    assert answer(client, HELLO, top_p=1e-9, **hot) == greedy


def test_the_newer_name_of_max_tokens_wins(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_completion_tokens=3, max_tokens=9, extra_body={"ignore_eos": True}
    )
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3


@pytest.mark.parametrize(("priority", "kind"), [(10, "background"), (0, "interactive"), (-1, "interactive")])
def test_a_priority_above_zero_is_background_work(
    client: OpenAI, server: Running, priority: int, kind: Any
) -> None:
    def num_tokens() -> int:
        return server.engine.stats().classes[kind].generation_tokens

    before = num_tokens()
    assert answer(client, HELLO, extra_body={"priority": priority}) == answer(client, HELLO)
    wait_until(lambda: num_tokens() >= before + 8, "the work of its class")


def test_fields_that_change_nothing_are_accepted(client: OpenAI) -> None:
    assert answer(
        client,
        [{"role": "user", "content": "hello", "name": "john"}],
        user="john",
        metadata={"a": "b"},
        store=False,
        parallel_tool_calls=True,
        n=1,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        logprobs=False,
        frequency_penalty=0,
        presence_penalty=0,
        logit_bias={},
        service_tier="auto",
    ) == answer(client, HELLO)


def test_an_alias_is_answered_under_that_name(client: OpenAI) -> None:
    reply = client.chat.completions.create(model="other-name", messages=HELLO, max_tokens=1)
    assert reply.model == "other-name"


async def test_many_chats_at_once(server: Running) -> None:
    """Each gets its own answer, which is the answer that it gets alone."""
    async with AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:

        async def ask(number: int) -> str:
            messages: list[Any] = [{"role": "user", "content": f"number {number}"}]
            reply = await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=8, temperature=0
            )
            return reply.choices[0].message.content or ""

        import asyncio

        together = await asyncio.gather(*(ask(number) for number in range(12)))
        assert together == [await ask(number) for number in range(12)]
    assert len(set(together)) > 6
    wait_until(lambda: is_idle(server.engine), "an idle engine")


def test_the_wire_format_of_a_stream(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 2, "stream": True}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-store"
    lines = reply.text.split("\n\n")
    assert all(line.startswith("data: {") for line in lines[:-2])
    assert lines[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("is_streaming", [False, True])
def test_ultralytics_llm(server: Running, is_streaming: bool, tmp_path: Path) -> None:
    llm = LLM(MODEL, api="chat.completions", base_url=server.base_url, api_key="none", max_tokens=8)

    def text(reply: Any) -> str:
        return text_of(list(reply)) if is_streaming else reply.choices[0].message.content

    picture = tmp_path / "picture.png"
    cv2.imwrite(str(picture), np.asarray(quadrants(96, 64))[..., ::-1])
    options = {"stream": is_streaming, "temperature": 0}
    assert text(llm("What is YOLO?", **options))
    by_path = text(llm("Describe it.", image=str(picture), **options))
    assert by_path
    assert by_path == text(llm("Describe it.", image=cv2.imread(str(picture)), **options))


async def test_ultralytics_llm_asynchronously(server: Running) -> None:
    llm = LLM(MODEL, api="chat.completions", base_url=server.base_url, api_key="none", max_tokens=4)
    reply = await llm.async_call("hello", image=np.asarray(quadrants(96, 64)))
    assert reply.choices[0].message.content is not None
    await llm.async_client.close()
