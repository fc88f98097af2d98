"""Which settings make the detector ask the engine for its device, and where."""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.device_sharing import Hastening, load_detector, share_device, turn_config, with_gate
from appliance.settings import Settings, SettingsError, load_settings, to_json
from tests.appliance.running import until
from vision.detector import Detector
from vlm_engine import turn_queue
from vlm_engine.gate_server import GateServer
from vlm_engine.static_budget import StaticBudget

EMPTY = np.zeros((48, 64, 3), np.uint8)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the gate needs Linux's sockets")


def settings(cameras: bool = True, **detector: Any) -> Settings:
    sources = {"street": {"source": "synthetic://street"}} if cameras else {}
    return load_settings(None, {"detector": {"device": "cpu", **detector}, "cameras": sources})


async def test_a_place_is_chosen_told_to_both_sides_and_removed() -> None:
    async with AsyncExitStack() as stack:
        chosen = with_gate(settings(min_fps=3), stack)
        turns = turn_config(chosen)
        assert turns is not None
        assert turns.min_per_s == 3
        folder = Path(turns.address).parent
        assert folder.stat().st_mode & 0o077 == 0
        told = Settings.model_validate_json(to_json(chosen)).detector
        assert (told.gate, told.is_sharing) == (turns.address, True)
    assert not folder.exists()


@pytest.mark.parametrize("options", [{"share_device": "off"}, {"share_device": "off", "gate": "/x"}])
async def test_off_is_off(options: dict[str, str]) -> None:
    async with AsyncExitStack() as stack:
        assert turn_config(with_gate(settings(**options), stack)) is None


async def test_a_place_of_the_users_is_taken(tmp_path: Path) -> None:
    """For detectors of an `ingest` that is started by itself."""
    own = str(tmp_path / "device.sock")
    async with AsyncExitStack() as stack:
        chosen = turn_config(with_gate(settings(gate=own), stack))
    assert chosen is not None
    assert chosen.address == own


async def test_cameras_may_come_later() -> None:
    """Over the API, to a `serve` that began without."""
    async with AsyncExitStack() as stack:
        assert turn_config(with_gate(settings(cameras=False), stack)) is not None


def serve_turns(server: GateServer) -> Callable[[], None]:
    """Grants every turn at once, in a thread, until the function that it returns is called."""
    is_stopping = threading.Event()

    def run() -> None:
        while not is_stopping.is_set():
            server.read(0.02)
            turn = server.turns.propose(StaticBudget(1), time.monotonic())
            if turn is not None:
                server.turns.start(turn)
                server.lend(turn)

    thread = threading.Thread(target=run)
    thread.start()

    def stop() -> None:
        is_stopping.set()
        thread.join()
        server.close()

    return stop


@pytest.mark.parametrize(
    ("share", "engine_device", "is_asked"),
    [
        ("auto", "cpu", True),
        ("auto", "cuda:0", False),
        ("auto", None, False),
        ("on", "cuda:0", True),
        ("on", None, True),
        ("off", "cpu", False),
    ],
)
def test_auto_asks_an_engine_on_the_same_device(
    tmp_path: Path,
    share: str,
    engine_device: str | None,
    is_asked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a real detector: one round through the gate, and a real answer in any case."""
    # why: a round that is late, on a machine that others use as well, is none that was given back
    monkeypatch.setattr(turn_queue, "LEASE_LEAST_MS", 60_000.0)
    chosen = settings(share_device=share, gate=str(tmp_path / "device.sock"), imgsz=64)
    config = turn_config(settings(gate=chosen.detector.gate))
    assert config is not None
    server = GateServer(config, engine_device)
    detector = Detector(chosen.detector)
    gate = share_device(detector, chosen.detector)
    stop = serve_turns(server)
    try:
        assert len(detector.detect([EMPTY, EMPTY])) == 2
    finally:
        stop()
        if gate is not None:
            gate.close()
    assert (gate is None) == (share == "off")
    assert bool(server.turns.stats().num_rounds) == is_asked


@pytest.mark.parametrize(("engine_device", "runtime"), [("cpu", "pt"), ("cuda:0", "openvino")])
def test_torch_computes_while_turns_may_be_taken(
    tmp_path: Path, engine_device: str, runtime: str, monkeypatch: pytest.MonkeyPatch, export_cache: Path
) -> None:
    """Its layers can be cut, an export is one piece; what it is to be, the engine says at the first round."""
    pytest.importorskip("openvino")
    monkeypatch.setenv("XDG_CACHE_HOME", str(export_cache))
    chosen = settings(gate=str(tmp_path / "device.sock"), imgsz=320, runtime="auto")
    config = turn_config(chosen)
    assert config is not None
    server = GateServer(config, engine_device)
    detector = load_detector(chosen.detector)
    gate = share_device(detector, chosen.detector)
    assert gate is not None
    hastening = Hastening(detector, chosen.detector, gate)
    stop = serve_turns(server)
    try:
        hastening.step()
        assert detector.runtime == "pt"
        detector.detect([EMPTY])
        hastening.step()
        until(lambda: (hastening.step(), detector.runtime == runtime)[1], 240.0)
        assert len(detector.detect([EMPTY, EMPTY])) == 2
    finally:
        stop()
        gate.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share_device": "yes"}, "detector.share_device"),
        ({"min_fps": 0}, "detector.min_fps: must be above 0"),
        ({"min_fps": float("nan")}, "detector.min_fps: must be above 0"),
        ({"num_threads": 0}, "detector.num_threads: must be 1 or more"),
        ({"collect_ms": -1}, "detector.collect_ms: must be from 0 to 1000"),
        ({"runtime": "onnx"}, "detector.runtime"),
        ({"floor": 1}, "detector.floor: unknown key"),
    ],
)
def test_what_cannot_be_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        settings(**options)
