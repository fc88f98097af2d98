"""A server that is about to end: no new chat, those that run may come to their end, the others are told."""

import asyncio
import json
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from tests.appliance.api.serving import PATIENCE_S, Running, Servers, held_steps, wait_until
from tests.appliance.api.test_chat_failures import ENDLESS


@pytest.fixture
def server(servers: Servers) -> Iterator[Running]:
    running = servers.start()
    yield running
    servers.stop(running)


def post(server: Running, **parts: object) -> httpx.Response:
    url = f"{server.base_url}/chat/completions"
    return httpx.post(url, json=ENDLESS | parts, timeout=PATIENCE_S)


@pytest.mark.parametrize("stream", [True, False])
def test_a_chat_that_takes_too_long_is_told(
    servers: Servers, server: Running, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """That the server ends, and not that the engine failed."""
    with ThreadPoolExecutor() as pool:
        running = pool.submit(post, server, stream=stream)
        wait_until(lambda: server.engine.stats().num_running == 1, "a running chat")
        assert servers.thread.call(server.services.end_chats(0.2)) == 1
        answer = running.result(PATIENCE_S)

    text = answer.text.split("data: ")[-1] if stream else answer.text
    assert json.loads(text)["error"]["code"] == "shutting_down"
    assert stream or (answer.status_code, answer.headers["Retry-After"]) == (503, "10")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_chat_may_come_to_its_end_and_no_other_begins(servers: Servers, server: Running) -> None:
    with ThreadPoolExecutor() as pool:
        with held_steps(server.engine):
            running = pool.submit(post, server, max_tokens=20)
            wait_until(lambda: server.engine.stats().num_running == 1, "a running chat")
            ended: Future[int] = asyncio.run_coroutine_threadsafe(
                server.services.end_chats(PATIENCE_S), servers.thread.loop
            )
            wait_until(lambda: server.services.is_closing, "the end")
            refused, health = post(server), httpx.get(f"{server.url}/health")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert refused.headers["Retry-After"] == "10"
            assert (health.status_code, "shutting down" in str(health.json()["reasons"])) == (503, True)
        assert running.result(PATIENCE_S).json()["choices"][0]["finish_reason"] == "length"
        assert ended.result(PATIENCE_S) == 0
