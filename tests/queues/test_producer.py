import threading
import time
from dataclasses import replace

import pytest

from queues import EmbeddedServer, JobConsumer, JobProducer, JobTooLarge, QueueFull, QueueUnavailable
from tests.queues.helpers import FAST, body_sizes, kill_server, make_job, raw_client


def test_a_known_id_is_refused(producer: JobProducer) -> None:
    """Q5: the second put of an id queues nothing."""
    assert producer.put(make_job("a"))
    assert not producer.put(make_job("a"))
    status = producer.status()
    assert (status.depth, status.num_put, status.num_duplicates) == (1, 1, 1)


def test_a_retried_put_queues_once(producer: JobProducer) -> None:
    """Q5: the client sends the same put again when the first answer was lost; both succeed, one job."""
    assert producer._try_put(make_job("a"), "token") == 1
    assert producer._try_put(make_job("a"), "token") == 1
    status = producer.status()
    assert (status.depth, status.num_duplicates) == (1, 0)


async def test_a_finished_id_is_refused(producer: JobProducer, consumer: JobConsumer) -> None:
    """Q5: an id stays known after its job was answered."""
    producer.put(make_job("a"))
    [delivery] = await consumer.take(1)
    await consumer.finish(delivery, b"result")
    assert not producer.put(make_job("a"))


def test_a_body_over_the_limit_is_refused(server: EmbeddedServer) -> None:
    with JobProducer(server.url, replace(FAST, max_body_bytes=10)) as producer:
        with pytest.raises(JobTooLarge, match="job big has 11 bytes, the limit is 10"):
            producer.put(make_job("big", size=11))
        assert producer.put(make_job("fits", size=10))


def test_without_a_consumer_the_oldest_goes_and_is_counted(server: EmbeddedServer) -> None:
    """Q1: length is bounded, every drop counted, the newest kept."""
    with JobProducer(server.url, replace(FAST, max_len=10)) as producer, raw_client(server) as client:
        for number in range(35):
            producer.put(make_job(f"{number}"))
        status = producer.status()
        kept = [fields[b"job_id"] for _, fields in client.xrange(FAST.stream)]
    assert (status.depth, status.dropped) == (10, {"overflow": 25})
    assert kept == [b"%d" % number for number in range(25, 35)]


def test_without_a_consumer_bytes_are_bounded(server: EmbeddedServer) -> None:
    """Q1: the byte budget holds before the length does, and agrees with what is in the stream."""
    with JobProducer(server.url, replace(FAST, max_bytes=100_000)) as producer, raw_client(server) as client:
        for number in range(60):
            producer.put(make_job(f"{number}", size=3_000 + 100 * number))
        status = producer.status()
        sizes = body_sizes(client).values()
    assert status.num_bytes == sum(sizes)
    assert 90_000 < status.num_bytes <= 100_000
    assert status.dropped == {"overflow": 60 - len(sizes)}


def test_a_put_that_is_not_taken_leaves_no_body(server: EmbeddedServer) -> None:
    """A body is there as long as its entry: not for a known id, without room, or larger than the budget."""
    config = replace(FAST, max_bytes=1000, when_full="wait")
    with JobProducer(server.url, config) as producer, raw_client(server) as client:
        assert producer.put(make_job("a", size=600))
        assert not producer.put(make_job("a", size=100))
        with pytest.raises(QueueFull):
            producer.put(make_job("b", size=600), timeout_s=0)
        with JobProducer(server.url, replace(config, when_full="drop_oldest")) as hasty:
            assert hasty.put(make_job("c", size=500))
        assert list(body_sizes(client).values()) == [500]
        assert producer.put(make_job("b", size=500))
        assert producer.status().num_bytes == 1000


