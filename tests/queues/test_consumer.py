import asyncio
import gc
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import redis

from queues import EmbeddedServer, JobConsumer, JobProducer, ResultReader
from tests.queues.helpers import FAST, PATIENCE_S, die, drain, make_job, raw_client, wait_until_async


async def test_a_job_arrives_whole_and_in_order(producer: JobProducer, consumer: JobConsumer) -> None:
    jobs = [make_job(f"{number}", size=number, expires_in_s=60) for number in range(5)]
    for job in jobs:
        producer.put(job)
    deliveries = await consumer.take(3) + await consumer.take(3)
    assert [delivery.job for delivery in deliveries] == jobs
    assert {delivery.times_delivered for delivery in deliveries} == {1}
    assert all(0 <= delivery.queue_ms < 20_000 for delivery in deliveries)


async def test_jobs_put_before_the_first_worker_are_not_missed(
    producer: JobProducer, server: EmbeddedServer
) -> None:
    """The group begins at id 0."""
    producer.put(make_job("early"))
    async with JobConsumer(server.url, FAST) as consumer:
        assert [delivery.job.job_id for delivery in await consumer.take(4)] == ["early"]


async def test_take_waits_for_the_first_job_only(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    assert await consumer.take(4, block_ms=0) == []
    taking = asyncio.create_task(consumer.take(4, block_ms=20_000))
    with raw_client(server) as client:
        await _wait_until_blocked(client, 1)
    await asyncio.to_thread(producer.put, make_job("a"))
    assert len(await taking) == 1


async def _wait_until_blocked(client: redis.Redis, number: int) -> None:
    await wait_until_async(lambda: client.info("clients")["blocked_clients"] == number)


@pytest.mark.parametrize("loss", ["scripts", "group"])
async def test_what_the_server_forgets_while_a_worker_waits(
    loss: str, server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    """The script that waits behind the worker's read may be unknown by its turn, and so may the group."""
    with raw_client(server) as client:
        taking = asyncio.create_task(consumer.take(1, block_ms=20_000))
        await _wait_until_blocked(client, 1)
        if loss == "scripts":
            client.script_flush()
        else:
            client.xgroup_destroy(FAST.stream, FAST.group)
        await asyncio.to_thread(producer.put, make_job("a"))
        [delivery] = await taking
        assert delivery.job.job_id == "a"
        assert await consumer.finish(delivery, b"result")
        assert (await consumer.status()).is_idle


async def test_a_cancelled_take_takes_nothing_later(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    """The take that the server holds back ends with the connection of who asked for it."""
    config = replace(FAST, max_block_s=20.0)
    with raw_client(server) as client:
        async with JobConsumer(server.url, config) as cancelled:
            taking = asyncio.create_task(cancelled.take(1, block_ms=20_000))
            await _wait_until_blocked(client, 1)
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
            await _wait_until_blocked(client, 0)
            producer.put(make_job("a"))
            [delivery] = await consumer.take(1, block_ms=20_000)
            assert delivery.times_delivered == 1


async def test_finish_stores_one_result(
    producer: JobProducer, consumer: JobConsumer, reader: ResultReader
) -> None:
    """Q5: a repeated finish is harmless; the job, its bytes and its entry are gone."""
    producer.put(make_job("a"))
    [delivery] = await consumer.take(1)
    assert await consumer.finish(delivery, b"result")
    assert await consumer.finish(delivery, b"result")
    results = await reader.read("0-0")
    assert [(result.job_id, result.key, result.body) for result in results] == [("a", "cam", b"result")]
    status = await consumer.status()
    assert status.is_idle
    assert (status.num_bytes, status.num_done) == (0, 1)


async def test_a_job_delivered_twice_has_one_result(server: EmbeddedServer, producer: JobProducer) -> None:
    """Q5: a worker that was taken for dead answers late; the first answer stands."""
    producer.put(make_job("a"))
    async with (
        JobConsumer(server.url, FAST) as slow,
        JobConsumer(server.url, FAST) as quick,
        ResultReader(server.url, FAST) as reader,
    ):
        [late] = await slow.take(1)
        slow._held.clear()
        [again] = await quick.take(1, 20_000)
        assert again.times_delivered == 2
        assert not await slow.fail(late, "too late to matter")
        assert (await quick.status()).num_retried == 0
        assert await quick.finish(again, b"quick")
        assert not await slow.finish(late, b"slow")
        assert [result.body for result in await reader.read("0-0")] == [b"quick"]
        assert (await quick.status()).num_duplicates == 1


async def test_a_redelivered_job_that_has_a_result_is_not_worked_on(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    """Q5: an entry of a done id, claimed from a dead worker or fresh, is acked and goes nowhere."""
    producer.put(make_job("a"))
    [delivery] = await consumer.take(1)
    await consumer.finish(delivery, b"result")
    with raw_client(server) as client:
        entry = {
            "job_id": "a",
            "key": "cam",
            "created_at": 1,
            "expires_at": "",
            "deadline_ms": "",
            "body": "x",
        }
        client.xadd(FAST.stream, entry)
        client.xreadgroup(FAST.group, "dead", {FAST.stream: ">"})
        client.xadd(FAST.stream, entry)
        assert await drain(consumer) == []
        assert client.xlen(FAST.stream) == 0
        assert client.xlen(FAST.results) == 1
    status = await consumer.status()
    assert (status.pending, status.num_duplicates) == (0, 2)


async def test_a_dead_workers_job_goes_to_another(server: EmbeddedServer, producer: JobProducer) -> None:
    """Q2: the lease of a worker that stopped renewing runs out."""
    producer.put(make_job("a"))
    async with JobConsumer(server.url, FAST) as consumer:
        dead = JobConsumer(server.url, FAST)
        await dead.start()
        started = time.monotonic()
        await dead.take(1)
        await die(dead)
        [delivery] = await consumer.take(1, 20_000)
        assert delivery.times_delivered == 2
        assert time.monotonic() - started > 0.9 * FAST.visibility_s


async def test_a_slow_job_stays_with_its_worker(server: EmbeddedServer, producer: JobProducer) -> None:
    """Q2: leases are renewed while the worker lives, however long the job takes."""
    producer.put(make_job("a"))
    async with JobConsumer(server.url, FAST) as slow, JobConsumer(server.url, FAST) as idle:
        [delivery] = await slow.take(1)
        assert await idle.take(1, block_ms=2.5 * FAST.visibility_s * 1000) == []
        assert await slow.finish(delivery, b"result")
        with raw_client(server) as client:
            assert client.xpending(FAST.stream, FAST.group)["pending"] == 0


async def test_a_job_held_for_too_long_is_given_up(server: EmbeddedServer, producer: JobProducer) -> None:
    """Q2: a job that its worker forgot comes back after `max_hold_s`."""
    producer.put(make_job("a"))
    async with JobConsumer(server.url, replace(FAST, max_hold_s=0.5)) as forgetful:
        await forgetful.take(1)
        [again] = await forgetful.take(1, 20_000)
        assert again.times_delivered == 2


async def test_close_hands_jobs_back_at_once(server: EmbeddedServer, producer: JobProducer) -> None:
    """A clean stop costs the job neither a wait nor one of its deliveries."""
    config = replace(FAST, visibility_s=600.0)
    producer.put(make_job("a"))
    async with JobConsumer(server.url, config) as first:
        assert await first.take(1)
    async with JobConsumer(server.url, config) as second:
        [delivery] = await second.take(1, 20_000)
        assert delivery.times_delivered == 1


async def test_a_failing_job_goes_to_the_dead_letters(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    """Q3: after k deliveries it is buried with its error, others go on, and the status says so."""
    producer.put(make_job("bad"))
    times = []
    for _ in range(FAST.max_deliveries):
        [delivery] = await consumer.take(1, 20_000)
        times.append(delivery.times_delivered)
        is_retried = await consumer.fail(delivery, "no such image")
        assert is_retried == (len(times) < FAST.max_deliveries)
    producer.put(make_job("good"))
    [delivery] = await consumer.take(2, 20_000)
    assert delivery.job.job_id == "good"
    await consumer.finish(delivery, b"result")
    assert times == [1, 2, 3]
    status = await consumer.status()
    assert (status.dead, status.num_retried, status.num_done, status.num_bytes) == (1, 2, 1, 0)
    assert status.dropped == {"dead": 1}
    with raw_client(server) as client:
        [(_, letter)] = client.xrange(FAST.dead)
    assert (letter[b"job_id"], letter[b"reason"], letter[b"body"]) == (b"bad", b"no such image", b"x" * 100)
    assert letter[b"times_delivered"] == b"3"


async def test_a_job_that_kills_its_workers_is_buried(server: EmbeddedServer, producer: JobProducer) -> None:
    """Q3: deliveries count, not exceptions: nobody lives to report this failure."""
    config = replace(FAST, visibility_s=0.3, max_deliveries=2)
    producer.put(make_job("deadly"))
    for expected in (1, 2):
        victim = JobConsumer(server.url, config)
        await victim.start()
        [delivery] = await victim.take(1, 20_000)
        assert delivery.times_delivered == expected
        await die(victim)
    async with JobConsumer(server.url, config) as survivor:
        assert await drain(survivor) == []
        assert (await survivor.status()).dropped == {"dead": 1}
    with raw_client(server) as client:
        [(_, letter)] = client.xrange(config.dead)
    assert (letter[b"job_id"], letter[b"times_delivered"]) == (b"deadly", b"2")


async def test_a_trimmed_entry_that_is_pending_is_acked_and_counted(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    """Q4: somebody trimmed the stream under a dead worker and under a failing one."""
    for name in ("a", "b"):
        producer.put(make_job(name))
    dead = JobConsumer(server.url, FAST)
    await dead.start()
    await dead.take(1)
    await die(dead)
    [failing] = await consumer.take(1)
    with raw_client(server) as client:
        client.xtrim(FAST.stream, maxlen=0, approximate=False)
        assert not await consumer.fail(failing, "error")
        assert await drain(consumer) == []
        assert client.xpending(FAST.stream, FAST.group)["pending"] == 0
    status = await consumer.status()
    assert (status.dropped, status.dead) == ({"expired": 2}, 0)


async def test_a_job_whose_body_is_gone_is_given_up(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    """Q4: a server that evicted bodies, of jobs that wait and of one in a dead worker's hand."""
    for name in ("dead", "lost", "lost too", "good"):
        producer.put(make_job(name))
    dead = JobConsumer(server.url, FAST)
    await dead.start()
    await dead.take(1)
    await die(dead)
    with raw_client(server) as client:
        ids = [entry_id for entry_id, _ in client.xrange(FAST.stream)]
        client.delete(*(FAST.key(f"body:{entry_id.decode()}") for entry_id in ids[:3]))
    assert [delivery.job.job_id for delivery in await drain(consumer)] == ["good"]
    status = await consumer.status()
    assert (status.depth, status.pending, status.dropped) == (0, 1, {"expired": 3})


async def test_expired_jobs_are_dropped_and_counted(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    """Work past its time reaches no worker: neither fresh from the queue nor from a dead worker."""
    dead = JobConsumer(server.url, FAST)
    await dead.start()
    producer.put(make_job("claimed", expires_in_s=1.0))
    assert await dead.take(1)
    await die(dead)
    producer.put(make_job("fresh", expires_in_s=-1))
    producer.put(make_job("good", expires_in_s=600))
    assert [delivery.job.job_id for delivery in await drain(consumer)] == ["good"]
    status = await consumer.status()
    assert (status.dropped, status.num_bytes) == ({"expired": 2}, 100)


async def test_workers_that_left_are_forgotten(server: EmbeddedServer, producer: JobProducer) -> None:
    for _ in range(3):
        async with JobConsumer(server.url, FAST):
            pass
    with raw_client(server) as client:
        assert client.xinfo_consumers(FAST.stream, FAST.group) == []


async def test_results_can_be_stored_when_memory_is_full(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer, reader: ResultReader
) -> None:
    """A full server can be worked off: finishing frees the job before it stores the result."""
    producer.put(make_job("a"))
    with raw_client(server) as client:
        client.config_set("maxmemory", "1mb")
        [delivery] = await consumer.take(1)
        assert await consumer.finish(delivery, b"result")
        client.config_set("maxmemory", "100mb")
    assert len(await reader.read("0-0")) == 1


# why: redis-py drops a connection whose making was cancelled without closing it; the collector does it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_worker_can_be_cancelled_at_any_moment(server: EmbeddedServer, producer: JobProducer) -> None:
    """No cancellation is lost in the client: loops around `take` end, and so does `close`."""
    config = replace(FAST, visibility_s=0.003)

    async def work(consumer: JobConsumer) -> None:
        while True:
            await consumer.take(1, block_ms=1)

    for number in range(40):
        consumer = JobConsumer(server.url, config)
        await consumer.start()
        working = asyncio.create_task(work(consumer))
        await asyncio.sleep(0.0005 * (number % 20))
        working.cancel()
        closing = asyncio.create_task(consumer.close())
        _, unfinished = await asyncio.wait([working, closing], timeout=PATIENCE_S)
        assert not unfinished
    gc.collect()


async def test_a_cancellation_that_the_client_swallows_is_not_lost(consumer: JobConsumer) -> None:
    async def swallow() -> int:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
        return 1

    asking = asyncio.create_task(consumer._link.ask(swallow))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_cancelled_task_may_still_clean_up(producer: JobProducer, consumer: JobConsumer) -> None:
    """A worker's `except CancelledError` can fail its job: only a new cancellation interrupts that."""
    producer.put(make_job("a"))
    [delivery] = await consumer.take(1)

    async def work() -> bool:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            return await consumer.fail(delivery, "stopped")
        return False

    working = asyncio.create_task(work())
    await asyncio.sleep(0)
    working.cancel()
    assert await working


@pytest.mark.parametrize("lost", ["group", "stream"])
async def test_a_lost_group_is_made_again(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer, lost: str
) -> None:
    """Q6: NOGROUP, also in the middle of a blocking read, is cured without missing a job."""
    taking = asyncio.create_task(consumer.take(1, 20_000))
    with raw_client(server) as client:
        await _wait_until_blocked(client, 1)
        if lost == "stream":
            client.delete(FAST.stream)
        else:
            client.xgroup_destroy(FAST.stream, FAST.group)
    await asyncio.to_thread(producer.put, make_job("a"))
    assert [delivery.job.job_id for delivery in await taking] == ["a"]
    await wait_until_async(lambda: consumer.is_healthy)
