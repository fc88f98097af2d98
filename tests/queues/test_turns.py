"""Whose turn it is: newest in place of older, fair shares, and a flooding key that loses its own jobs."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from queues import DeadLetters, Delivery, EmbeddedServer, JobConsumer, JobProducer, ResultReader, forget_queue
from tests.queues.helpers import FAST, body_sizes, die, make_job, raw_client

QUIET = [f"quiet-{number}" for number in range(7)]


def names(deliveries: list[Delivery]) -> list[str]:
    return [delivery.job.job_id for delivery in deliveries]


def check_books(server: EmbeddedServer) -> None:
    """Lines, loads and slots tell of exactly the entries that wait, bodies and bytes of all."""
    with raw_client(server) as client:
        own = f"{{{FAST.stream}}}:".encode()
        groups = client.xinfo_groups(FAST.stream)
        rows = client.xpending_range(FAST.stream, FAST.group, "-", "+", 9999) if groups else []
        pending = {row["message_id"] for row in rows}
        entries = dict(client.xrange(FAST.stream))
        waiting = {i: f for i, f in entries.items() if i not in pending}
        keys = {fields[b"key"] for fields in waiting.values()}
        assert set(client.zrange(own + b"turns", 0, -1)) == keys
        lines = {key: client.zrange(own + b"line:" + key, 0, -1) for key in keys}
        assert sorted(entry for line in lines.values() for entry in line) == sorted(waiting)
        assert client.hgetall(own + b"slots") == {i: f.get(b"slot", b"") for i, f in waiting.items()}
        sizes, counts = body_sizes(client), client.hgetall(own + b"counts")
        assert set(sizes) == set(entries)
        assert int(counts.get(b"bytes", 0)) == sum(sizes.values())
        loads = {b"load:" + key: b"%d" % sum(sizes[i] for i in line) for key, line in lines.items()}
        assert {name: load for name, load in counts.items() if name.startswith(b"load:")} == loads
        assert {key.removeprefix(own + b"line:") for key in client.keys(own + b"line:*")} == keys


async def test_the_newest_replaces_the_waiting_one(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    """V15: what is worked on is fresh, what it replaced counted, and the wait for a turn remembered."""
    producer.put(make_job("1", slot="cam"))
    time.sleep(0.2)
    for name in ("2", "3", "4"):
        assert producer.put(make_job(name, slot="cam"))
    status = producer.status()
    assert (status.depth, status.waiting, status.dropped) == (1, {"cam": 1}, {"replaced": 3})
    assert status.num_bytes == 100
    assert status.longest_wait_s >= 0.2
    assert not producer.put(make_job("2", slot="cam"))
    [delivery] = await consumer.take(4)
    assert (delivery.job.job_id, delivery.job.slot, delivery.num_replaced) == ("4", "cam", 3)
    assert delivery.waited_ms >= 200
    assert delivery.queue_ms < delivery.waited_ms
    check_books(server)


async def test_a_job_in_hand_is_not_replaced(producer: JobProducer, consumer: JobConsumer) -> None:
    producer.put(make_job("1", slot="cam"))
    [in_hand] = await consumer.take(1)
    producer.put(make_job("2", slot="cam"))
    assert await consumer.finish(in_hand, b"result")
    assert names(await consumer.take(1)) == ["2"]
    assert producer.status().num_dropped == 0


async def test_only_the_same_slot_of_the_same_key_is_replaced(
    producer: JobProducer, consumer: JobConsumer
) -> None:
    """Distinct visits of one camera may each keep a place, and jobs without a slot keep theirs."""
    for name, key, slot in [
        ("a1", "a", "a/1"),
        ("a2", "a", "a/2"),
        ("b1", "b", "a/1"),
        ("free", "a", None),
        ("free too", "a", None),
        ("a1 again", "a", "a/1"),
    ]:
        producer.put(make_job(name, key=key, slot=slot))
    assert names(await consumer.take(9)) == ["a1 again", "b1", "a2", "free", "free too"]


async def test_more_than_one_may_wait(server: EmbeddedServer) -> None:
    """With a depth of 2 the two newest wait, in their order and at the places of the old ones."""
    config = replace(FAST, max_per_slot=2)
    with JobProducer(server.url, config) as producer:
        for name in ("1", "2"):
            producer.put(make_job(name, slot="a"))
        producer.put(make_job("between", slot="b"))
        for name in ("3", "4", "5"):
            producer.put(make_job(name, slot="a"))
        check_books(server)
        async with JobConsumer(server.url, config) as consumer:
            assert names(await consumer.take(9)) == ["4", "5", "between"]
        assert producer.status().dropped == {"replaced": 3}


async def test_replacing_costs_a_key_no_turn(producer: JobProducer, consumer: JobConsumer) -> None:
    """Q10, the other way round: who is replaced all the time is served too."""
    producer.put(make_job("busy", key="busy", slot="busy"))
    for key in QUIET:
        producer.put(make_job(key, key=key, slot=key))
    for number in range(20):
        producer.put(make_job(f"busy {number}", key="busy", slot="busy"))
    assert names(await consumer.take(1)) == ["busy 19"]


async def test_keys_take_turns(server: EmbeddedServer, producer: JobProducer) -> None:
    """Q10: one busy camera, seven quiet ones, two workers: a round serves each once, oldest first."""
    for number in range(40):
        producer.put(make_job(f"busy-{number}", key="busy"))
    for number in range(2):
        for key in QUIET:
            producer.put(make_job(f"{key}-{number}", key=key))
    async with JobConsumer(server.url, FAST) as one, JobConsumer(server.url, FAST) as other:
        taken = [name for _ in range(8) for worker in (one, other) for name in names(await worker.take(1))]
    first, second = taken[:8], taken[8:]
    assert first == ["busy-0", *(f"{key}-0" for key in QUIET)]
    assert second == ["busy-1", *(f"{key}-1" for key in QUIET)]
    check_books(server)


@pytest.mark.parametrize("limit", [{"max_len": 20}, {"max_bytes": 20_000}])
async def test_who_floods_a_full_queue_loses_its_own(server: EmbeddedServer, limit: dict[str, int]) -> None:
    """Q10, Q1: by length and by bytes the quiet ones keep what they have."""
    with JobProducer(server.url, replace(FAST, **limit)) as producer:  # type: ignore[arg-type]
        for key in QUIET:
            producer.put(make_job(key, key=key, size=1000))
        for number in range(60):
            producer.put(make_job(f"busy-{number}", key="busy", size=1000))
        for key in QUIET:
            producer.put(make_job(f"{key} again", key=key, size=1000))
        status = producer.status()
    assert status.waiting == {"busy": 6} | dict.fromkeys(QUIET, 2)
    assert status.dropped == {"overflow": 54}
    assert status.num_bytes == 20_000
    check_books(server)


async def test_keys_can_be_held_back(producer: JobProducer, consumer: JobConsumer) -> None:
    """Fewer frames of a camera: its turn passes, its newest job waits."""
    for key in ("a", "b"):
        producer.put(make_job(key, key=key, slot=key))
    time.sleep(0.1)
    assert names(await consumer.take(9, hold={"a"})) == ["b"]
    assert list(consumer.waits_s) == ["a"]
    assert await consumer.take(9, 0, hold={"a"}) == []
    assert names(await consumer.take(9)) == ["a"]


async def test_how_long_the_others_wait(producer: JobProducer, consumer: JobConsumer) -> None:
    for key in ("a", "b"):
        producer.put(make_job(key, key=key))
    time.sleep(0.1)
    await consumer.take(1)
    assert list(consumer.waits_s) == ["b"]
    assert consumer.waits_s["b"] >= 0.1


async def test_late_jobs_cost_no_turn(producer: JobProducer, consumer: JobConsumer) -> None:
    """Expired work is passed over within one take, counted, and replaced without being `replaced`."""
    producer.put(make_job("late", key="a", expires_in_s=-1))
    producer.put(make_job("good", key="a", expires_in_s=600))
    producer.put(make_job("other", key="b"))
    producer.put(make_job("too late", key="c", expires_in_s=-1, slot="c"))
    producer.put(make_job("newer", key="c", expires_in_s=600, slot="c"))
    time.sleep(0.05)
    assert names(await consumer.take(9)) == ["good", "other", "newer"]
    [(key, waited_s)] = consumer.expired_s
    assert key == "a"
    assert 0.05 <= waited_s < 20
    assert producer.status().dropped == {"expired": 2}


async def test_a_job_can_be_dropped_by_its_worker(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    producer.put(make_job("a"))
    [delivery] = await consumer.take(1)
    assert await consumer.drop(delivery, "too_late")
    assert not await consumer.drop(delivery, "too_late")
    status = producer.status()
    assert (status.is_idle, status.dropped, status.num_bytes) == (True, {"too_late": 1}, 0)


@pytest.mark.parametrize("loss", ["line", "group"])
async def test_lost_lines_are_made_again(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer, loss: str
) -> None:
    """Q6: jobs of an older version, a destroyed group, an evicted index: the stream is what counts."""
    for name in ("a", "b"):
        producer.put(make_job(name, slot="cam" if name == "b" else None))
    if loss == "group":
        await consumer.take(1)
        with raw_client(server) as client:
            client.xgroup_destroy(FAST.stream, FAST.group)
    else:
        with raw_client(server) as client:
            client.delete(*client.keys(f"{{{FAST.stream}}}:[lst]*"))
    taken = names(await consumer.take(9, 20_000))
    assert set(taken) == {"a", "b"}
    check_books(server)


@pytest.mark.parametrize("loss", ["trimmed", "deleted"])
async def test_jobs_whose_stream_is_gone_are_counted(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer, loss: str
) -> None:
    """Q1, Q4: somebody emptied the stream; nothing is left of what waited, whoever comes first then."""
    for name in ("a", "b", "c"):
        producer.put(make_job(name, key=name))
    with raw_client(server) as client:
        if loss == "trimmed":
            client.xtrim(FAST.stream, maxlen=0, approximate=False)
        else:
            client.delete(FAST.stream)
    producer.put(make_job("d", key="d"))
    status = producer.status()
    assert (status.num_put, status.depth, status.dropped) == (4, 1, {"expired": 3})
    check_books(server)
    assert names(await consumer.take(9, 20_000)) == ["d"]


async def test_jobs_that_an_older_version_left(server: EmbeddedServer, consumer: JobConsumer) -> None:
    """It had their bodies in the stream: they are worked on, and the books hold afterwards."""
    fields = {"job_id": "old", "key": "cam", "created_at": 1, "expires_at": "", "deadline_ms": ""}
    with raw_client(server) as client:
        for name in ("old", "older"):
            entry_id = client.xadd(FAST.stream, fields | {"job_id": name, "body": name})
            client.zadd(FAST.key("line:cam"), {entry_id: time.time() * 1e6})
            client.zadd(FAST.key("turns"), {"cam": 1.0}, nx=True)
            client.hset(FAST.key("slots"), entry_id, "")
    taken = await consumer.take(2)
    assert [(delivery.job.job_id, delivery.job.body) for delivery in taken] == [
        ("old", b"old"),
        ("older", b"older"),
    ]
    for delivery in taken:
        assert await consumer.finish(delivery, b"result")
    check_books(server)


_WHOLE = {"job_id": "odd", "key": "cam", "created_at": "1.5", "expires_at": "", "body": "frame"}


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"some": "thing"}, "it has no field job_id"),
        ({name: text for name, text in _WHOLE.items() if name != "expires_at"}, "it has no field expires_at"),
        (_WHOLE | {"created_at": "0x10"}, "its created_at is no number"),
        (_WHOLE | {"expires_at": "soon"}, "its expires_at is no number"),
        (_WHOLE | {"num_replaced": "1.5"}, "its num_replaced is no number"),
    ],
)
async def test_what_is_no_job_holds_up_nobody(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer, fields: dict[str, str], fault: str
) -> None:
    """Q3: somebody else wrote into the stream; the dead letter says what is missing."""
    with raw_client(server) as client:
        client.xadd(FAST.stream, fields)
    producer.put(make_job("good"))
    assert names(await consumer.take(4, 20_000)) == ["good"]
    with DeadLetters(server.url, FAST) as letters:
        [letter] = letters.newest()
        assert (letter.reason, letter.key) == (f"not a job: {fault}", fields.get("key", ""))
        assert letter.num_bytes == len(fields.get("body", ""))
        assert letters.status().dropped == {"dead": 1}
    check_books(server)


async def test_a_job_in_another_encoding_is_worked_on(server: EmbeddedServer, consumer: JobConsumer) -> None:
    with raw_client(server) as client:
        client.xadd(FAST.stream, _WHOLE | {"key": "caf\u00e9".encode("latin-1")})
    [delivery] = await consumer.take(4, 20_000)
    assert (delivery.job.key, delivery.job.body) == ("caf\ufffd", b"frame")
    assert await consumer.finish(delivery, b"result")
    check_books(server)


async def test_a_forgotten_queue_leaves_nothing(
    server: EmbeddedServer, producer: JobProducer, consumer: JobConsumer
) -> None:
    for number in range(4):
        producer.put(make_job(f"{number}", key=f"{number % 2}", slot=f"{number}"))
    [delivery] = await consumer.take(1)
    await consumer.finish(delivery, b"result")
    await forget_queue(server.url, FAST)
    with raw_client(server) as client:
        assert [key for key in client.keys("*") if b":job:" not in key] == []


async def test_waiting_workers_are_woken_by_a_put(server: EmbeddedServer, producer: JobProducer) -> None:
    """Several workers wait; each job wakes one in time, and none sleeps over a job."""
    config = replace(FAST, visibility_s=600.0, max_block_s=60.0, read_margin_s=5.0)
    async with JobConsumer(server.url, config) as one, JobConsumer(server.url, config) as other:
        takes = [asyncio.create_task(worker.take(1, 60_000)) for worker in (one, other)]
        started = time.monotonic()
        for number in range(2):
            await asyncio.to_thread(producer.put, make_job(f"{number}"))
        taken = await asyncio.wait_for(asyncio.gather(*takes), 30)
        assert sorted(names(taken[0] + taken[1])) == ["0", "1"]
        assert time.monotonic() - started < 30


async def test_the_books_hold_whatever_happens(server: EmbeddedServer) -> None:
    """Q1, Q2, Q4, Q5, Q10: random puts, takes, ends and crashes: nothing is lost that is not counted."""
    config = replace(FAST, max_len=12, max_per_slot=2, visibility_s=0.05, max_deliveries=3)
    choose, fates, held, num_put = random.Random(3), Counter[str](), [], 0
    with JobProducer(server.url, config) as producer:
        worker = JobConsumer(server.url, config)
        await worker.start()
        for number in range(300):
            action = choose.choice(["put", "put", "put", "take", "finish", "fail", "drop", "crash"])
            if action == "put":
                key, slot = choose.choice("aab"), choose.choice(["", "1", "2"])
                late = choose.choice([-1.0, None, None, 600.0])
                num_put += producer.put(make_job(f"{number}", key=key, slot=slot, expires_in_s=late))
            elif action == "take":
                held += await worker.take(choose.randint(1, 4), 0)
            elif action == "crash" and not number % 3:
                await die(worker)
                worker, held = JobConsumer(server.url, config), []
                await worker.start()
            elif held and action in ("finish", "fail", "drop"):
                delivery = held.pop(choose.randrange(len(held)))
                call = {"finish": worker.finish, "fail": worker.fail, "drop": worker.drop}[action]
                fates[action] += await call(delivery, "end" if action != "finish" else b"end")  # type: ignore[operator]
            if not number % 25:
                check_books(server)
        check_books(server)
        status = producer.status()
        await worker.close()
    assert status.num_put == num_put
    assert status.num_put == status.num_done + status.num_dropped + status.depth + status.pending
    assert {"replaced", "expired", "overflow", "end"} <= set(status.dropped)
    async with ResultReader(server.url, config, stream=config.dropped) as reader:
        told = await reader.read("0-0", max_results=1000)
    assert len({dropped.job_id for dropped in told}) == len(told)
    assert Counter(dropped.body.decode().partition(":")[0] for dropped in told) == status.dropped
