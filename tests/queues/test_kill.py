"""Producers and workers are killed at any point, again and again."""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

import pytest

from queues import EmbeddedServer, JobConsumer, ResultReader
from tests.children import forkserver
from tests.queues import kill_targets
from tests.queues.helpers import body_sizes, raw_client
from tests.queues.kill_targets import CONFIG
from tests.queues.test_workers import collect_all

NUM_KILLS = int(os.environ.get("APPLIANCE_TEST_KILLS", "40"))
PATIENCE_S = 300


@dataclass
class Victim:
    """A process that is started again after each kill; `told` is all that any of its lives acknowledged."""

    context: ForkServerContext
    arguments: Callable[["Victim"], tuple[Callable[..., None], tuple[object, ...]]]
    told: list[int] = field(default_factory=list)
    _process: BaseProcess | None = None
    _pipe: Connection | None = None

    def start(self) -> None:
        target, arguments = self.arguments(self)
        self._pipe, writing = self.context.Pipe(duplex=False)
        self._process = self.context.Process(target=target, args=(*arguments, writing))
        self._process.start()
        writing.close()

    def kill(self, after_s: float, *, is_early: bool) -> None:
        """Kill it `after_s` after its start, or after it has acknowledged something."""
        assert self._pipe
        assert self._process
        if not is_early:
            self._pipe.poll(PATIENCE_S)
        time.sleep(after_s)
        self._process.kill()
        self._process.join()
        with suppress(EOFError), self._pipe:
            while True:
                self.told.append(int(self._pipe.recv_bytes()))


def victims(server: EmbeddedServer, context: ForkServerContext) -> list[Victim]:
    def producing(name: str) -> Victim:
        def arguments(victim: Victim) -> tuple[Callable[..., None], tuple[object, ...]]:
            return kill_targets.produce, (server.url, name, victim.told[-1] + 1 if victim.told else 0)

        return Victim(context, arguments)

    workers = [Victim(context, lambda _: (kill_targets.work, (server.url,))) for _ in range(2)]
    return [producing("a"), producing("b"), *workers]


def kill_again_and_again(targets: list[Victim], choice: random.Random) -> None:
    for target in targets:
        target.start()
    for number in range(NUM_KILLS):
        target = choice.choice(targets)
        target.kill(choice.expovariate(50), is_early=number % 3 == 0)
        target.start()
    for target in targets:
        # why: a worker whom the producers left nothing would be waited for in vain
        target.kill(0, is_early=True)


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
async def test_no_job_is_lost_and_no_result_doubled(server: EmbeddedServer) -> None:
    """Q2, Q5: what `put` has returned for has one result, however often producers and workers are killed."""
    with forkserver("tests.queues.kill_targets") as context:
        targets = victims(server, context)
        kill_again_and_again(targets, random.Random(5))
    async with JobConsumer(server.url, CONFIG) as consumer, ResultReader(server.url, CONFIG) as reader:
        while not (status := await consumer.status()).is_idle:
            for delivery in await consumer.take(8, 200):
                await consumer.finish(delivery, delivery.job.job_id.encode())
        results = Counter(result.job_id for result in await collect_all(reader))
    with raw_client(server) as client:
        assert body_sizes(client) == {}
    acknowledged = {f"{name}-{n}" for name, target in zip("ab", targets, strict=False) for n in target.told}
    assert len(acknowledged) > NUM_KILLS / 2
    assert not acknowledged - set(results)
    assert set(results.values()) == {1}
    assert (status.num_dropped, status.dead) == (0, 0)
    assert status.num_put == status.num_done == results.total()
