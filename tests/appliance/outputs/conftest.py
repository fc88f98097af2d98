"""A store in memory, outputs that run beside a test, and pauses that a test can wait for."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from typing import Any

import pytest

from appliance.events import EventStore
from appliance.output_settings import OutputSettings
from appliance.outputs import delivery
from appliance.outputs.runner import Outputs
from appliance.tasks import end_all
from tests.appliance.outputs.receiver import Receiver, receiving

RunOutputs = Callable[..., AbstractAsyncContextManager[Outputs]]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(delivery, "LONGEST_PAUSE_S", 0.1)


@pytest.fixture
def store() -> Iterator[EventStore]:
    with closing(EventStore()) as store:
        yield store


@pytest.fixture
def run_outputs(store: EventStore) -> RunOutputs:
    """Outputs of these settings, running while the context lasts."""

    @asynccontextmanager
    async def run(*, cameras: Sequence[str] = ("street",), **settings: Any) -> AsyncIterator[Outputs]:
        outputs = Outputs(OutputSettings(**settings), store, cameras)
        task = asyncio.create_task(outputs.run())
        try:
            yield outputs
            assert not task.done(), task.result()
        finally:
            await end_all([task])

    return run


async def until_async(what: Callable[[], Any], timeout_s: float = 120.0) -> None:
    """Wait until `what` is true; fails the test after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not what():
            await asyncio.sleep(0.01)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def webhook(receiver: Receiver, **settings: Any) -> dict[str, Any]:
    return {"url": f"{receiver.url}/hook?token=hush", "timeout_s": 60, **settings}


async def sent(store: EventStore, number: int, name: str = "webhook") -> None:
    await until_async(lambda: store.outbox.statuses()[name].num_sent >= number)
