import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from queues import EmbeddedServer, JobConsumer, JobProducer, Outage, QueueUnavailable, ResultReader
from tests.queues.helpers import FAST, PATIENCE_S, kill_server, make_job, queue_records, wait_until_async


class Proxy:
    """A TCP way to the server that can die silently: connections stay open, nothing passes."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._socket = urlsplit(server.url).path
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_dead = asyncio.Event()
        self.accepts = True

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def die(self) -> None:
        """Everything open now, and all that connects until `revive`, is a black hole for ever."""
        self._is_dead.set()

    def revive(self) -> None:
        self._is_dead = asyncio.Event()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_dead = self._is_dead
        theirs_in, theirs_out = await asyncio.open_unix_connection(self._socket)
        for pair in ((reader, theirs_out), (theirs_in, writer)):
            self._tasks.add(asyncio.create_task(self._pump(*pair, is_dead)))

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_dead: asyncio.Event
    ) -> None:
        try:
            while data := await reader.read(65536):
                if is_dead.is_set():
                    continue
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def proxy(server: EmbeddedServer) -> AsyncIterator[Proxy]:
    opened = Proxy(server)
    await opened.start()
    yield opened
    await opened.close()


async def test_a_server_that_restarts_empty(
    server: EmbeddedServer,
    producer: JobProducer,
    consumer: JobConsumer,
    reader: ResultReader,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Q6: health goes red and green again, all parts recover by themselves, the log stays short."""
    producer.put(make_job("before"))
    [in_hand] = await consumer.take(1)
    started = time.monotonic()
    kill_server(server)

    finishing = asyncio.create_task(consumer.finish(in_hand, b"late"))
    reading = asyncio.create_task(reader.read("0-0", block_ms=1e3 * PATIENCE_S))
    while consumer.is_healthy:
        assert await consumer.take(1, block_ms=100) == []
        with pytest.raises(QueueUnavailable):
            producer.put(make_job("lost"))
        assert time.monotonic() - started < PATIENCE_S
    assert not finishing.done()

    assert server.ensure_running()
    deliveries = []
    while not deliveries:
        with_retry = asyncio.to_thread(producer.put, make_job("after"))
        try:
            await with_retry
        except QueueUnavailable:
            await asyncio.sleep(0.05)
        deliveries = await consumer.take(1, block_ms=500)
        assert time.monotonic() - started < PATIENCE_S
    assert await consumer.finish(deliveries[0], b"result")
    assert await finishing
    results = await reading
    results += await reader.read(results[-1].entry_id, block_ms=2_000) if len(results) < 2 else []
    assert {result.body for result in results} == {b"late", b"result"}
    await wait_until_async(lambda: consumer.is_healthy)
    lines = queue_records(caplog.records)
    assert 1 <= len(lines) <= 3 + (time.monotonic() - started)
    assert all(server.url not in line.getMessage() or "@" not in line.getMessage() for line in lines)


async def test_a_connection_that_is_silently_dead(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    """Q7: reads end in time, health tells the silence, new connections are made as soon as they work."""
    config = replace(FAST, max_block_s=0.2, read_margin_s=0.3, command_timeout_s=0.5)
    producer = await asyncio.to_thread(JobProducer, proxy.url, config)
    async with JobConsumer(proxy.url, config) as consumer:
        await asyncio.to_thread(producer.put, make_job("a"))
        assert len(await consumer.take(1, 20_000)) == 1
        proxy.die()
        started = time.monotonic()
        assert await consumer.take(1, block_ms=200) == []
        assert time.monotonic() - started < PATIENCE_S
        while consumer.is_healthy:
            await consumer.take(1, block_ms=200)
            assert time.monotonic() - started < PATIENCE_S
        with pytest.raises(QueueUnavailable, match="Timeout"):
            producer.put(make_job("b"))
        told = ""
        while "a moment ago" not in told:  # at once, unless the pause after a failure is over already
            with pytest.raises(QueueUnavailable) as failed:
                producer.put(make_job("b"))
            told = str(failed.value)
        assert consumer.outage.silent_s > 1.0
        proxy.revive()
        await wait_until_async(lambda: not producer.outage.delay_s)
        while not await _is_put(producer, "c"):
            await asyncio.sleep(0.05)
        taken = []
        while "c" not in taken:
            taken += [delivery.job.job_id for delivery in await consumer.take(4, 500)]
            assert time.monotonic() - started < PATIENCE_S
        assert consumer.is_healthy
    producer.close()
    assert len(queue_records(caplog.records)) < 10


async def _is_put(producer: JobProducer, job_id: str) -> bool:
    try:
        await asyncio.to_thread(producer.put, make_job(job_id))
    except QueueUnavailable:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("server", ["valkey"], indirect=True)  # the timeout is the client's
async def test_idle_for_longer_than_the_clients_default_timeout(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Q8: reads that block for longer than redis-py's 5 s neither fail nor log."""
    caplog.set_level(logging.DEBUG, "queues")
    config = replace(FAST, max_block_s=5.5)
    async with JobConsumer(server.url, config) as consumer, ResultReader(server.url, config) as reader:
        started = time.monotonic()
        taken, results = await asyncio.gather(consumer.take(1, 5_500), reader.read("0-0", 5_500))
        assert (taken, results) == ([], [])
        assert time.monotonic() - started > 5.4
        assert consumer.is_healthy
        assert consumer.outage.num_failures == reader.outage.num_failures == 0
    assert queue_records(caplog.records) == []


def test_an_outage_is_logged_at_its_start_and_end(caplog: pytest.LogCaptureFixture) -> None:
    """Q6: a thousand failures are two lines; no password is in them."""
    outage = Outage("redis://user:secret@host:1")
    for _ in range(1000):
        outage.bad(ConnectionError("refused"))
    assert 0 < outage.delay_s <= 2.0
    outage.good()
    assert outage.delay_s == 0
    outage.good()
    lines = [record.getMessage() for record in queue_records(caplog.records)]
    assert len(lines) == 2
    assert "redis://host:1 fails (1 in a row): refused" in lines[0]
    assert "answers again" in lines[1]


async def test_nobody_there_at_the_start_is_a_clear_error() -> None:
    reached = r"queue at redis://127.0.0.1:\d+ cannot be reached"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"redis://:secret@127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(QueueUnavailable, match=reached) as caught:
            JobProducer(url, FAST)
        assert "secret" not in str(caught.value)
        with pytest.raises(QueueUnavailable):
            async with JobConsumer(url, FAST):
                pass
