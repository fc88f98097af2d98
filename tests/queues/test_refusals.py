"""A server that answers and does not do it now: busy, full, not permitted. All goes on after it."""

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from queues import (
    EmbeddedServer,
    JobConsumer,
    JobProducer,
    QueueError,
    QueueFull,
    QueueUnavailable,
    ResultReader,
    ServerRefuses,
)
from tests.queues.helpers import PATIENCE_S, make_job, raw_client, wait_until

State = Callable[[EmbeddedServer, redis.Redis], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def busy(server: EmbeddedServer, client: redis.Redis) -> Iterator[None]:
    client.config_set("busy-reply-threshold", 50)

    def spin() -> None:
        with raw_client(server) as other, contextlib.suppress(redis.RedisError):
            other.eval("while true do end", 0)

    spinning = threading.Thread(target=spin)
    spinning.start()
    wait_until(lambda: _answers(client, "BUSY"))
    yield
    client.execute_command("SCRIPT", "KILL")
    spinning.join()


def _answers(client: redis.Redis, word: str) -> bool:
    try:
        client.ping()
    except redis.RedisError as error:
        return word in str(error)
    return False


@contextlib.contextmanager
def replica(_: EmbeddedServer, client: redis.Redis) -> Iterator[None]:
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    client.config_set("replica-serve-stale-data", "no")
    yield
    client.execute_command("REPLICAOF", "NO", "ONE")


@contextlib.contextmanager
def read_only(_: EmbeddedServer, client: redis.Redis) -> Iterator[None]:
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    yield
    client.execute_command("REPLICAOF", "NO", "ONE")


@contextlib.contextmanager
def no_replicas(_: EmbeddedServer, client: redis.Redis) -> Iterator[None]:
    client.config_set("min-replicas-to-write", 1)
    yield
    client.config_set("min-replicas-to-write", 0)


@contextlib.contextmanager
def full_disk(_: EmbeddedServer, client: redis.Redis) -> Iterator[None]:
    """It saves, and cannot: its file's name is a folder's."""
    folder = Path(str(client.config_get("dir")["dir"]), "dump.rdb")
    folder.mkdir()
    client.config_set("save", "3600 1")
    client.bgsave()
    wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
    yield
    folder.rmdir()
    client.bgsave()
    wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "ok")


@contextlib.contextmanager
def full_memory(_: EmbeddedServer, client: redis.Redis) -> Iterator[None]:
    (before,) = client.config_get("maxmemory").values()
    client.config_set("maxmemory", 1)
    yield
    client.config_set("maxmemory", before)


@contextlib.contextmanager
def no_commands(_: EmbeddedServer, client: redis.Redis) -> Iterator[None]:
    client.execute_command("ACL", "SETUSER", "default", "-@stream", "-@string")
    yield
    client.execute_command("ACL", "SETUSER", "default", "+@all")


@contextlib.contextmanager
def no_keys(_: EmbeddedServer, client: redis.Redis) -> Iterator[None]:
    client.execute_command("ACL", "SETUSER", "default", "resetkeys")
    yield
    client.execute_command("ACL", "SETUSER", "default", "allkeys")


@contextlib.contextmanager
def password(server: EmbeddedServer, client: redis.Redis) -> Iterator[None]:
    """Everybody has to log in again, with a password that only the operator knows."""
    client.execute_command("ACL", "SETUSER", "default", "resetpass", ">other")
    client.client_kill_filter(_type="normal", skipme=True)
    yield
    client.execute_command("ACL", "SETUSER", "default", "nopass")


STATES = {
    "BUSY": (busy, QueueUnavailable),
    "read only replica|MASTER is down": (replica, QueueUnavailable),
    "read only replica": (read_only, QueueUnavailable),
    "NOREPLICAS": (no_replicas, QueueUnavailable),
    "MISCONF": (full_disk, ServerRefuses),
    "out of memory": (full_memory, QueueFull),
    "does not permit": (no_commands, ServerRefuses),
    "key": (no_keys, ServerRefuses),
    "password": (password, ServerRefuses),
}


@pytest.mark.parametrize("text", STATES)
async def test_it_is_told_waited_for_and_over(
    server: EmbeddedServer,
    producer: JobProducer,
    consumer: JobConsumer,
    reader: ResultReader,
    text: str,
) -> None:
    state, kind = STATES[text]
    producer.put(make_job("first"))
    producer.put(make_job("second"))
    [first] = await consumer.take(1)
    reading = asyncio.create_task(reader.read("0-0", block_ms=1e3 * PATIENCE_S))
    with raw_client(server) as client, state(server, client):
        with pytest.raises(kind, match=text):
            producer.put(make_job("third"))
        finishing = asyncio.create_task(consumer.finish(first, b"text"))
        if kind is not QueueFull:
            assert await consumer.take(1, block_ms=300) == []
            assert consumer.outage.num_failures
            assert consumer.outage.reason
            assert not finishing.done()
        told = await _status_text(consumer)
        assert re.search(text, told), told
    assert await finishing
    [result] = await reading
    assert (result.job_id, result.body) == ("first", b"text")
    await asyncio.to_thread(wait_until, lambda: _puts(producer, "third"))
    taken: set[str] = set()
    while taken < {"second", "third"}:
        for delivery in await consumer.take(4, block_ms=2_000):
            taken.add(delivery.job.job_id)
            assert await consumer.finish(delivery, b"text")
    status = await consumer.status()
    assert (status.num_done, status.refusal, status.is_idle) == (3, None, True)


async def _status_text(consumer: JobConsumer) -> str:
    """What a person is told of the queue: why there is no status, or why it takes no jobs."""
    try:
        refusal = (await consumer.status()).refusal or ""
    except QueueError as error:
        return str(error)
    return "out of memory" if refusal.startswith("OOM ") else refusal


def _puts(producer: JobProducer, job_id: str) -> bool:
    try:
        producer.put(make_job(job_id))
    except QueueError:
        return False
    return True


async def test_what_is_neither_busy_nor_refused_is_raised(
    server: EmbeddedServer, consumer: JobConsumer
) -> None:
    """Another program's key under a name of ours is a mistake that waiting does not cure."""
    with raw_client(server) as client:
        client.delete(consumer.config.stream)
        client.set(consumer.config.stream, os.urandom(3))
    with pytest.raises(QueueError, match="WRONGTYPE"):
        await consumer.take(1, block_ms=1_000)
