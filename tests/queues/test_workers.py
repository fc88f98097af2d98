import asyncio
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

from queues import EmbeddedServer, JobConsumer, JobProducer, Result, ResultReader
from tests.queues.helpers import FAST, PATIENCE_S, make_job
from tests.queues.worker import CONFIG

ROOT = Path(__file__).resolve().parents[2]


def start_worker(server: EmbeddedServer, seconds: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.queues.worker", server.url, str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def kill(worker: "subprocess.Popen[str]") -> None:
    worker.kill()
    worker.wait()
    assert worker.stdout
    worker.stdout.close()


async def collect(reader: ResultReader, number: int, timeout_s: float = PATIENCE_S) -> list[Result]:
    """The results until there are `number` of them, and what comes within half a second after."""
    results: list[Result] = []
    async with asyncio.timeout(timeout_s):
        while len(results) < number:
            results += await reader.read(results[-1].entry_id if results else "0-0")
    return results + await reader.read(results[-1].entry_id, 500)


async def test_a_worker_killed_in_the_middle_of_a_job(
    server: EmbeddedServer, producer: JobProducer, reader: ResultReader
) -> None:
    """Q2: kill -9; another worker finishes the job, there is one result."""
    producer.put(make_job("a"))
    victim = start_worker(server, seconds=600)
    assert victim.stdout
    assert await asyncio.to_thread(victim.stdout.readline) == "a\n"
    kill(victim)
    async with JobConsumer(server.url, FAST) as consumer:
        [delivery] = await consumer.take(1, 20_000)
        assert delivery.times_delivered == 2
        assert await consumer.finish(delivery, b"result")
        assert [result.body for result in await collect(reader, 1)] == [b"result"]
        assert (await consumer.status()).is_idle


async def test_workers_killed_again_and_again(
    server: EmbeddedServer, producer: JobProducer, reader: ResultReader
) -> None:
    """Q2, Q5: three workers, one killed after every few jobs; in the end each job has one result."""
    names, has_enough = list[str](), threading.Event()

    def keep_busy() -> None:
        # why: what all have to do must not end before the last is killed, however long its start takes
        while not has_enough.wait(0.02):
            if producer.status().depth < 12:
                names.append(f"{len(names)}")
                producer.put(make_job(names[-1]))

    workers = [start_worker(server, seconds=0.05) for _ in range(3)]
    putting, choice = asyncio.create_task(asyncio.to_thread(keep_busy)), random.Random(7)
    try:
        for _ in range(4):
            index = choice.randrange(len(workers))
            output = workers[index].stdout
            assert output
            for _ in range(3):
                await asyncio.wait_for(asyncio.to_thread(output.readline), PATIENCE_S)
            kill(workers[index])
            workers[index] = start_worker(server, seconds=0.05)
        has_enough.set()
        await putting
        results = await collect(reader, len(names))
    finally:
        has_enough.set()
        for worker in workers:
            kill(worker)
    assert Counter(result.job_id for result in results) == Counter(names)
    status = producer.status()
    assert (status.num_done, status.num_dropped, status.dead) == (len(names), 0, 0)


async def test_many_producers_and_consumers(server: EmbeddedServer, reader: ResultReader) -> None:
    """Q5: six producers that overlap in their ids and five consumers: each id is worked on once."""

    def produce(first: int) -> int:
        with JobProducer(server.url, CONFIG) as producer:
            return sum(producer.put(make_job(f"{n}")) for n in range(first, first + 40))

    worked: Counter[str] = Counter()

    async def consume() -> None:
        async with JobConsumer(server.url, CONFIG) as consumer:
            while len(worked) < 140:
                for delivery in await consumer.take(3, 200):
                    worked[delivery.job.job_id] += 1
                    await consumer.finish(delivery, delivery.job.job_id.encode())

    puts = [asyncio.to_thread(produce, 20 * number) for number in range(6)]
    num_put = asyncio.gather(*puts)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(num_put, *(consume() for _ in range(5)))
    assert sum(await num_put) == 140
    assert set(worked.values()) == {1}
    assert Counter(r.body.decode() for r in await collect_all(reader)) == worked
    assert threading.active_count() < 50


async def collect_all(reader: ResultReader) -> list[Result]:
    results: list[Result] = []
    while batch := await reader.read(results[-1].entry_id if results else "0-0", 300):
        results += batch
    return results
