"""Clients that go, engines that fail, more chats than there are places."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from appliance.api import ApiLimits, pictures
from tests.appliance.api.serving import MODEL, PATIENCE_S, Running, Servers, is_idle, wait_until
from tests.appliance.pictures import data_uri, encoded, quadrants

ENDLESS: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 4000,
    "ignore_eos": True,
}


def wire(server: Running, body: bytes, *, num_announced: int | None = None) -> bytes:
    """A chat request as it goes over the wire."""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {server.url.removeprefix('http://')}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {num_announced or len(body)}\r\n\r\n"
    )
    return head.encode() + body


def post(server: Running, body: bytes, *, num_announced: int | None = None) -> socket.socket:
    """A connection on which a chat request was sent, all of it or a part."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(wire(server, body, num_announced=num_announced))
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_ends_its_request(server: Running, stream: bool) -> None:
    """A1: streaming or not, the sequence is aborted and its blocks are free."""
    connection = post(server, json.dumps(ENDLESS | {"stream": stream}).encode())
    if stream:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    wait_until(lambda: server.engine.stats().num_running == 1, "a running chat")
    connection.close()
    wait_until(lambda: is_idle(server.engine), "an idle engine")
    wait_until(lambda: server.services.num_chats == 0, "a free place")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_before_the_first_token(
    server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A1: during prefill, when nothing has been sent and so nothing can fail to be sent."""
    runner = server.engine.engine.runner
    execute, steps = runner.execute, list[int]()

    def slow(plan: Any) -> Any:
        time.sleep(0.2)
        steps.append(1)
        return execute(plan)

    monkeypatch.setattr(runner, "execute", slow)
    prompt = "wait " * 400  # some 1,600 tokens, so four steps before the first token
    body = ENDLESS | {"messages": [{"role": "user", "content": prompt}], "stream": stream}
    connection = post(server, json.dumps(body).encode())
    wait_until(lambda: bool(steps), "a step")
    connection.close()
    wait_until(lambda: is_idle(server.engine), "an idle engine")
    assert len(steps) < 100
    wait_until(lambda: server.services.num_chats == 0, "a free place")


@pytest.mark.parametrize("waits_for", ["decoding", "room"])
def test_a_client_that_goes_before_the_engine_has_its_picture(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    """A1: its place is free while the picture is decoded, or waits for room; nothing reaches the engine."""
    server = servers.start(limits=ApiLimits(max_chats=1, max_pixels_in_hand=96 * 64))
    begun, may_end = threading.Event(), threading.Event()
    decode = pictures.bytes_from_data_uri

    def slow(*arguments: Any) -> bytes:
        begun.set()
        may_end.wait(PATIENCE_S)
        return decode(*arguments)

    content = [{"type": "image_url", "image_url": {"url": data_uri(encoded(quadrants(96, 64)))}}]
    body = json.dumps(ENDLESS | {"messages": [{"role": "user", "content": content}]}).encode()
    num_before = server.engine.stats().num_running
    if waits_for == "decoding":
        monkeypatch.setattr(pictures, "bytes_from_data_uri", slow)
        connection = post(server, body)
        wait_until(begun.is_set, "decoding")
    else:
        server.services.pixels.num_taken = 1
        connection = post(server, body)
        wait_until(lambda: bool(server.services.pixels._waiting), "one who waits")
    connection.close()
    wait_until(lambda: server.services.num_chats == 0, "a free place")
    assert not may_end.is_set()
    may_end.set()
    if waits_for == "room":
        servers.thread.loop.call_soon_threadsafe(server.services.pixels.give_back, 1)
    wait_until(lambda: server.services.pixels.num_taken == 0, "all room")
    assert (is_idle(server.engine), server.engine.stats().num_running) == (True, num_before)
    monkeypatch.undo()
    again = ENDLESS | {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    assert httpx.post(f"{server.base_url}/chat/completions", json=again, timeout=60).status_code == 200
    servers.stop(server)


def test_closing_a_stream_of_the_sdk(client: OpenAI, server: Running) -> None:
    """A1"""
    stream = client.chat.completions.create(
        model=MODEL,
        messages=ENDLESS["messages"],
        max_tokens=4000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    stream.close()
    wait_until(lambda: is_idle(server.engine), "an idle engine")


def fail(_: Any) -> Any:
    raise RuntimeError("the secret reason")


def test_a_failure_before_the_first_token(
    client: OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A 500 in OpenAI's shape; the reason goes to the log; the next request is answered."""
    with monkeypatch.context() as patch:
        patch.setattr(server.engine.engine.runner, "execute", fail)
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="server's log") as raised:
                client.chat.completions.create(model=MODEL, messages=ENDLESS["messages"], stream=stream)
            assert raised.value.code == "engine_error"
            assert "secret" not in str(raised.value)
    assert "the secret reason" in caplog.text
    assert client.chat.completions.create(model=MODEL, messages=ENDLESS["messages"], max_tokens=1).choices


