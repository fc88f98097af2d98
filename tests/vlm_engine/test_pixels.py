"""What the front holds of pictures: those at hand, none for as long as an answer takes, nothing in cycles."""

import asyncio
import gc
import random
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from tests.vlm_engine.test_async_engine import config_of, until
from tests.vlm_engine.test_engine import ask, picture
from vlm_engine import EngineProcess, TokenEvent

SIDE = 512
LARGE = SIDE * SIDE
"""Numbers of which a picture's tensor has more, and no other tensor here."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(qwen3_vl_checkpoint: Path) -> AsyncIterator[EngineProcess]:
    engine = EngineProcess(config_of(qwen3_vl_checkpoint))
    await engine.start()
    yield engine
    await engine.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What only the collector would find stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_large() -> int:
    return sum(type(each) is torch.Tensor and each.numel() > LARGE for each in gc.get_objects())


def stream_of(
    engine: EngineProcess, name: str, seed: int, kept: list[weakref.ref[Any]], **more: Any
) -> AsyncIterator[TokenEvent]:
    """The events of a request with a large picture, which nobody here holds."""
    image = picture(seed, (SIDE, SIDE))
    kept.append(weakref.ref(image))
    return engine.generate(ask(name, image, "hello", **more))


@pytest.mark.usefixtures("no_collector")
async def test_pixels_are_gone_once_the_engine_has_them(engine: EngineProcess) -> None:
    kept: list[weakref.ref[Any]] = []
    streams = [stream_of(engine, f"r{i}", i, kept, max_tokens=700) for i in range(2)]
    for stream in streams:
        await anext(stream)
    await until(lambda: num_large() == 0)
    assert engine.stats().num_running
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]
    del stream, streams
    await until(lambda: not any(image() for image in kept))


@pytest.mark.usefixtures("no_collector")
async def test_so_many_are_prepared_at_once_and_no_more(
    engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, going_on, num_sent, most = engine._send, asyncio.Event(), 0, 0

    async def slow(frames: list[Any]) -> None:
        nonlocal num_sent
        num_sent += 1
        await going_on.wait()
        await send(frames)

    async def first(number: int) -> None:
        async for _ in stream_of(engine, f"r{number}", number, [], max_tokens=1):
            pass

    monkeypatch.setattr(engine, "_send", slow)
    tasks = [asyncio.create_task(first(number)) for number in range(8)]
    await until(lambda: num_sent == 2)
    for _ in range(50):
        await asyncio.sleep(0.01)
        most = max(most, num_large())
    going_on.set()
    await asyncio.gather(*tasks)
    assert (most, num_sent) == (2, 8)
    await until(lambda: num_large() == 0)


@pytest.mark.usefixtures("no_collector")
async def test_who_cancels_leaves_nothing(engine: EngineProcess) -> None:
    """In any state: 40 requests, each gone after another while."""
    rng, kept = random.Random(5), list[weakref.ref[Any]]()

    async def read(number: int) -> None:
        async for _ in stream_of(engine, f"r{number}", number, kept, max_tokens=200):
            pass

    tasks = []
    for number in range(40):
        tasks.append(asyncio.create_task(read(number)))
        await asyncio.sleep(rng.random() * 0.03)
        if len(tasks) > 4:
            tasks.pop(rng.randrange(len(tasks))).cancel()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    del tasks, task
    await until(lambda: num_large() == 0 and not any(image() for image in kept))
    await until(lambda: engine.stats().num_free_blocks == engine.stats().num_blocks)
    assert len(kept) == 40
