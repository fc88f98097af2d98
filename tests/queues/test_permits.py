"""Jobs whose key has to have another permit by now: they are dropped wherever they are, and counted."""

from dataclasses import replace

from queues import DeadLetters, EmbeddedServer, JobConsumer, JobProducer, ResultReader
from tests.queues.helpers import FAST, body_sizes, die, drain, make_job, raw_client


async def test_what_waits_is_dropped_at_once_and_what_comes_late_when_its_turn_comes(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    for number in range(3):
        producer.put(make_job(f"old-{number}"))
    producer.put(make_job("other", key="yard"))

    assert producer.permit("cam", "masked") == 3

    with raw_client(server) as client:
        assert len(body_sizes(client)) == 1
    producer.put(make_job("late"))
    producer.put(replace(make_job("new"), permit="masked"))
    assert {delivery.job.job_id for delivery in await drain(consumer)} == {"other", "new"}
    status = await consumer.status()
    assert status.dropped == {"withdrawn": 4}
    assert status.num_put == 6


async def test_what_is_in_hand_or_with_a_dead_worker_is_known(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    dying = JobConsumer(server.url, FAST)
    await dying.start()
    producer.put(make_job("abandoned"))
    [_] = await dying.take(1)
    await die(dying)
    producer.put(make_job("held", key="yard"))
    [held] = await consumer.take(1)
    assert not await consumer.is_withdrawn(held)

    assert await consumer.permit("yard", "paused") == await consumer.permit("cam", "masked") == 0

    assert await consumer.is_withdrawn(held)
    assert await consumer.drop(held, "withdrawn")
    assert await drain(consumer) == []
    assert (await consumer.status()).dropped == {"withdrawn": 2}
    async with ResultReader(server.url, FAST, stream=FAST.dropped) as reader:
        told = {result.job_id: result.body for result in await reader.read("0-0")}
    assert told == {"abandoned": b"withdrawn", "held": b"withdrawn"}


async def test_what_is_said_again_changes_no_newer_word(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    """And holds where the server has forgotten that there was one."""
    await consumer.permit("cam", "newer")
    producer.put(replace(make_job("new"), permit="newer"))
    assert producer.permit("cam", "older", is_again=True) == 0
    [held] = await consumer.take(1)
    assert not await consumer.is_withdrawn(held)
    with raw_client(server) as client:
        client.delete(FAST.key("permits"))
    producer.permit("cam", "older", is_again=True)
    assert await consumer.is_withdrawn(held)


async def test_a_dead_letter_comes_back_with_its_own_permit(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    producer.permit("cam", "first")
    producer.put(replace(make_job("letter"), permit="first"))
    for _ in range(FAST.max_deliveries):
        [delivery] = await consumer.take(1, 10_000)
        await consumer.fail(delivery, "broken")
    with DeadLetters(server.url, FAST) as letters:
        assert letters.retry(letters.newest()[0].entry_id)
    [delivery] = await consumer.take(1, 10_000)
    assert delivery.job.permit == "first"
    while await consumer.fail(delivery, "broken"):
        [delivery] = await consumer.take(1, 10_000)
    producer.permit("cam", "second")
    with DeadLetters(server.url, FAST) as letters:
        assert letters.retry(letters.newest()[0].entry_id)
    assert await consumer.take(1, 300) == []


def test_a_full_memory_keeps_nobody_from_it(server: EmbeddedServer, producer: JobProducer) -> None:
    producer.put(make_job("old"))
    with raw_client(server) as client:
        client.config_set("maxmemory", 1)
        assert producer.permit("cam", "masked") == 1
