"""Peers that send nothing, or half of it, or read nothing: none is waited for without end."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest

from appliance.api import connections
from appliance.api.connections import Patience
from tests.appliance.api.serving import MODEL, PATIENCE_S, Running, Servers, is_idle, wait_until

Connect = Callable[..., socket.socket]
HASTY = Patience(head_s=1.0, idle_s=1.0, body_s=1.0, reader_s=1.0)
HEAD = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 4000,
    "ignore_eos": True,
}


@pytest.fixture
def hasty(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(connections, "_LOOK_EVERY_S", 0.1)
    running = servers.start(patience=HASTY)
    yield running
    servers.stop(running)


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens connections to a server, on which some bytes have been sent."""
    with ExitStack() as stack:

        def connected(server: Running, data: bytes = b"") -> socket.socket:
            host, port = server.url.removeprefix("http://").split(":")
            connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
            stack.enter_context(connection).sendall(data)
            return connection

        yield connected


def closed_after(connection: socket.socket, drip: bytes = b"") -> float:
    """Seconds until the server closes, while `drip` is sent again and again."""
    started = time.monotonic()
    connection.settimeout(0.2)
    while time.monotonic() - started < PATIENCE_S:
        try:
            if drip:
                connection.sendall(drip)
                time.sleep(0.1)
            if not connection.recv(65536):
                return time.monotonic() - started
        except TimeoutError:
            continue
        except OSError:
            return time.monotonic() - started
    raise AssertionError("the connection stayed open")


@pytest.mark.parametrize(
    ("begin", "drip"),
    [
        (b"", b""),
        (HEAD, b""),
        (HEAD, b"X-A: b\r\n"),
        (HEAD + b"\r\n" + HEAD, b""),
        (HEAD + b"\r\n" + HEAD, b"X-A: b\r\n"),
        (HEAD + b"Content-Length: 100000\r\n\r\n", b"x"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n{", b" "),
    ],
)
def test_who_sends_half_is_left(hasty: Running, connect: Connect, begin: bytes, drip: bytes) -> None:
    usual = Patience()
    assert closed_after(connect(hasty, begin), drip) < min(usual.head_s, usual.idle_s, usual.body_s)
    wait_until(lambda: hasty.services.num_chats == 0, "a free place")


def test_who_reads_nothing_is_left(hasty: Running, connect: Connect) -> None:
    """A chat whose reader takes nothing ends, with its place among the chats."""
    body = json.dumps(CHAT | {"stream": True, "n": 8, "logprobs": True, "top_logprobs": 20}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = connect(hasty)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sendall(head.encode() + body)
    wait_until(lambda: hasty.services.num_chats == 1, "a running chat")
    wait_until(lambda: hasty.services.num_chats == 0, "the end of the chat")
    wait_until(lambda: is_idle(hasty.engine), "an idle engine")


def test_streams_and_chats_that_are_read_go_on(hasty: Running) -> None:
    """Longer than anybody is waited for."""
    with httpx.Client(base_url=hasty.url, timeout=60) as client:
        events = {"Accept": "text/event-stream"}
        with client.stream("GET", "/v1/events", headers=events) as stream:
            pieces = stream.iter_raw()
            assert next(pieces).startswith(b"retry")
            time.sleep(2.5 * HASTY.idle_s)
            assert len(hasty.server.server_state.connections) == 1
            assert client.get("/v1/models").status_code == 200


def test_who_asks_nothing_makes_room_and_then_there_is_a_503(servers: Servers, connect: Connect) -> None:
    server = servers.start(patience=Patience(max_connections=4))
    quiet = [connect(server) for _ in range(4)]
    assert httpx.get(f"{server.url}/v1/models").status_code == 200
    events = HEAD.replace(b"models", b"events") + b"Accept: text/event-stream\r\n\r\n"
    streams = [connect(server, events) for _ in range(4)]
    for stream in streams:
        assert stream.recv(100).startswith(b"HTTP/1.1 200")
    reply = httpx.get(f"{server.url}/v1/models")
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "overloaded"
    assert "all 4 connections are taken" in reply.json()["error"]["message"]
    for connection in [*quiet, *streams]:
        connection.close()
    wait_until(lambda: not server.server.server_state.connections, "no connections")
    assert httpx.get(f"{server.url}/v1/models").status_code == 200
    servers.stop(server)
