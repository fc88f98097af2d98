"""A producer and a worker that run until they are killed."""

import asyncio
import itertools
import time
from dataclasses import replace
from multiprocessing.connection import Connection

from queues import JobConsumer, JobProducer
from tests.queues.helpers import FAST, make_job

CONFIG = replace(FAST, visibility_s=0.6, max_deliveries=1000, result_max_len=1_000_000, max_len=100_000)


def produce(url: str, name: str, first: int, told: Connection) -> None:
    """Put `name-first`, `name-(first+1)`, …; `told` gets each number once `put` has returned."""
    with JobProducer(url, CONFIG) as producer:
        for number in itertools.count(first):
            producer.put(make_job(f"{name}-{number}", size=5000))
            told.send_bytes(b"%d" % number)
            # why: a backlog would only make the end of the test longer.
            time.sleep(0.005)


def work(url: str, told: Connection) -> None:
    """Take and answer jobs, several at once; `told` hears of each."""
    asyncio.run(_work(url, told))


async def _work(url: str, told: Connection) -> None:
    async with JobConsumer(url, CONFIG) as consumer:
        while True:
            for delivery in await consumer.take(3, 200):
                await consumer.finish(delivery, delivery.job.job_id.encode())
                told.send_bytes(b"1")
