"""What cameras are said to do while their worker is gone, silent, or has yet to hear of a change."""

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from appliance.board import BoardReader, BoardWriter
from appliance.camera_control import CameraControl
from appliance.camera_states import CameraStates
from appliance.jobs import CameraStatus, status_key
from appliance.processes import Child, Supervisor
from appliance.settings import load_settings
from queues import EmbeddedServer
from tests.appliance.running import until


def wait() -> None:
    """The target of a child that does nothing but read."""
    for _ in sys.stdin:
        pass


class Scene:
    """States over a real board; the test says what a worker would, and its process only lives."""

    def __init__(self, url: str) -> None:
        sources = {name: {"source": f"rtsp://10.0.0.5/{name}"} for name in ("gate", "park")}
        self.settings = load_settings(
            None, {"cameras": {**sources, "off": {**sources["gate"], "enabled": False}}}
        )
        self.board = BoardReader(url, tuple(self.settings.cameras))
        self.writer = BoardWriter(url)
        self.control = CameraControl(self.settings, url, self.board, self._start)
        self.states = CameraStates(self.board, self.control)

    def _start(self, payload: Any) -> Supervisor:
        target = "tests.appliance.test_camera_states:wait"
        return Supervisor("vision worker", lambda: Child(target, payload(), is_told_more=True))

    def tell(self, begun_at: float | None = None) -> None:
        """What a worker tells that sees two cameras and has a third paused."""
        times = {"updated_at": time.time(), "begun_at": time.time() if begun_at is None else begun_at}
        for name in ("gate", "park"):
            seen = {"fps": 4.5, "frame_age_s": 0.1, "num_frames": 9}
            self.writer.write_status(CameraStatus(name=name, state="running", **seen, **times))
        self.writer.write_status(CameraStatus(name="off", state="stopped", **times))

    async def shown(self, name: str = "gate") -> CameraStatus:
        return next(status for status in await self.states.statuses() if status.name == name)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedServer() as server:
        yield server.url


@pytest.fixture
async def scene(url: str) -> AsyncIterator[Scene]:
    scene = Scene(url)
    yield scene
    await scene.control.stop()
    for name in scene.settings.cameras:
        scene.writer._redis.delete(status_key(name))
    scene.writer.close()
    await scene.board.close()


async def test_what_a_worker_tells_is_told_on(scene: Scene) -> None:
    assert (await scene.shown()).updated_at == 0
    assert not await scene.states.is_all_told()
    scene.tell()
    gate = await scene.shown()
    assert (gate.state, gate.fps, gate.error) == ("running", 4.5, None)
    assert await scene.states.is_all_told()


async def test_a_worker_that_is_gone_is_known_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the one in its place tells something; the log says when that is."""
    monkeypatch.setattr("appliance.processes.BACK_OFF_S", (0.01,))
    caplog.set_level("INFO", "appliance.progress")
    worker = scene.control.worker
    assert worker is not None
    scene.tell()
    assert (await scene.shown()).state == "running"
    os.kill(pid := worker.pid, signal.SIGKILL)
    until(lambda: worker.has_ended)
    gate, off = await scene.shown(), await scene.shown("off")
    assert (gate.state, gate.fps, gate.num_frames) == ("connecting", 0, 9)
    assert gate.error == "the vision worker ended and is being started again"
    assert (off.state, off.error) == ("stopped", None)
    assert gate.is_unheard
    await scene.control.change("park", {"source": "rtsp://10.0.0.8/park"})
    assert (await scene.shown("park")).error == gate.error, "nobody opens it"
    tasks = [asyncio.ensure_future(work) for work in (scene.control.run(), scene.states.watch())]
    while worker.pid == pid:
        await asyncio.sleep(0.01)
    assert (await scene.shown()).error == gate.error, "it has told nothing yet"
    assert worker.is_awaited
    await asyncio.sleep(0.02)
    scene.tell()
    assert (await scene.shown()).state == "running"
    while worker.is_awaited:
        await asyncio.sleep(0.05)
    assert "the vision worker is up again after " in caplog.text
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_silent_worker_is_told_of_and_frames_grow_old(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when what it said has expired: the age of the newest frame goes on."""
    monkeypatch.setattr("appliance.camera_states.SILENT_S", 9.0)
    assert scene.control.worker is not None
    scene.control.worker.started_s = float("-inf")
    scene.tell()
    scene.writer._redis.pexpire(status_key("gate"), 13_000)
    gate = await scene.shown()
    assert (gate.state, gate.error) == ("running", None)
    assert gate.frame_age_s is not None
    assert 2.1 <= gate.frame_age_s < 9.1
    scene.writer._redis.pexpire(status_key("gate"), 5_000)
    for _ in range(2):
        gate = await scene.shown()
        assert (gate.state, gate.fps) == ("connecting", 0)
        assert re.search("told nothing for 1[0-9] s", gate.error or "")
        assert gate.frame_age_s is not None
        assert gate.frame_age_s >= 10
        scene.writer._redis.delete(status_key("gate"))


async def test_what_was_just_asked_is_what_is_shown(scene: Scene) -> None:
    """Until the worker has heard of it; the old reason is of another source."""
    before = time.time() - 1
    refused = CameraStatus(
        name="gate", state="stalled", error="Connection refused", updated_at=before, begun_at=before
    )
    scene.writer.write_status(refused)
    await scene.control.change("gate", {"friendly_name": "Gate"})
    gate = await scene.shown()
    assert (gate.state, gate.error) == ("stalled", "Connection refused"), "its stream goes on"
    await scene.control.change("gate", {"source": "rtsp://10.0.0.6/gate"})
    gate = await scene.shown()
    assert (gate.state, gate.error) == ("connecting", None)
    await scene.control.change("gate", {"enabled": False})
    assert (await scene.shown()).state == "stopped"
    await scene.control.change("off", {"enabled": True})
    scene.tell(begun_at=before)
    assert (await scene.shown("off")).state == "connecting"
    assert (await scene.shown("park")).state == "running", "nothing was asked of it"
    scene.tell()
    assert (await scene.shown("off")).state == "stopped", "the worker has the last word"


async def test_a_new_camera_is_being_opened(scene: Scene) -> None:
    await scene.control.add("new", {"source": "rtsp://10.0.0.7/new"})
    new = await scene.shown("new")
    assert (new.state, new.error) == ("connecting", None)
    assert new.updated_at