def test_a_failure_in_the_middle_of_a_stream(
    client: OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error event that the SDK raises, never a stream that looks complete."""
    stream = client.chat.completions.create(
        model=MODEL,
        messages=ENDLESS["messages"],
        max_tokens=4000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = iter(stream)
    next(chunks)
    monkeypatch.setattr(server.engine.engine.runner, "execute", fail)
    with pytest.raises(openai.APIError, match="the engine failed on this request"):
        for _ in chunks:
            pass
    monkeypatch.undo()
    wait_until(lambda: is_idle(server.engine), "an idle engine")


def test_a_failed_stream_ends_without_done(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=ENDLESS | {"stream": True}, timeout=60
    ) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        next(lines)
        monkeypatch.setattr(server.engine.engine.runner, "execute", fail)
        data = [json.loads(line[6:]) for line in lines if line]
    assert data[-1]["error"]["type"] == "server_error"
    assert set(data[-1]["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_does_not_answer_any_more(server: Running, stream: bool) -> None:
    """What ends because of the engine, and not of the request, is a 503 to be sent again, with the reason."""
    engine = server.engine
    with ThreadPoolExecutor(1) as pool:
        url, body = f"{server.url}/v1/chat/completions", ENDLESS | {"stream": stream}
        asking = pool.submit(httpx.post, url, json=body, timeout=60)
        wait_until(lambda: engine.stats().num_running == 1, "a running chat")
        engine._loop.call_soon_threadsafe(engine._streams.end_all, "no sign of life for 30 s")
        reply = asking.result()
    engine._call(lambda inner: inner.abort(inner._requests.ids[0]) and None)
    error = json.loads(reply.text.split("data: ")[-1])["error"]
    assert (error["code"], error["type"]) == ("engine_unavailable", "server_error")
    assert error["message"] == "the engine does not answer: no sign of life for 30 s"
    assert "[DONE]" not in reply.text
    assert stream or (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    wait_until(lambda: is_idle(engine), "an idle engine")


@pytest.fixture
def crowded(servers: Servers) -> Iterator[Running]:
    """A server all of whose 64 places are taken."""
    server = servers.start()
    with ExitStack() as places:
        for _ in range(64):
            places.enter_context(server.services.chat_slot())
        yield server
    assert (
        httpx.post(f"{server.url}/v1/chat/completions", json=ENDLESS | {"max_tokens": 1}).status_code == 200
    )
    servers.stop(server)


async def test_a_thousand_over_the_limit(crowded: Running) -> None:
    """A6: refused within milliseconds each, before the image is looked at (that would be a 400)."""
    content = [{"type": "image_url", "image_url": {"url": data_uri(b"no image" * 1000)}}]
    request = wire(
        crowded, json.dumps(ENDLESS | {"messages": [{"role": "user", "content": content}]}).encode()
    )
    host, port = crowded.url.removeprefix("http://").split(":")

    async def refused() -> bytes:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        reply = await reader.readuntil(b"}}")
        writer.close()
        return reply

    # why: processor time of both sides, so that a busy machine changes nothing
    started = time.process_time()
    replies = await asyncio.gather(*(refused() for _ in range(1000)))
    assert (time.process_time() - started) / 1000 < 0.05, "about 1 ms"
    for reply in replies:
        head, _, body = reply.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1\r\nretry-after-ms: 1000" in head
        assert json.loads(body)["error"]["code"] == "overloaded"
    assert httpx.get(f"{crowded.url}/health").status_code == 200


def test_who_has_sent_half_has_no_place(servers: Servers) -> None:
    server = servers.start(limits=ApiLimits(max_chats=1))
    half = [post(server, b'{"model"', num_announced=1000) for _ in range(4)]
    body = ENDLESS | {"max_tokens": 1}
    assert httpx.post(f"{server.base_url}/chat/completions", json=body).status_code == 200
    for connection in half:
        connection.close()
    servers.stop(server)


def test_a_slow_body_is_given_up(servers: Servers) -> None:
    server = servers.start(limits=ApiLimits(body_timeout_s=0.2))
    connection = post(server, b'{"model"', num_announced=1000)
    assert b"408" in connection.recv(4096)
    connection.close()
    assert server.services.num_chats == 0
    servers.stop(server)


def test_decoding_does_not_hold_up_the_others(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a picture is decoded, /health answers."""
    server = servers.start()
    decoding, answered = threading.Event(), threading.Event()

    def slow(*_: Any) -> Any:
        decoding.set()
        answered.wait(PATIENCE_S)
        raise RuntimeError("never mind")

    monkeypatch.setattr("appliance.api.pictures.bytes_from_data_uri", slow)
    content = [{"type": "image_url", "image_url": {"url": data_uri(b"x")}}]
    body = json.dumps(ENDLESS | {"messages": [{"role": "user", "content": content}]}).encode()
    with post(server, body):
        wait_until(decoding.is_set, "decoding")
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S / 2).status_code == 200
        answered.set()
    servers.stop(server)
