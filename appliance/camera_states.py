"""How cameras are doing, as whoever keeps their worker knows it: also what the worker cannot say itself.

A worker that is gone says nothing of it, and one that was told of a change has not said yet what came of it.
"""

import asyncio
import time

from msgspec.structs import replace

from appliance.board import BoardReader, Told
from appliance.camera_control import CameraControl
from appliance.jobs import CameraStatus

SILENT_S = 5.0
"""Seconds without a word of a worker that tells each second; a slow batch takes fewer."""
WATCH_EVERY_S = 0.5


class CameraStates:
    """The cameras on the `board`, whose worker and wanted settings `control` knows."""

    def __init__(self, board: BoardReader, control: CameraControl) -> None:
        self._board = board
        self._control = control
        self.frame = board.frame
        self.ask = board.ask

    async def statuses(self) -> list[CameraStatus]:
        """One status a camera, as it is now."""
        names, told, now_s = self._board.names, await self._board.told(), time.monotonic()
        return [self._status(name, told.get(name), now_s) for name in names]

    async def is_all_told(self) -> bool:
        """Whether the worker that runs now has told something of every camera."""
        names, told = self._board.names, await self._board.told()
        return all(name in told and not self._is_of_another_worker(told[name]) for name in names)

    async def watch(self) -> None:
        """Notes, until cancelled, when a worker that was started again does its work."""
        while True:
            if (worker := self._control.worker) and worker.is_awaited and await self.is_all_told():
                worker.note_up()
            await asyncio.sleep(WATCH_EVERY_S)

    def _status(self, name: str, told: Told | None, now_s: float) -> CameraStatus:
        state = "connecting" if self._control.is_enabled(name) else "stopped"
        if told is None:
            is_new = self._control.is_before_change(name, 0.0)
            return CameraStatus(name=name, state=state, updated_at=time.time() if is_new else 0.0)
        status, age_s = told.status, now_s - told.at_s
        reason = self._why_silent(told, age_s)
        if self._control.is_before_change(name, status.begun_at) and not reason:
            return replace(status, state=state, fps=0.0, frame_age_s=None, error=None)
        if status.frame_age_s is not None:
            status = replace(status, frame_age_s=round(status.frame_age_s + age_s, 2))
        if reason:
            shown = reason if state == "connecting" else None
            return replace(status, state=state, fps=0.0, error=shown, is_unheard=True)
        return status

    def _why_silent(self, told: Told, age_s: float) -> str | None:
        if self._is_of_another_worker(told):
            worker = self._control.worker
            has_run = worker is not None and (worker.num_restarts or worker.has_ended)
            return f"the vision worker {'ended and is being started again' if has_run else 'is starting'}"
        if age_s > SILENT_S:
            return f"the vision worker has told nothing for {age_s:.0f} s: see that it runs and reaches Redis"
        return None

    def _is_of_another_worker(self, told: Told) -> bool:
        worker = self._control.worker
        return worker is not None and (worker.has_ended or told.at_s < worker.started_s)
