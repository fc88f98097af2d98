"""One engine and one plain server for all tests of the API; special servers are made by `servers.start`."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.appliance.api.serving import LoopThread, Running, Servers, start_engine


@pytest.fixture(scope="session")
def servers(qwen3_vl_checkpoint: Path) -> Iterator[Servers]:
    thread = LoopThread()
    engine = start_engine(thread, str(qwen3_vl_checkpoint))
    servers = Servers(engine, thread)
    yield servers
    servers.close()
    thread.call(engine.close())
    thread.close()


@pytest.fixture(scope="session")
def server(servers: Servers) -> Running:
    return servers.start()


@pytest.fixture
def own_server(servers: Servers) -> Iterator[Running]:
    """A server with an event store of its own."""
    running = servers.start()
    yield running
    servers.stop(running)


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http
