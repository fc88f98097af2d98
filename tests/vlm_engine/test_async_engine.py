"""The engine's front: streams, cancels and health, with the loop in its own thread."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image

from tests.vlm_engine.test_engine import ask, picture
from vlm_engine import (
    AsyncEngine,
    Engine,
    EngineConfig,
    EngineProcess,
    EngineStopped,
    GenerationRequest,
    ModelLoadError,
    RequestError,
    StructuredOutput,
    TokenEvent,
    async_engine,
)
from vlm_engine.models import load_model


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(str(folder), dtype="float32", device="cpu", kv_cache_tokens=2048)


Client = AsyncEngine | EngineProcess
PATIENCE_S = 120.0


@pytest_asyncio.fixture(
    params=[AsyncEngine, EngineProcess], ids=["thread", "process"], loop_scope="module", scope="module"
)
async def engine(request: pytest.FixtureRequest, qwen3_vl_checkpoint: Path) -> AsyncIterator[Client]:
    engine: Client = request.param(config_of(qwen3_vl_checkpoint))
    await engine.start()
    yield engine
    await engine.close()


async def collect(engine: Client, *args: object, **more: object) -> list[TokenEvent]:
    return [event async for event in engine.generate(ask(*args, **more))]  # type: ignore[arg-type]


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def until(predicate: object, timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not predicate():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_streams_give_what_the_synchronous_engine_gives(
    engine: AsyncEngine, qwen3_vl_checkpoint: Path
) -> None:
    config = config_of(qwen3_vl_checkpoint)
    plain = Engine(config, model=load_model(config))
    wanted = [plain.generate(ask("x", picture(i), f"question {i}", max_tokens=20)) for i in range(4)]
    streams = await asyncio.gather(
        *(collect(engine, f"r{i}", picture(i), f"question {i}", max_tokens=20) for i in range(4))
    )
    assert ["".join(event.text for event in stream) for stream in streams] == wanted
    assert all(stream[-1].finish_reason == "length" for stream in streams)


async def test_closing_the_stream_aborts_the_request(engine: Client) -> None:
    """E20, A1: in decode."""
    stream = engine.generate(ask("gone", picture(), max_tokens=900))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: engine.stats().num_running == 0 and engine.stats().num_steps > 0)
    await until(lambda: engine.stats().num_free_blocks == engine.stats().num_blocks)
    assert (await collect(engine, "gone", "again"))[-1].finish_reason == "length"


async def test_cancelled_while_preprocessing_never_runs(engine: Client) -> None:
    """E20: the task is cancelled at once."""
    num_encoded = engine.stats().num_encoded_images
    task = asyncio.create_task(collect(engine, "gone", picture(99, size=(320, 320))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await collect(engine, "next", "hello"))[-1].usage.completion_tokens == 6  # type: ignore[union-attr]
    assert engine.stats().num_encoded_images == num_encoded


async def test_a_slow_reader_gets_merged_deltas_and_loses_nothing(engine: Client) -> None:
    """What began first has all its tokens when what came later, and is as long, was told its last."""
    stream = engine.generate(ask("slow", "hello", max_tokens=60))
    events = [await anext(stream)]
    fast = await collect(engine, "fast", "hello", max_tokens=60)
    events += [event async for event in stream]
    assert sum(len(event.token_ids) for event in events) == 60
    assert "".join(event.text for event in events) == "".join(event.text for event in fast)
    assert len(events) < 5


async def test_bad_input_raises_before_anything_is_queued(engine: Client) -> None:
    with pytest.raises(RequestError):
        await collect(engine, "bad", Image.new("RGB", (1093, 5)))
    await until(lambda: engine.stats().num_waiting == engine.stats().num_running == 0)


async def test_forms_several_answers_and_logprobs(engine: Client) -> None:
    form = StructuredOutput("regex", "[a-z]{3}[0-9]{2}")
    request = ask("form", picture(), max_tokens=40)
    sampling = replace(request.sampling, structured=form, n=3, logprobs=1, temperature=1.0, seed=1)
    texts = {0: "", 1: "", 2: ""}
    async for event in engine.generate(replace(request, sampling=sampling)):
        texts[event.index] += event.text
        assert len(event.logprobs) == len(event.token_ids)
    assert all(re.fullmatch(form.value, text) for text in texts.values())
    broken = replace(sampling, structured=StructuredOutput("regex", "(a", "there"))
    with pytest.raises(RequestError, match="there cannot be compiled") as caught:
        await anext(engine.generate(replace(request, sampling=broken)))
    assert caught.value.field == "there"


def with_form(name: str, form: StructuredOutput, **more: Any) -> GenerationRequest:
    request = ask(name, **more)
    return replace(request, sampling=replace(request.sampling, structured=form))


async def test_chats_do_not_wait_for_forms_that_take_long(engine: Client) -> None:
    """And the forms are refused as what never runs is: before anything was told of them."""
    forms = [StructuredOutput.of_json({"type": "integer", "multipleOf": 999_983 + 6 * i}) for i in range(3)]
    tasks = [
        asyncio.create_task(anext(engine.generate(with_form(f"form{i}", form))))
        for i, form in enumerate(forms)
    ]
    for number in range(5):
        assert (await collect(engine, f"chat{number}", "hello"))[-1].finish_reason == "length"
    assert not any(task.done() for task in tasks)
    tasks[0].cancel()
    with pytest.raises(RequestError, match="cannot be compiled: it takes more than") as caught:
        await tasks[1]
    assert caught.value.field == "structured"
    tasks[2].cancel()
    await asyncio.wait(tasks)


async def test_a_request_is_cancelled_while_its_form_is_compiled(engine: Client) -> None:
    """Among others, since the request may also be in any other state when it goes."""
    for number in range(6):
        form = StructuredOutput("regex", f"([a-z]{{{number + 3}}} ){{200}}")
        task = asyncio.create_task(anext(engine.generate(with_form(f"gone{number}", form, max_tokens=900))))
        await asyncio.sleep(0.004 * number)
        task.cancel()
        await asyncio.wait([task])
    assert (await collect(engine, "next", "hello"))[-1].finish_reason == "length"
    await until(lambda: engine.stats().num_free_blocks == engine.stats().num_blocks)


async def test_an_id_that_is_running_is_refused(engine: Client) -> None:
    stream = engine.generate(ask("x", "hello", max_tokens=500))
    await anext(stream)
    with pytest.raises(RequestError, match="already running"):
        await collect(engine, "x", "hello")
    await stream.aclose()  # type: ignore[attr-defined]


async def test_closing_the_engine_ends_streams_with_an_error(qwen3_vl_checkpoint: Path) -> None:
    engine = AsyncEngine(config_of(qwen3_vl_checkpoint))
    assert not engine.is_healthy
    await engine.start()
    assert engine.is_healthy
    await assert_closing_ends_streams(engine)


async def assert_closing_ends_streams(engine: Client) -> None:
    stream = engine.generate(ask("x", "hello", max_tokens=2000))
    await anext(stream)
    await engine.close()
    rest = [event async for event in stream]
    assert rest[-1].finish_reason == "error"
    with pytest.raises(EngineStopped):
        await collect(engine, "y", "hello")


class Dying(Engine):
    """An engine whose loop breaks at its fifth step."""

    def step(self) -> list[TokenEvent]:
        if self.num_steps >= 5:
            raise SystemError("broken books")
        return super().step()


async def test_a_dead_loop_is_unhealthy_and_ends_its_streams(qwen3_vl_checkpoint: Path) -> None:
    """E25, A7."""
    engine = AsyncEngine(config_of(qwen3_vl_checkpoint), load=Dying)
    await engine.start()
    events = await collect(engine, "x", "hello", max_tokens=50)
    assert events[-1].finish_reason == "error"
    assert "broken books" in (events[-1].error or "")
    assert "broken books" in (engine.unhealthy_reason or "")
    with pytest.raises(EngineStopped, match="broken books"):
        await collect(engine, "y", "hello")
    await engine.close()


class Frozen(Engine):
    """An engine whose step takes as long as the test wants."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.is_in_step, self.may_go_on = threading.Event(), threading.Event()

    def step(self) -> list[TokenEvent]:
        self.is_in_step.set()
        assert self.may_go_on.wait(PATIENCE_S)
        return super().step()


