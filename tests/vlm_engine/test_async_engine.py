"""The engine's front: streams, cancels and health, with the loop in its own thread."""

import asyncio
import errno
import logging
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

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
START_S = 200.0
"""Generous: a loaded machine loads torch in a new process."""


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


@asynccontextmanager
async def started(engine: EngineProcess) -> AsyncIterator[EngineProcess]:
    """The engine, closed however the test ends."""
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def until(predicate: object, timeout_s: float = 60.0) -> None:
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
    events: list[TokenEvent] = []
    async for event in engine.generate(ask("slow", "hello", max_tokens=60)):
        events.append(event)
        await asyncio.sleep(0.1)
    fast = await collect(engine, "fast", "hello", max_tokens=60)
    assert sum(len(event.token_ids) for event in events) == 60
    assert "".join(event.text for event in events) == "".join(event.text for event in fast)
    assert len(events) < len(fast)


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
    """An engine whose step takes long."""

    def step(self) -> list[TokenEvent]:
        import time

        time.sleep(1.5)
        return super().step()


async def test_a_frozen_loop_is_unhealthy(qwen3_vl_checkpoint: Path) -> None:
    """A7: no step for longer than allowed, with a request running."""
    engine = AsyncEngine(config_of(qwen3_vl_checkpoint), stall_s=0.3, load=Frozen)
    await engine.start()
    task = asyncio.create_task(collect(engine, "x", "hello", max_tokens=1))
    await until(lambda: not engine.is_healthy)
    assert "no step for" in (engine.unhealthy_reason or "")
    assert (await task)[-1].finish_reason == "length"
    assert engine.is_healthy
    await engine.close()


@pytest.mark.parametrize("kind", [AsyncEngine, EngineProcess])
async def test_a_model_that_cannot_be_loaded_is_named(kind: type[Client]) -> None:
    engine = kind(EngineConfig("/nowhere/model"))
    with pytest.raises(ModelLoadError, match="/nowhere/model"):
        await engine.start()
    await engine.close()


async def test_a_process_tells_what_it_is_doing(
    qwen3_vl_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vlm_engine.client"):
        async with started(EngineProcess(config_of(qwen3_vl_checkpoint))):
            pass
    loaded, measuring = (record.getMessage() for record in caplog.records)

    assert loaded.startswith("the model is loaded after ")
    assert measuring.startswith("measuring what steps take")


async def test_a_killed_process_ends_its_streams_and_is_started_again(qwen3_vl_checkpoint: Path) -> None:
    """A7, E25: health says so while it happens, and no count falls."""
    async with started(EngineProcess(config_of(qwen3_vl_checkpoint))) as engine:
        wanted = await collect(engine, "before", picture(), "hello")
        await until(lambda: engine.stats().classes["interactive"].finished.get("length") == 1)
        before = engine.stats()
        stream = engine.generate(ask("x", "hello", max_tokens=2000))
        await anext(stream)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        rest = [event async for event in stream]
        assert rest[-1].finish_reason == "error"
        assert "being started again" in (engine.unhealthy_reason or "")
        assert engine.stats().num_running == 0
        with pytest.raises(EngineStopped, match="being started again"):
            await collect(engine, "y", "hello")
        await until(lambda: engine.is_healthy, START_S)
        restarted = engine.stats()
        assert restarted.num_restarts == 1
        assert restarted.num_steps >= before.num_steps > 0
        assert restarted.classes["interactive"].generation_tokens >= 6
        again = await collect(engine, "after", picture(), "hello")
        assert [e.token_ids for e in again] != []
        assert "".join(e.text for e in again) == "".join(e.text for e in wanted)
        assert engine.num_restarts == 1
        await until(lambda: engine.stats().classes["interactive"].finished["length"] == 2)
        assert engine.stats().num_encoded_images == before.num_encoded_images + 1 == 2
        assert engine.stats().classes["interactive"].first_token.num_values >= 2


async def test_a_restart_that_cannot_begin_is_tried_again(
    qwen3_vl_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for a process, and a cleaned-away folder of sockets: both may pass, or can be made good."""
    async with started(EngineProcess(config_of(qwen3_vl_checkpoint))) as engine:
        real, calls = subprocess.Popen, list[object]()

        def popen(*args: Any, **options: Any) -> object:
            calls.append(args)
            if len(calls) == 1:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return real(*args, **options)

        monkeypatch.setattr(subprocess, "Popen", popen)
        shutil.rmtree(engine._folder)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: "Cannot allocate" in (engine.unhealthy_reason or ""), START_S)
        await until(lambda: engine.is_healthy, START_S)
        assert await collect(engine, "after", "hello")


async def test_a_stopped_process_is_unhealthy_and_closes_all_the_same(qwen3_vl_checkpoint: Path) -> None:
    """A7: frozen from outside, no sign of life; closing ends streams here too."""
    engine = EngineProcess(config_of(qwen3_vl_checkpoint), stall_s=2.0)
    assert not engine.is_healthy
    async with started(engine):
        pid = engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: not engine.is_healthy)
        assert "no sign of life" in (engine.unhealthy_reason or "")
        with pytest.raises(EngineStopped, match="no sign of life"):
            await collect(engine, "y", "hello")
        os.kill(pid, signal.SIGCONT)
        await until(lambda: engine.is_healthy)
        await assert_closing_ends_streams(engine)
    assert not Path(f"/proc/{pid}").exists()


async def test_a_process_that_stays_silent_is_started_again(qwen3_vl_checkpoint: Path) -> None:
    async with started(EngineProcess(config_of(qwen3_vl_checkpoint), stall_s=1.5)) as engine:
        pid = engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        (event,) = await collect(engine, "x", "hello")
        assert event.finish_reason == "error"
        assert "no sign of life for" in (event.error or "")
        await until(lambda: engine.is_healthy, START_S)
        assert engine.num_restarts == 1
        assert not Path(f"/proc/{pid}").exists()
        assert (await collect(engine, "y", "hello"))[-1].finish_reason == "length"


@pytest.fixture
def broken_checkpoint(qwen3_vl_checkpoint: Path, tmp_path: Path) -> Path:
    """One that loads and never gives a number."""
    shutil.copytree(qwen3_vl_checkpoint, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: torch.full_like(t, torch.nan) if "norm" in name else t for name, t in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


async def test_a_process_whose_steps_all_fail_is_unhealthy_and_started_again(broken_checkpoint: Path) -> None:
    async with started(EngineProcess(config_of(broken_checkpoint))) as engine:
        reasons, number = set(), 0
        async with asyncio.timeout(START_S):
            while not engine.num_restarts:
                with suppress(EngineStopped):
                    events = await collect(engine, f"r{number}", "hello")
                    assert events[-1].finish_reason == "error"
                number += 1
                await asyncio.sleep(0.3)
                reasons.add(engine.unhealthy_reason or "")
        assert any(
            re.match("the last [0-9]+ steps failed: the model gave no finite", each) for each in reasons
        )
        assert any(re.match("[0-9]+ steps in a row failed.*; it is being started", each) for each in reasons)


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
    await asyncio.sleep(0.3)
    await engine.close()
    assert (await task)[-1].error == "the engine is closed"
