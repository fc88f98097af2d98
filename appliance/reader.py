"""One camera's frames, read in a thread of their own, so that a slow or dead source holds up nobody else."""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from vision.errors import SourceAuthFailed, SourceError, SourceNotFound, SourceUnsupported
from vision.live_clock import FrameGate
from vision.sources import FrameSource
from vision.types import Frame
from vision.urls import redact

logger = logging.getLogger(__name__)

BACK_OFF_S = {
    # why: trying again a host that does not answer costs nothing, and a camera that returns is seen at once.
    "connecting": (0.5, 1.0, 1.5),
    "stalled": (0.5, 1.0, 1.5),
    "not_found": (1.0, 2.0, 5.0, 15.0, 30.0),
    "unsupported": (5.0, 15.0, 30.0, 60.0),
    # why: many cameras lock a user out after a few wrong passwords.
    "auth_failed": (10.0, 30.0, 60.0),
}
_STATES: tuple[tuple[type[SourceError], str], ...] = (
    (SourceAuthFailed, "auth_failed"),
    (SourceNotFound, "not_found"),
    (SourceUnsupported, "unsupported"),
)
LEAST_WAIT_S = 0.25
STEADY_AFTER_S = 10.0
STALE_AFTER_S = 2.0
LOG_AGAIN_S = 600.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a source may be quiet before its thread is held to hang: while opening, and after a frame.

    Only a live source is held to the second. Sources have deadlines of their own, which are shorter.
    """

    opening_s: float = 60.0
    reading_s: float = 30.0


class _Attempt:
    """One thread that reads; abandoned when a newer one has taken its place."""

    def __init__(self, read: Callable[["_Attempt"], None], name: str) -> None:
        self.source: FrameSource | None = None
        self.started_at = time.monotonic()
        self.thread = threading.Thread(target=read, args=(self,), name=name, daemon=True)


class CameraReader:
    """Holds the newest frame of a live source (an older one is dropped and counted), or a recording's next.

    A source that fails is opened again with back-off, for ever; one that ends is left alone. `on_frame` is
    called whenever there is something to take. `max_fps` passes on only so many frames a second of the
    source's own time. `dropped` counts frames by reason: `replaced` here before anybody took them, and what
    the source lost (`damaged`, `late`, `missing`). `is_video` is that of the source that was opened last.
    """

    def __init__(
        self,
        name: str,
        open_source: Callable[[], FrameSource],
        *,
        on_frame: Callable[[], None],
        max_fps: float | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.name = name
        self.num_read = 0
        self.num_openings = 0
        self.num_hung = 0
        self.is_video = True
        self.error: str | None = None
        self.last_frame_at: float | None = None
        self._state = "stopped"
        self._open_source = open_source
        self._on_frame = on_frame
        self._max_fps = max_fps
        self._patience = patience or Patience()
        self._dropped: Counter[str] = Counter()
        self._losses: Counter[str] = Counter()
        self._slot: Frame | None = None
        self._is_slot_free = threading.Condition()
        self._stopping = threading.Event()
        self._attempt: _Attempt | None = None
        self._hung: list[_Attempt] = []
        self._quiet_since: float | None = None
        self._logged = ("", float("-inf"))

    @property
    def state(self) -> str:
        """How the camera is doing: one of `appliance.jobs.CAMERA_STATES`."""
        is_stale = self._state == "running" and self._is_live and self.frame_age_s > self._stale_after_s
        return "stalled" if is_stale else self._state

    @property
    def frame_age_s(self) -> float:
        """Seconds since the last frame was read; infinite without one."""
        return float("inf") if self.last_frame_at is None else time.monotonic() - self.last_frame_at

    @property
    def dropped(self) -> Counter[str]:
        """Frames that nobody will see, by reason."""
        source = self._attempt.source if self._attempt else None
        return self._dropped + self._losses + Counter(source.losses if source else {})

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self._state == "ended" and self._slot is None

    def is_silent(self, seconds: float) -> bool:
        """Whether nothing waits, and nothing will come, or has come for so long (a slow source: longer)."""
        if self._slot is not None:
            return False
        return self._state == "ended" or self.frame_age_s > max(seconds, self._stale_after_s)

    @property
    def is_alive(self) -> bool:
        """Whether a thread of it is still running, wanted or not."""
        attempts = [*self._hung, *([self._attempt] if self._attempt else [])]
        return any(attempt.thread.is_alive() for attempt in attempts)

    def start(self) -> None:
        """Begins to read."""
        self._state = "connecting"
        self._begin()

    def take(self) -> Frame | None:
        """The frame that waits, if any."""
        with self._is_slot_free:
            frame, self._slot = self._slot, None
            self._is_slot_free.notify()
        return frame

    def watch(self) -> None:
        """Replaces a thread that hangs, beyond all deadlines, in a call; to be called now and then.

        One hanging thread at most is left behind: while it does not come back, no other is started.
        """
        self._hung = [attempt for attempt in self._hung if attempt.thread.is_alive()]
        if self._attempt is None or self._hung or not self._is_hanging:
            return
        self.num_hung += 1
        self._state = "stalled" if self.num_read else "connecting"
        self.error = "the source did not come back from a call and was left behind"
        logger.error("camera=%s %s", self.name, self.error)
        self._close_source(self._attempt)
        self._hung.append(self._attempt)
        self._begin()

    def request_stop(self) -> None:
        """Tells the thread to end, without waiting for it."""
        self._stopping.set()
        with self._is_slot_free:
            self._is_slot_free.notify_all()
        if self._attempt is not None:
            self._close_source(self._attempt)

    def stop(self, timeout_s: float = 2.0) -> None:
        """Ends the thread; one that hangs in a read is left behind after `timeout_s`."""
        self.request_stop()
        if self._attempt is not None:
            self._attempt.thread.join(timeout_s)
        self._slot, self._state = None, "stopped"

    @property
    def _is_live(self) -> bool:
        source = self._attempt.source if self._attempt else None
        return source is not None and source.is_live

    @property
    def _stale_after_s(self) -> float:
        source = self._attempt.source if self._attempt else None
        fps = min(self._max_fps or 10.0, (source and source.fps) or 10.0)
        return max(STALE_AFTER_S, 3 / fps)

    @property
    def _is_hanging(self) -> bool:
        if self._quiet_since is None:
            return False
        is_open = self.last_frame_at is not None and self.last_frame_at >= self._quiet_since
        if is_open and not self._is_live:
            return False
        limit_s = self._patience.reading_s if is_open else self._patience.opening_s
        return time.monotonic() - self._quiet_since > limit_s + 2 / (self._max_fps or 10.0)

    def _begin(self) -> None:
        self._quiet_since = time.monotonic()
        self._attempt = _Attempt(self._run, f"camera-{self.name}")
        self._attempt.thread.start()

    def _is_current(self, attempt: _Attempt) -> bool:
        return self._attempt is attempt and not self._stopping.is_set()

    def _run(self, attempt: _Attempt) -> None:
        failures = -1
        while self._is_current(attempt):
            attempt.started_at = self._quiet_since = time.monotonic()
            error: Exception
            try:
                self._read_once(attempt)
            except Exception as failure:
                # why: a decoder's surprise must end as one failed camera, not as a thread silently gone.
                error = failure
            else:
                self._end(attempt)
                return
            if self._is_current(attempt):
                failures = 0 if self._was_steady(attempt) else failures + 1
                self._wait_after(attempt, error, failures)

    def _was_steady(self, attempt: _Attempt) -> bool:
        return self.last_frame_at is not None and self.last_frame_at - attempt.started_at > STEADY_AFTER_S

    def _end(self, attempt: _Attempt) -> None:
        if self._is_current(attempt):
            self._state, self._quiet_since = "ended", None
            self._on_frame()

    def _read_once(self, attempt: _Attempt) -> None:
        attempt.source = source = self._open_source()
        self.is_video = source.is_video
        try:
            gate, is_counted = FrameGate(self._max_fps), False
            for frame in source:
                if not self._is_current(attempt):
                    return
                if not is_counted:
                    self.num_openings, is_counted = self.num_openings + 1, True
                if gate.passes(frame.time_s):
                    self._offer(attempt, frame, is_live=source.is_live)
        finally:
            self._losses.update(source.losses)
            attempt.source = None
            source.close()

    def _offer(self, attempt: _Attempt, frame: Frame, *, is_live: bool) -> None:
        with self._is_slot_free:
            if is_live:
                self._dropped["replaced"] += self._slot is not None
            else:
                self._is_slot_free.wait_for(lambda: self._slot is None or not self._is_current(attempt))
            if not self._is_current(attempt):
                return
            self._slot = frame
            self.num_read += 1
            self.last_frame_at = self._quiet_since = time.monotonic()
        if self.error is not None:
            logger.info("camera=%s runs", self.name)
        self._state, self.error, self._logged = "running", None, ("", float("-inf"))
        self._on_frame()

    def _wait_after(self, attempt: _Attempt, error: Exception, failures: int) -> None:
        is_known = isinstance(error, SourceError)
        lost = "stalled" if self.num_read else "connecting"
        state = next((name for kind, name in _STATES if isinstance(error, kind)), lost)
        self._state = state
        self.error = redact(str(error) if is_known else f"{type(error).__name__}: {error}")
        # why: what has worked before is likely on its way back, whatever its server says meanwhile.
        is_returning = is_known and state != "auth_failed" and self.num_read
        kind = "stalled" if is_returning else state if is_known else "unsupported"
        waits = BACK_OFF_S[kind]
        wait_s = waits[min(failures, len(waits) - 1)] * random.uniform(0.5, 1.0)
        if kind in ("connecting", "stalled"):
            # why: what was waited for in vain counts, so that a host that gives no answer is asked as often.
            spent_s = time.monotonic() - attempt.started_at
            wait_s = max(min(LEAST_WAIT_S, wait_s), wait_s - spent_s)
        self._log(self.error, wait_s, None if is_known else error)
        self._quiet_since = None
        self._stopping.wait(wait_s)

    def _log(self, error: str, wait_s: float, surprise: Exception | None) -> None:
        text, at = self._logged
        if error != text or time.monotonic() - at > LOG_AGAIN_S:
            self._logged = error, time.monotonic()
            told = self.name, self._state, wait_s, error
            logger.warning("camera=%s %s, next try in %.1f s: %s", *told, exc_info=surprise)

    def _close_source(self, attempt: _Attempt) -> None:
        if attempt.source is not None:
            attempt.source.close()


class FrameRate:
    """Frames a second over about the last two seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: list[float] = []

    def count(self) -> None:
        """One more frame now."""
        self._times.append(self._clock())

    @property
    def fps(self) -> float:
        """The rate; 0 while there are less than two frames."""
        now = self._clock()
        self._times = [t for t in self._times if now - t <= 2.0]
        return (len(self._times) - 1) / max(1e-6, now - self._times[0]) if len(self._times) > 1 else 0.0