def frozen_inside(engine: AsyncEngine) -> Frozen:
    assert isinstance(engine.engine, Frozen)
    return engine.engine


async def test_a_frozen_loop_is_unhealthy(qwen3_vl_checkpoint: Path) -> None:
    """A7: no step for longer than allowed, with a request running."""
    engine = AsyncEngine(config_of(qwen3_vl_checkpoint), stall_s=0.3, load=Frozen)
    await engine.start()
    task = asyncio.create_task(collect(engine, "x", "hello", max_tokens=1))
    await until(lambda: not engine.is_healthy)
    assert "no step for" in (engine.unhealthy_reason or "")
    frozen_inside(engine).may_go_on.set()
    assert (await task)[-1].finish_reason == "length"
    assert engine.is_healthy
    await engine.close()


@pytest.mark.parametrize("kind", [AsyncEngine, EngineProcess])
async def test_a_model_that_cannot_be_loaded_is_named(kind: type[Client]) -> None:
    engine = kind(EngineConfig("/nowhere/model"))
    with pytest.raises(ModelLoadError, match="/nowhere/model"):
        await engine.start()
    await engine.close()


async def test_who_goes_while_the_steps_are_told_ends_nobody_else(qwen3_vl_checkpoint: Path) -> None:
    """A cancelled question, and one that fails, leave the loop running."""
    engine = AsyncEngine(config_of(qwen3_vl_checkpoint))
    await engine.start()
    for _ in range(20):
        task = asyncio.create_task(engine.trace())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    engine._call(lambda inner: inner.abort([]))  # type: ignore[arg-type]
    broken = ask("bad", picture())
    prompt, _ = await asyncio.to_thread(engine.engine.prepare, broken)
    engine._call(lambda inner: engine._submit(inner, broken, replace(prompt, images=()), 0.0, None))
    assert (await collect(engine, "x", "hello"))[-1].finish_reason == "length"
    assert engine.is_healthy
    engine.engine.check_integrity()
    await engine.close()


async def test_a_hung_step_does_not_hold_up_the_end(
    qwen3_vl_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "STOP_TIMEOUT_S", 0.2)
    engine = AsyncEngine(config_of(qwen3_vl_checkpoint), load=Frozen)
    await engine.start()
    task = asyncio.create_task(collect(engine, "x", "hello", max_tokens=1))
    await until(frozen_inside(engine).is_in_step.is_set)
    await engine.close()
    assert (await task)[-1].error == "the engine is closed"
    frozen_inside(engine).may_go_on.set()
