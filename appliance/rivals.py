"""Workers that run a camera of the same name: each writes over what the other has told of it."""

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from appliance.jobs import CameraStatus

logger = logging.getLogger(__name__)

FORGET_S = 15.0
"""Statuses are told about once a second."""
LOG_AGAIN_S = 600.0
MIN_SEEN = 3
"""One that ends just then is seen once or twice, which is no fault."""


@dataclass(slots=True)
class _Rival:
    life_id: str
    who: str
    num_seen: int = 0
    seen_at: float = 0.0
    logged_at: float = float("-inf")


class Rivals:
    """Finds other workers by the statuses that stood where this one's were written.

    What was there at the first time is no rival's: a worker that has ended leaves its status behind.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._life_id = uuid.uuid4().hex
        self._who = f"process {os.getpid()} on {socket.gethostname()}"
        self._clock = clock
        self._written: set[str] = set()
        self._rivals: dict[str, _Rival] = {}

    def signed(self, status: CameraStatus) -> CameraStatus:
        """The status with this worker's name in it and, when nothing else is wrong, with its rival's."""
        told = self._told(status.name)
        return replace(status, worker=self._who, life_id=self._life_id, error=status.error or told)

    def look(self, camera: str, before: CameraStatus | None) -> None:
        """A status of `camera` was written where `before` stood."""
        is_first = camera not in self._written
        self._written.add(camera)
        if is_first or before is None or before.life_id == self._life_id:
            return
        rival = self._rivals.get(camera)
        if rival is None or rival.life_id != before.life_id or self._is_past(rival):
            rival = self._rivals[camera] = _Rival(before.life_id, before.worker or "another process")
        rival.num_seen += 1
        rival.seen_at = self._clock()
        if (text := self._told(camera)) and self._clock() - rival.logged_at > LOG_AGAIN_S:
            rival.logged_at = self._clock()
            logger.error("camera=%s %s", camera, text)

    def _told(self, camera: str) -> str | None:
        rival = self._rivals.get(camera)
        if rival is None or rival.num_seen < MIN_SEEN or self._is_past(rival):
            return None
        return (
            f"{rival.who} runs a camera of this name too: give one of the two another name, "
            "or each withdraws the other's frames"
        )

    def _is_past(self, rival: _Rival) -> bool:
        return self._clock() - rival.seen_at > FORGET_S
