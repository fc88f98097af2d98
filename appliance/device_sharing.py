"""One device for the detector and the engine: which settings say so, and how both sides are joined."""

import shutil
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vision.detector import DetectorConfig
from vlm_engine.config import TurnConfig
from vlm_engine.gate_client import GateClient

if TYPE_CHECKING:
    from appliance.settings import Settings
    from vision.detector import Detector

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
        gate: path of the socket on which the engine lends its device; None lets `serve` choose one. An
            `ingest` of its own on the same machine asks there too.
    """

    share_device: Literal["auto", "on", "off"] = "auto"
    min_fps: float = 2.0
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


def stand_back() -> None:
    """Leave an engine that computes on this machine's cores half of them, and go last on the others.

    why: what the detector computes beside chats is late by a frame at most, a chat's token is seen.
    """
    import torch

    from vlm_engine.beside import stand_all_aside

    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    stand_all_aside(NICE)


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
