"""How long a job is on its way: one process puts jobs of 100 KB, this one takes and finishes them.

    python benchmarks/queue_round_trip.py [--jobs 500] [--rates 20 50 100 200] [--size 100000] [--url redis://…]

Writes one JSON object to standard output; times in milliseconds, by the clock that both processes share.
`queue` is at steady rates, in jobs a second; `as_fast_as_possible` fills the queue, so its way is mostly
waiting. `plain` is what the server, the client library and this machine take without a queue: one XADD to one
XREAD that waits. The lower the rate, the deeper cores sleep in between, and the longer they take to wake up.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

from queues import EmbeddedServer, Job, JobConsumer, JobProducer, QueueConfig, connect, connect_async

PLAIN = "benchmark:plain"
CONFIG = QueueConfig(stream="benchmark:jobs", when_full="wait", max_bytes=64 * 2**20)


def produce(url: str, jobs: int, rate: float, size: int) -> None:
    """Put `jobs` jobs, `rate` a second (0: as fast as it goes); prints the times of the puts."""
    with JobProducer(url, CONFIG) as producer:
        _paced(jobs, rate, size, producer.put)


def produce_plain(url: str, jobs: int, rate: float, size: int) -> None:
    """The same by a bare XADD."""
    with connect(url, CONFIG) as client:
        _paced(
            jobs,
            rate,
            size,
            lambda job: client.xadd(PLAIN, {"at": repr(job.created_at), "body": job.body}, maxlen=16),
        )


def _paced(jobs: int, rate: float, size: int, put: Callable[[Job], object]) -> None:
    put_ms = []
    start = time.monotonic()
    for number in range(jobs):
        if rate:
            time.sleep(max(0.0, start + number / rate - time.monotonic()))
        body = os.urandom(size)
        before = time.time()
        put(Job(f"{os.getpid()}-{number}", "cam", body, created_at=before))
        put_ms.append((time.time() - before) * 1000)
    json.dump(put_ms, sys.stdout)


async def consume_plain(url: str, jobs: int) -> tuple[list[float], list[float]]:
    """The ms from before each XADD until after its XREAD."""
    way_ms: list[float] = []
    client, last_id = connect_async(url, CONFIG), "0-0"
    while len(way_ms) < jobs:
        for _, entries in await client.xread({PLAIN: last_id}, block=4000):
            for entry_id, fields in entries:
                way_ms.append((time.time() - float(fields[b"at"])) * 1000)
                last_id = entry_id
    await client.delete(PLAIN)
    await client.aclose()
    return way_ms, []


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


def measure(url: str, jobs: int, rate: float, size: int, kind: str = "queue") -> dict[str, object]:
    """One run: the three times, and jobs a second."""
    command = [sys.executable, __file__, "--produce", kind, "--url", url]
    options = ["--jobs", str(jobs), "--rates", str(rate), "--size", str(size)]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE) as producer:
        start = time.monotonic()
        way_ms, finish_ms = asyncio.run((consume if kind == "queue" else consume_plain)(url, jobs))
        seconds = time.monotonic() - start
        assert producer.stdout
        put_ms = json.load(producer.stdout)
    times = {"put_ms": put_ms, "put_to_take_ms": way_ms, "finish_ms": finish_ms}
    return {name: summary(values) for name, values in times.items() if values} | {
        "jobs_per_s": round(jobs / seconds, 1)
    }


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", help="a server of your own; default: the embedded one")
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--rates", type=float, nargs="+", default=[20.0, 50.0, 100.0, 200.0])
    parser.add_argument("--size", type=int, default=100_000)
    parser.add_argument("--produce", choices=("queue", "plain"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.produce:
        run = produce if options.produce == "queue" else produce_plain
        return run(options.url, options.jobs, options.rates[0], options.size)
    with nullcontext() if options.url else EmbeddedServer() as server:
        url = options.url or server.url
        by_rate = {
            f"{rate:g}": {
                kind: measure(url, options.jobs, rate, options.size, kind) for kind in ("queue", "plain")
            }
            for rate in options.rates
        }
        burst = measure(url, options.jobs, 0, options.size)
    report = {
        "jobs": options.jobs,
        "size_bytes": options.size,
        "by_rate": by_rate,
        "as_fast_as_possible": burst,
        "commit": _commit(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_1m": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(report, indent=2))
    return None


if __name__ == "__main__":
    main()
