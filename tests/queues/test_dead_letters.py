"""Dead letters: told with reason and time, put back, dropped."""

import time
from dataclasses import replace

import pytest

from queues import (
    DeadLetters,
    EmbeddedServer,
    JobConsumer,
    JobProducer,
    QueueFull,
    QueueUnavailable,
    ResultReader,
)
from tests.queues.helpers import FAST, make_job

ONCE = replace(FAST, max_deliveries=1)


async def bury(consumer: JobConsumer, producer: JobProducer, *names: str) -> None:
    for name in names:
        producer.put(make_job(name))
        (delivery,) = await consumer.take(1, 10_000)
        await consumer.fail(replace(delivery, times_delivered=3), f"{name} is broken")


async def test_a_letter_tells_why_and_when(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    """Q3."""
    await bury(consumer, producer, "a", "b")
    with DeadLetters(server.url, FAST) as letters:
        b, a = letters.newest()
        assert (a.job_id, a.key, a.reason, a.times_delivered, a.num_bytes) == (
            "a",
            "cam",
            "a is broken",
            3,
            100,
        )
        assert abs(time.time() - b.died_at) < 60
        assert [letter.job_id for letter in letters.newest(1)] == ["b"]
        assert letters.status().dead == 2


async def test_a_letter_is_put_back_and_answered(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer, reader: ResultReader
) -> None:
    """As new: with all its deliveries, its own creation time, and the books still true."""
    await bury(consumer, producer, "a", "b")
    with DeadLetters(server.url, FAST) as letters:
        _, a = letters.newest()
        assert letters.retry(a.entry_id)
        assert not letters.retry(a.entry_id)
        assert [letter.job_id for letter in letters.newest()] == ["b"]
    (delivery,) = await consumer.take(9, 10_000)
    assert (delivery.job.job_id, delivery.times_delivered, delivery.job.expires_at) == ("a", 1, None)
    assert abs(time.time() - delivery.job.created_at) < 60
    assert await consumer.finish(delivery, b"text")
    assert [result.job_id for result in await reader.read("0-0")] == ["a"]
    status = await consumer.status()
    assert status.is_idle
    assert status.num_bytes == 0
    assert status.num_put == status.num_done + status.num_dropped == 3


async def test_a_letter_whose_job_was_answered_meanwhile_is_forgotten(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    """Q5: the last worker was slow, not dead."""
    producer.put(make_job("a"))
    (delivery,) = await consumer.take(1, 10_000)
    await consumer.fail(replace(delivery, times_delivered=3), "given up")
    assert await consumer.finish(delivery, b"late")
    with DeadLetters(server.url, FAST) as letters:
        (letter,) = letters.newest()
        assert letters.retry(letter.entry_id)
        assert letters.newest() == []
    assert (await consumer.status()).is_idle


async def test_there_must_be_room(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    await bury(consumer, producer, "a")
    producer.put(make_job("b"))
    with DeadLetters(server.url, replace(FAST, max_len=1)) as letters:
        (letter,) = letters.newest()
        with pytest.raises(QueueFull, match="the queue is full"):
            letters.retry(letter.entry_id)
        assert letters.newest() == [letter]


async def test_a_letter_is_dropped(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    await bury(consumer, producer, "a")
    with DeadLetters(server.url, FAST) as letters:
        (letter,) = letters.newest()
        assert letters.drop(letter.entry_id)
        assert not letters.drop(letter.entry_id)
        assert letters.status().dead == 0


def test_nobody_listens() -> None:
    with pytest.raises(QueueUnavailable, match=r"127\.0\.0\.1:9"):
        DeadLetters("redis://:hush@127.0.0.1:9")