async def test_scripts_that_the_server_forgot(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    """Nothing is queued or left behind by what came without its script, and the next try has it."""
    with raw_client(server) as client:
        for name in ("a", "b"):
            client.script_flush()
            assert producer.put(make_job(name))
            client.script_flush()
            [delivery] = await consumer.take(1)
            client.script_flush()
            assert await consumer.finish(delivery, b"result")
        assert body_sizes(client) == {}
    assert producer.status().num_done == 2


async def test_overflow_never_takes_a_job_from_its_worker(server: EmbeddedServer) -> None:
    """Q1: jobs in hand count against the limit but only waiting ones are dropped."""
    config = replace(FAST, max_len=4)
    with JobProducer(server.url, config) as producer:
        async with JobConsumer(server.url, config) as consumer:
            for name in ("a", "b"):
                producer.put(make_job(name))
            in_hand = await consumer.take(2)
            for number in range(10):
                producer.put(make_job(f"{number}"))
            status = producer.status()
            assert (status.pending, status.depth, status.num_dropped) == (2, 2, 8)
            for delivery in in_hand:
                assert await consumer.finish(delivery, b"result")
            waiting = await consumer.take(8)
            assert [delivery.job.job_id for delivery in waiting] == ["8", "9"]
            assert producer.status().num_done == 2


async def test_wait_mode_holds_the_producer_until_there_is_room(server: EmbeddedServer) -> None:
    """Recorded video loses nothing: a full queue slows the producer down."""
    config = replace(FAST, max_len=2, when_full="wait")
    with JobProducer(server.url, config) as producer:
        for name in ("a", "b"):
            producer.put(make_job(name))
        with pytest.raises(QueueFull, match=r"no room for job c within 0\.1 s"):
            producer.put(make_job("c"), timeout_s=0.1)
        waiting = threading.Thread(target=producer.put, args=(make_job("c"), 20.0))
        waiting.start()
        async with JobConsumer(server.url, config) as consumer:
            [first] = await consumer.take(1)
            await consumer.finish(first, b"result")
            names = [delivery.job.job_id for delivery in await consumer.take(2)]
            if len(names) < 2:
                names += [delivery.job.job_id for delivery in await consumer.take(1, 20_000)]
        waiting.join()
        assert names == ["b", "c"]
        assert producer.status().num_dropped == 0


def test_own_drops_reach_all_processes(server: EmbeddedServer, producer: JobProducer) -> None:
    """Q1: a reason that only the producer knows is seen by others after its next put, once."""
    producer.count_drop("unavailable", 3)
    producer.put(make_job("a"))
    producer.put(make_job("b"))
    with JobProducer(server.url, FAST) as other:
        assert other.status().dropped == {"unavailable": 3}


def test_status_tells_the_age_of_the_oldest(producer: JobProducer) -> None:
    producer.put(make_job("a"))
    time.sleep(0.2)
    producer.put(make_job("b"))
    assert 0.19 <= producer.status().oldest_age_s < 20


def test_a_full_server_is_a_clear_error(producer: JobProducer, server: EmbeddedServer) -> None:
    """A server without memory refuses the put; what it holds can still be worked off."""
    with raw_client(server) as client:
        client.config_set("maxmemory", "1mb")
        with pytest.raises(QueueFull, match="out of memory"):
            producer.put(make_job("a", size=200_000))


def test_while_the_server_is_away_a_put_fails_at_once(producer: JobProducer, server: EmbeddedServer) -> None:
    """Q6: the pipeline behind `put` never hangs on a dead queue; waiting for each would be minutes."""
    kill_server(server)
    started = time.monotonic()
    for number in range(200):
        with pytest.raises(QueueUnavailable):
            producer.put(make_job(f"{number}"))
    assert time.monotonic() - started < 100 * FAST.command_timeout_s


def test_what_breaks_a_put_half_way_leaves_nothing_to_the_next(
    server: EmbeddedServer, producer: JobProducer
) -> None:
    """A transaction is begun before its commands are there: they may be none, the connection may be gone."""
    producer.put(make_job("first"))
    for number in range(3):
        with pytest.raises(UnicodeEncodeError):
            producer.put(make_job("\ud83d"))
        assert producer.put(make_job(f"after-{number}"))
        with raw_client(server) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        assert producer.put(make_job(f"again-{number}"))
    assert (producer.status().num_put, producer.status().num_duplicates) == (7, 0)
    with raw_client(server) as client:
        assert len(body_sizes(client)) == 7


def test_a_producer_that_closes_in_a_transaction_frees_its_connection(
    server: EmbeddedServer, producer: JobProducer
) -> None:
    producer.put(make_job("first"))
    producer._pipe.begin()
    producer._pipe.close()
    assert producer.put(make_job("second"))
    assert producer.status().depth == 2
