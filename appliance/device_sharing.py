"""One device for the detector and the engine: which settings say so, and how both sides are joined."""

import logging
import shutil
import sys
import tempfile
import threading
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

from appliance.progress import Stopwatch, tell
from vision.detector import DetectorConfig
from vlm_engine.config import TurnConfig
from vlm_engine.gate_client import GateClient

if TYPE_CHECKING:
    from appliance.settings import Settings
    from vision.detector import Detector

log = logging.getLogger(__name__)

SOCKET_NAME = "device.sock"
NICE = 5


@dataclass(frozen=True)
class DetectorSettings(DetectorConfig):
    """The detector, and how it shares the engine's device.

    Attributes:
        share_device: ``auto`` takes turns with the engine when both compute on the same device and the engine
            does not leave it cores of the CPU (`engine.encode`), ``on`` in any case, ``off`` never.
        min_fps: batches a second that the detector gets under any load of chats, if these take less than
            about a third of the time; above 0.
        num_threads: cores that a batch may compute on; None for half of them, at least one. More end a batch
            sooner, and wait for each other in between; ignored where the device is no CPU.
        collect_ms: how long the first frame of a batch waits for those of other cameras; None for half of
            what the last batch left of the time between two frames of the fastest one, 10 to 100.
        gate: path of the socket on which the engine lends its device; None lets `serve` choose one. An
            `ingest` of its own on the same machine asks there too.
    """

    share_device: Literal["auto", "on", "off"] = "auto"
    min_fps: float = 2.0
    num_threads: int | None = None
    collect_ms: float | None = None
    gate: str | None = None

    @property
    def is_sharing(self) -> bool:
        """Whether the engine may be asked for turns at all; where the device differs, it says so."""
        return self.share_device != "off" and self.gate is not None and sys.platform == "linux"


def with_gate(settings: "Settings", stack: AsyncExitStack) -> "Settings":
    """The settings with a place for the socket chosen where one is wanted; `stack` removes it."""
    detector = settings.detector
    if detector.share_device == "off" or detector.gate:
        return settings
    folder = Path(tempfile.mkdtemp(prefix="appliance-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return settings.model_copy(update={"detector": replace(detector, gate=str(folder / SOCKET_NAME))})


def turn_config(settings: "Settings") -> TurnConfig | None:
    """How the engine lends its device; None when it keeps it."""
    detector = settings.detector
    if not detector.is_sharing or detector.gate is None:
        return None
    return TurnConfig(detector.gate, detector.min_fps)


def limit_threads(settings: DetectorSettings) -> None:
    """Have torch compute on as many cores as the settings say in this process, by default half of them.

    why: a detector's layers are so short that its threads wait for each other, spinning, for as long as they
    compute; the other cores decode the cameras' pictures meanwhile.
    """
    import torch

    torch.set_num_threads(settings.num_threads or max(1, torch.get_num_threads() // 2))


def stand_back() -> None:
    """Leave an engine that computes on this machine's cores half of them, and go last on the others.

    why: what the detector computes beside chats is late by a frame at most, a chat's token is seen.
    """
    from vlm_engine.beside import stand_all_aside

    stand_all_aside(NICE)


def load_detector(settings: DetectorSettings) -> "Detector":
    """The detector; one that may take turns computes by torch, whose layers can be cut, until `Hastening`."""
    tell(f"loading the detector {Path(settings.model).name}")
    watch = Stopwatch()
    from vision.detector import Detector

    detector = Detector(replace(settings, runtime="torch") if _is_undecided(settings) else settings)
    watch.tell("the detector is loaded")
    return detector


def share_device(detector: "Detector", settings: DetectorSettings) -> GateClient | None:
    """Have a loaded detector ask the engine for the device, where it may be the engine's too.

    Returns:
        What it asks, to be closed at the end; None when it asks nobody.
    """
    if not settings.is_sharing or settings.gate is None:
        return None
    device = None if settings.share_device == "on" else detector.device
    gate = GateClient(settings.gate, device, on_room=stand_back)
    detector.take_turns(gate)
    return gate


class Hastening:
    """A detector that goes over to a faster runtime once the engine has said that it lends no turns.

    The faster one is loaded on a thread, for which frames do not wait. Where nothing is to be decided, this
    does nothing.

    Args:
        detector: what computes until then.
        settings: its own, with the gate.
        gate: whom it asks for turns.
    """

    def __init__(self, detector: "Detector", settings: DetectorSettings, gate: GateClient | None) -> None:
        self._detector, self._settings = detector, settings
        self._gate = gate if _is_undecided(settings) else None
        self._loaded: SimpleQueue[Detector] = SimpleQueue()

    def step(self) -> None:
        """See how far it is; to be called between two batches."""
        if self._gate is not None and not self._gate.is_shared:
            self._gate = None
            threading.Thread(target=self._load, name="hastening", daemon=True).start()
        if not self._loaded.empty():
            self._detector.become(self._loaded.get())

    def _load(self) -> None:
        from vision.detector import Detector
        from vision.errors import VisionError

        try:
            self._loaded.put(Detector(self._settings))
        except VisionError as error:
            log.warning("the detector goes on as it is: %s", error)


def _is_undecided(settings: DetectorSettings) -> bool:
    return settings.is_sharing and settings.runtime == "auto"
