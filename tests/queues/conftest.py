"""The suite runs on each real server that is here: the bundled Valkey and, where installed, Redis."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from queues import EmbeddedServer, JobConsumer, JobProducer, ResultReader
from tests.queues.helpers import FAST
from tests.queues.servers import binary_of


@pytest.fixture(params=["valkey", "redis"])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(Path(binary_of(request.param))) as running:
        yield running


@pytest.fixture
def producer(server: EmbeddedServer) -> Iterator[JobProducer]:
    with JobProducer(server.url, FAST) as opened:
        yield opened


@pytest.fixture
async def consumer(server: EmbeddedServer) -> AsyncIterator[JobConsumer]:
    async with JobConsumer(server.url, FAST) as opened:
        yield opened


@pytest.fixture
async def reader(server: EmbeddedServer) -> AsyncIterator[ResultReader]:
    async with ResultReader(server.url, FAST) as opened:
        yield opened
