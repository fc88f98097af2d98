"""A worker process that tests kill: takes jobs, works for a while, answers. Arguments: URL, seconds a job."""

import asyncio
import sys
from dataclasses import replace

from queues import JobConsumer
from tests.queues.helpers import FAST

CONFIG = replace(FAST, max_deliveries=50)


async def work(url: str, seconds: float) -> None:
    async with JobConsumer(url, CONFIG) as consumer:
        while True:
            for delivery in await consumer.take(2):
                print(delivery.job.job_id, flush=True)
                await asyncio.sleep(seconds)
                await consumer.finish(delivery, f"{consumer.name} {delivery.times_delivered}".encode())


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], float(sys.argv[2])))
