"""The engine's process from outside: killed, frozen, broken, and started again."""

import asyncio
import errno
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.vlm_engine.test_async_engine import assert_closing_ends_streams, collect, config_of, until
from tests.vlm_engine.test_engine import ask, picture
from vlm_engine import EngineConfig, EngineProcess, EngineStopped, GenerationRequest, client, wire

START_S = 200.0
"""Generous: a loaded machine loads torch in a new process."""
FOR_EVER_S = 1e6


@asynccontextmanager
async def started(engine: EngineProcess) -> AsyncIterator[EngineProcess]:
    """The engine, closed however the test ends."""
    await engine.start()
    try:
        yield engine
    finally:
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


def test_a_signal_in_the_last_moments_is_not_heard(tmp_path: Path) -> None:
    """The parent asks a process to end that has just told why it cannot begin."""
    start = wire.Start(
        EngineConfig(model=str(tmp_path / "none"), device="cpu"), f"ipc://{tmp_path}/none", None
    )
    code = (
        "import atexit, os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM)); "
        "from vlm_engine.server import main; main()"
    )
    payload = msgspec.json.encode(start)
    ended = subprocess.run(
        [sys.executable, "-c", code], input=payload, capture_output=True, timeout=START_S, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


async def test_a_killed_process_ends_its_streams_and_is_started_again(
    qwen3_vl_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A7, E25: health says so while it happens, and no count falls."""
    caplog.set_level(logging.INFO, "vlm_engine.client")
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
        await until(lambda: re.search(r"the engine is up again after \d+\.\d s", caplog.text))
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


async def test_whoever_waits_for_steps_of_a_killed_process_is_told(qwen3_vl_checkpoint: Path) -> None:
    async with started(EngineProcess(config_of(qwen3_vl_checkpoint))) as engine:
        pid = engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        waiting = asyncio.create_task(engine.trace())
        await until(lambda: bool(engine._traces))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineStopped, match="being started again"):
            await waiting
        await until(lambda: engine.is_healthy, START_S)
        assert await engine.trace() is None


async def test_a_stopped_process_is_unhealthy_and_closes_all_the_same(
    qwen3_vl_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A7: frozen from outside, no sign of life; closing ends streams here too."""
    monkeypatch.setattr(client, "STALLS_TO_RESTART", 1000.0)
    engine = EngineProcess(config_of(qwen3_vl_checkpoint))
    assert not engine.is_healthy
    async with started(engine):
        pid = engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        engine._stall_s = 0.5
        await until(lambda: not engine.is_healthy)
        assert "no sign of life" in (engine.unhealthy_reason or "")
        with pytest.raises(EngineStopped, match="no sign of life"):
            await collect(engine, "y", "hello")
        os.kill(pid, signal.SIGCONT)
        await until(lambda: engine.is_healthy)
        engine._stall_s = FOR_EVER_S
        await assert_closing_ends_streams(engine)
    assert not Path(f"/proc/{pid}").exists()


async def test_chats_that_wait_are_told_as_soon_as_a_process_is_silent(qwen3_vl_checkpoint: Path) -> None:
    """In decode, before the first token, while a picture is prepared; it comes back and drops them."""
    async with started(EngineProcess(config_of(qwen3_vl_checkpoint), stall_s=FOR_EVER_S)) as engine:
        pid, prepare, send = engine.pid, engine._prepare, engine._send
        held, going_on, sent = threading.Event(), threading.Event(), list[object]()

        def slow(request: GenerationRequest) -> list[Any]:
            frames = prepare(request)
            if request.request_id == "preparing":
                held.set()
                going_on.wait(START_S)
            return frames

        async def noted(frames: list[Any]) -> None:
            await send(frames)
            sent.append(frames)

        engine._prepare, engine._send = slow, noted  # type: ignore[method-assign]
        assert pid is not None
        decoding = engine.generate(ask("decoding", "hello", max_tokens=2000))
        await anext(decoding)
        os.kill(pid, signal.SIGSTOP)
        waiting = asyncio.create_task(collect(engine, "waiting", picture(), "hello", max_tokens=2000))
        preparing = asyncio.create_task(collect(engine, "preparing", picture(1), "hello"))
        await until(lambda: held.is_set() and len(sent) == 2)
        engine._stall_s = 0.5
        for events in ([event async for event in decoding], await waiting):
            assert re.match("no sign of life for [0-9]+ s with 3 requests running", events[-1].error or "")
            assert (events[-1].finish_reason, events[-1].is_unanswered) == ("error", True)
        engine._stall_s = FOR_EVER_S
        os.kill(pid, signal.SIGCONT)
        going_on.set()
        with pytest.raises(EngineStopped, match="was away while"):
            await preparing
        assert (await collect(engine, "next", "hello"))[-1].finish_reason == "length"
        await until(lambda: engine.stats().classes["interactive"].finished.get("cancelled") == 2)
        await until(lambda: engine.stats().num_free_blocks == engine.stats().num_blocks)
        assert engine.num_restarts == 0


async def test_a_process_that_stays_silent_is_started_again(
    qwen3_vl_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "STALLS_TO_RESTART", 2.0)
    monkeypatch.setattr(client, "STOP_TIMEOUT_S", 0.5)
    async with started(EngineProcess(config_of(qwen3_vl_checkpoint))) as engine:
        pid = engine.pid
        assert pid is not None
        stream = engine.generate(ask("x", "hello", max_tokens=2000))
        await anext(stream)
        os.kill(pid, signal.SIGSTOP)
        # why: only while it is silent; a machine that others use as well may need a while for a word
        engine._stall_s = 0.5
        *_, last = [event async for event in stream]
        assert last.finish_reason == "error"
        assert "no sign of life for" in (last.error or "")
        await until(lambda: "being started again" in (engine.unhealthy_reason or ""), START_S)
        engine._stall_s = FOR_EVER_S
        await until(lambda: engine.is_healthy, START_S)
        assert engine.num_restarts
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


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["closed", "closing is cancelled"])
async def test_a_frozen_process_is_gone_when_its_engine_is_closed(
    qwen3_vl_checkpoint: Path, is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "STOP_TIMEOUT_S", 60.0 if is_cancelled else 0.5)
    engine = EngineProcess(config_of(qwen3_vl_checkpoint))
    await engine.start()
    pid, folder = engine.pid, engine._folder
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    task = asyncio.create_task(engine.close())
    if is_cancelled:
        await asyncio.sleep(0.2)
        task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() == is_cancelled
    await until(lambda: not _is_running(pid))
    assert not folder.exists()


def _is_running(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
