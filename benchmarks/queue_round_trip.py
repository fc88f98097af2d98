"""How long a job is on its way: one process puts jobs of 100 KB, this one takes and finishes them.

    python benchmarks/queue_round_trip.py [--jobs 500] [--rate 50] [--size 100000] [--url redis://…]

Writes one JSON object to standard output; times in milliseconds, by the clock that both processes share.
`steady` is at the given rate; `as_fast_as_possible` fills the queue, so its way is mostly waiting.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import nullcontext

from queues import EmbeddedServer, Job, JobConsumer, JobProducer, QueueConfig

CONFIG = QueueConfig(stream="benchmark:jobs", when_full="wait", max_bytes=64 * 2**20)


def produce(url: str, jobs: int, rate: float, size: int) -> None:
    """Put `jobs` jobs, `rate` a second (0: as fast as it goes); prints the times of the puts."""
    put_ms = []
    with JobProducer(url, CONFIG) as producer:
        start = time.monotonic()
        for number in range(jobs):
            if rate:
                time.sleep(max(0.0, start + number / rate - time.monotonic()))
            body = os.urandom(size)
            before = time.time()
            producer.put(Job(f"{os.getpid()}-{number}", "cam", body, created_at=before))
            put_ms.append((time.time() - before) * 1000)
    json.dump(put_ms, sys.stdout)


async def consume(url: str, jobs: int) -> tuple[list[float], list[float]]:
    """The ms from before each put until after its take, and of each finish."""
    way_ms: list[float] = []
    finish_ms: list[float] = []
    async with JobConsumer(url, CONFIG) as consumer:
        while len(way_ms) < jobs:
            for delivery in await consumer.take(8, block_ms=5000):
                now = time.time()
                way_ms.append((now - delivery.job.created_at) * 1000)
                await consumer.finish(delivery, b"{}" * 500)
                finish_ms.append((time.time() - now) * 1000)
    return way_ms, finish_ms


def summary(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum."""
    ordered = sorted(values)
    picked = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[round(share * (len(ordered) - 1))], 3) for name, share in picked.items()}


def measure(url: str, jobs: int, rate: float, size: int) -> dict[str, object]:
    """One run: the three times, and jobs a second."""
    command = [sys.executable, __file__, "--produce", "--url", url]
    options = ["--jobs", str(jobs), "--rate", str(rate), "--size", str(size)]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE) as producer:
        start = time.monotonic()
        way_ms, finish_ms = asyncio.run(consume(url, jobs))
        seconds = time.monotonic() - start
        assert producer.stdout
        put_ms = json.load(producer.stdout)
    times = {"put_ms": put_ms, "put_to_take_ms": way_ms, "finish_ms": finish_ms}
    return {name: summary(values) for name, values in times.items()} | {
        "jobs_per_s": round(jobs / seconds, 1)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", help="a server of your own; default: the embedded one")
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--size", type=int, default=100_000)
    parser.add_argument("--produce", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.produce:
        return produce(options.url, options.jobs, options.rate, options.size)
    with nullcontext() if options.url else EmbeddedServer() as server:
        url = options.url or server.url
        steady = measure(url, options.jobs, options.rate, options.size)
        burst = measure(url, options.jobs, 0, options.size)
    report = {
        "jobs": options.jobs,
        "size_bytes": options.size,
        "rate_per_s": options.rate,
        "steady": steady,
        "as_fast_as_possible": burst,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_1m": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(report, indent=2))
    return None


if __name__ == "__main__":
    main()
