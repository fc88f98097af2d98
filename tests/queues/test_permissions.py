"""A user with what is documented and no more: all goes; with less: the start says what is missing."""

import contextlib
from collections.abc import Iterator

import pytest

from queues import (
    DeadLetters,
    EmbeddedServer,
    JobConsumer,
    JobProducer,
    QueueConfig,
    ResultReader,
    ServerRefuses,
    forget_queue,
    rules,
)
from queues.permissions import COMMANDS
from tests.queues.helpers import FAST, die, drain, make_job, raw_client


@contextlib.contextmanager
def limited(server: EmbeddedServer, *words: str) -> Iterator[str]:
    """The address for a user with these rules; the server has to tell afterwards that nothing was refused."""
    with raw_client(server) as client:
        client.execute_command("ACL", "SETUSER", "vision", "reset", "on", ">hush", *words)
        client.acl_log_reset()
        yield server.url.replace("unix://", "unix://vision:hush@")


async def test_the_documented_rules_are_enough(server: EmbeddedServer) -> None:
    with limited(server, *rules(FAST)) as url:
        await everything(url, FAST)
        with raw_client(server) as client:
            refused = {entry["object"] for entry in client.acl_log()}
        assert refused <= {"client|setinfo"}, "the client library's own"


async def everything(url: str, config: QueueConfig) -> None:
    """Each call of the library, and each course that a job may take."""
    with JobProducer(url, config) as producer, DeadLetters(url, config) as letters:
        async with JobConsumer(url, config) as consumer, ResultReader(url, config) as reader:
            producer.tell("event", "cam", b"news")
            producer.put(make_job("replaced", slot="cam"))
            producer.put(make_job("a", slot="cam"))
            producer.put(make_job("a"))
            producer.put(make_job("late", expires_in_s=0.001))
            for number in range(3):
                producer.put(make_job(f"b-{number}", key="yard"))
            dying = JobConsumer(url, config)
            await dying.start()
            assert await dying.take(1)
            await die(dying)
            taken = await drain(consumer)
            assert len(taken) == 4
            await consumer.finish(taken[0], b"text")
            await consumer.fail(taken[1], "again")
            await consumer.drop(taken[2], "expired")
            while not letters.newest():
                for delivery in await consumer.take(4, 5_000):
                    await consumer.fail(delivery, "broken")
            assert await reader.last_id() != "0-0"
            assert len(await reader.read("0-0")) == 1
            producer.permit("cam", "masked")
            for letter in letters.newest():
                assert letters.retry(letter.entry_id)
            assert not letters.drop("1-1")
            assert letters.status().refusal is None
            await consumer.permit("yard", "")
            for delivery in await consumer.take(4, 500):
                assert not await consumer.is_withdrawn(delivery)
            small = QueueConfig(max_len=1)
            with JobProducer(url, small) as other:
                other.put(make_job("overflow-1"))
                other.put(make_job("overflow-2", key="yard"))
    await forget_queue(url, config)


@pytest.mark.parametrize("command", [*COMMANDS])
async def test_each_command_that_is_missing_is_named(server: EmbeddedServer, command: str) -> None:
    with limited(server, *rules(FAST), f"-{command}") as url:
        needs = pytest.raises(ServerRefuses, match=command.replace("|", "."))
        with needs:
            JobProducer(url, FAST)
        with needs:
            DeadLetters(url, FAST)
        with needs:
            async with JobConsumer(url, FAST):
                pass


async def test_keys_that_are_missing_are_named(server: EmbeddedServer) -> None:
    commands = rules(FAST)[2:]
    with (
        limited(server, f"~{FAST.stream}", *commands) as url,
        pytest.raises(ServerRefuses, match=r"needs: ~\{appliance:jobs\}:\*: add it"),
    ):
        JobProducer(url, FAST)
    with (
        limited(server, "~other:*", *commands) as url,
        pytest.raises(ServerRefuses, match=r"needs: ~appliance:jobs ~\{appliance:jobs\}:\*: add it"),
    ):
        JobProducer(url, FAST)
