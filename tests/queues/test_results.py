import asyncio
from dataclasses import replace

from queues import EmbeddedServer, JobConsumer, JobProducer, ResultReader
from tests.queues.helpers import FAST, make_job, raw_client, wait_until_async


async def _answer(producer: JobProducer, consumer: JobConsumer, job_id: str) -> None:
    await asyncio.to_thread(producer.put, make_job(job_id))
    [delivery] = await consumer.take(1)
    await consumer.finish(delivery, job_id.encode())


async def test_readers_follow_all_results(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer, reader: ResultReader
) -> None:
    """Each reader sees each result once, continuing after the last entry that it read."""
    assert await reader.last_id() == "0-0"
    for name in ("a", "b", "c"):
        await _answer(producer, consumer, name)
    first = await reader.read("0-0", max_results=2)
    rest = await reader.read(first[-1].entry_id)
    assert [result.job_id for result in first + rest] == ["a", "b", "c"]
    assert await reader.last_id() == rest[-1].entry_id
    assert await reader.read(rest[-1].entry_id, block_ms=0) == []
    async with ResultReader(server.url, FAST) as other:
        assert len(await other.read("0-0")) == 3


async def test_a_waiting_reader_wakes_up(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer, reader: ResultReader
) -> None:
    reading = asyncio.create_task(reader.read("0-0", block_ms=20_000))
    with raw_client(server) as client:
        await wait_until_async(lambda: client.info("clients")["blocked_clients"] == 1)
    await _answer(producer, consumer, "a")
    assert [result.body for result in await reading] == [b"a"]


async def test_results_are_bounded(server: EmbeddedServer) -> None:
    """The stream of results is cut near `result_max_len`; the newest stay."""
    config = replace(FAST, result_max_len=10)
    with JobProducer(server.url, config) as producer, raw_client(server) as client:
        async with JobConsumer(server.url, config) as consumer:
            for number in range(150):
                await _answer(producer, consumer, f"{number}")
        assert 10 <= client.xlen(config.results) <= 110
        [(_, newest)] = client.xrevrange(config.results, count=1)
    assert newest[b"job_id"] == b"149"
