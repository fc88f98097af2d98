"""Redis Sentinel: three of them on loopback, and a master that is killed or hangs in the middle."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
import redis

from queues import (
    JobConsumer,
    JobProducer,
    QueueError,
    QueueStatus,
    QueueUnavailable,
    ResultReader,
    connect,
    connect_async,
)
from tests.queues.helpers import FAST, make_job
from tests.queues.servers import Cluster

PASSWORD = "p@ss/word?with#every:thing%"
CONFIG = replace(FAST, max_deliveries=50)


@pytest.fixture
def cluster(kind: str, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, kind, PASSWORD)
    with cluster.running():
        yield cluster


def url_of(cluster: Cluster) -> str:
    return f"redis+sentinel://:{quote(PASSWORD, safe='')}@{cluster.hosts}/jobs/0"


async def put_through(producer: JobProducer, name: str) -> None:
    """Put a job, again and again until a master takes it."""
    async with asyncio.timeout(60):
        while True:
            try:
                await asyncio.to_thread(producer.put, make_job(name))
            except QueueError:
                await asyncio.sleep(0.05)
            else:
                return


@pytest.mark.parametrize(("kind", "how"), [("valkey", "hung"), ("redis", "killed")])
async def test_everybody_follows_a_failover(
    cluster: Cluster, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What the replica had is answered once; producer, worker, reader and plain clients go on."""
    url, seen = url_of(cluster), Counter[str]()
    async with (
        JobConsumer(url, CONFIG) as consumer,
        ResultReader(url, CONFIG) as reader,
        connect_async(url, CONFIG) as client,
    ):
        with JobProducer(url, CONFIG) as producer, connect(url, CONFIG) as blocking:
            for number in range(20):
                producer.put(make_job(f"{number}"))
            in_hand = await consumer.take(5, 10_000)
            await client.set("frame", b"old")
            await asyncio.to_thread(cluster.wait_until_replicated)
            if how == "killed":
                cluster.master.kill()
            else:
                cluster.master.pause()
            for delivery in in_hand:
                await consumer.finish(delivery, b"after the failover")
            await asyncio.to_thread(cluster.wait_for_failover)
            for number in range(20, 30):
                await put_through(producer, f"{number}")
            async with asyncio.timeout(60):
                while not (status := await status_of(consumer)) or not status.is_idle:
                    for delivery in await consumer.take(8, 500):
                        await consumer.finish(delivery, b"text")
                last = "0-0"
                while len(seen) < 30:
                    for result in await reader.read(last, 500):
                        last, seen[result.job_id] = result.entry_id, seen[result.job_id] + 1
            # why: the first call of a plain client may be the one that finds out.
            for _ in range(3):
                with suppress(redis.RedisError):
                    frame, other = await client.get("frame"), blocking.get("frame")
            assert (frame, other) == (b"old", b"old")
    assert seen == Counter({f"{number}": 1 for number in range(30)})
    assert PASSWORD not in caplog.text
    assert quote(PASSWORD, safe="") not in caplog.text


async def status_of(consumer: JobConsumer) -> QueueStatus | None:
    try:
        return await consumer.status()
    except QueueUnavailable:
        return None


@pytest.mark.parametrize("kind", ["valkey"])
async def test_no_sentinel_or_no_such_service_is_said(cluster: Cluster) -> None:
    wrong = url_of(cluster).replace("/jobs/", "/nothing/")
    nobody = "redis+sentinel://:hush@127.0.0.1:9,127.0.0.1:10/jobs"
    for url in (wrong, nobody):
        with pytest.raises(QueueUnavailable, match="no Sentinel names a master") as caught:
            JobProducer(url, FAST)
        with pytest.raises(QueueUnavailable, match="no Sentinel names a master"):
            async with JobConsumer(url, FAST):
                pass
        assert "hush" not in str(caught.value)
        assert PASSWORD not in str(caught.value)
