"""Builders and a few tools that several queue tests share."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable

import redis

from queues import Delivery, EmbeddedServer, Job, JobConsumer, QueueConfig

PATIENCE_S = 120.0
"""How long what has to happen may take: on a machine that others use as well, as long as it likes."""

# Times are short, yet far longer than a loaded machine's hiccups.
FAST = QueueConfig(
    visibility_s=1.5,
    retry_delay_s=0.05,
    max_block_s=0.5,
    read_margin_s=0.5,
    command_timeout_s=1.0,
    outage_patience_s=20.0,
)


def make_job(
    job_id: str = "job",
    *,
    key: str = "cam",
    size: int = 100,
    expires_in_s: float | None = None,
    slot: str | None = None,
) -> Job:
    now = time.time()
    expires_at = None if expires_in_s is None else now + expires_in_s
    return Job(job_id, key, b"x" * size, created_at=now, expires_at=expires_at, slot=slot)


def raw_client(server: EmbeddedServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, protocol=2)


def body_sizes(client: redis.Redis) -> dict[bytes, int]:
    """The size of each entry's body; nothing is left on its way in, on its way out only for a while."""
    own = f"{{{FAST.stream}}}:".encode()
    assert not client.keys(own + b"put:*")
    assert all(client.pttl(name) != -1 for name in client.keys(own + b"hand:*"))
    names = client.keys(own + b"body:*")
    return {name.removeprefix(own + b"body:"): client.strlen(name) for name in names}


def kill_server(server: EmbeddedServer) -> None:
    with raw_client(server) as client:
        process_id = client.info("server")["process_id"]
    os.kill(process_id, signal.SIGKILL)
    wait_until(lambda: not server.is_running)


def is_alive(process_id: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{process_id}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.02)


async def wait_until_async(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        await asyncio.sleep(0.02)


async def drain(consumer: JobConsumer, timeout_s: float = PATIENCE_S) -> list[Delivery]:
    """Take until nothing waits and nothing is pending with others: all leases of the dead were looked at."""
    taken: list[Delivery] = []
    async with asyncio.timeout(timeout_s):
        while (status := await consumer.status()).depth or status.pending > len(taken):
            taken += await consumer.take(8, block_ms=100)
    return taken


async def die(consumer: JobConsumer) -> None:
    """End a worker as a crash does: nothing is handed back, leases just stop being renewed."""
    consumer._held.clear()
    await consumer.close()


def queue_records(records: list[logging.LogRecord]) -> list[logging.LogRecord]:
    return [record for record in records if record.name.startswith("queues")]
