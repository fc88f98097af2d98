"""One camera's frames, read in a thread of their own, so that a slow or dead source holds up nobody else."""

import logging
import threading
import time
from collections.abc import Callable

from vision.errors import SourceError
from vision.sources import FrameSource
from vision.types import Frame

logger = logging.getLogger(__name__)

BACK_OFF_S = (1.0, 2.0, 5.0, 15.0, 30.0)


class CameraReader:
    """Holds the newest frame of a live source (an older one is dropped and counted), or a recording's next.

    A source that fails is opened again with back-off; one that ends is left alone. `on_frame` is called
    whenever there is something to take. `max_fps` passes on only so many frames a second of the source's own
    time. `num_dropped` frames were replaced here before anybody took them, `num_lost` in the source.
    """

    def __init__(
        self,
        name: str,
        open_source: Callable[[], FrameSource],
        *,
        on_frame: Callable[[], None],
        max_fps: float | None = None,
    ) -> None:
        self.name = name
        self.num_read = 0
        self.num_dropped = 0
        self.num_lost = 0
        self.num_openings = 0
        self.state = "starting"
        self.error: str | None = None
        self._open_source = open_source
        self._on_frame = on_frame
        self._interval_s = 1 / max_fps if max_fps else 0.0
        self._slot: Frame | None = None
        self._is_slot_free = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"camera-{name}", daemon=True)

    def start(self) -> None:
        """Begins to read."""
        self._thread.start()

    def take(self) -> Frame | None:
        """The frame that waits, if any."""
        with self._is_slot_free:
            frame, self._slot = self._slot, None
            self._is_slot_free.notify()
        return frame

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.state == "ended" and self._slot is None

    def stop(self, timeout_s: float = 2.0) -> None:
        """Ends the thread; one that hangs in a read is left behind after `timeout_s`."""
        self._stopping.set()
        with self._is_slot_free:
            self._is_slot_free.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            num_before = self.num_read
            try:
                self._read_once()
            except SourceError as error:
                failures = 0 if self.num_read > num_before else failures
                self._wait_after(str(error), BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)])
                failures += 1
            except Exception as error:
                # why: a decoder's surprise must end as one failed camera, not as a thread silently gone.
                logger.exception("camera=%s failed", self.name)
                self._wait_after(f"{type(error).__name__}: {error}", BACK_OFF_S[-1])
            else:
                self.state = "ended"
                self._on_frame()
                return

    def _read_once(self) -> None:
        source, num_lost_before = self._open_source(), self.num_lost
        self.num_openings += 1
        try:
            due_s = 0.0
            for frame in source:
                if self._stopping.is_set():
                    return
                # why: a clock that jumped back must not silence the camera until it has caught up.
                if 1e-3 < due_s - frame.time_s <= self._interval_s:
                    continue
                due_s = max(due_s, frame.time_s - self._interval_s) + self._interval_s
                self._offer(frame, is_live=source.is_live)
                self.num_lost = num_lost_before + source.num_lost
        finally:
            source.close()

    def _offer(self, frame: Frame, *, is_live: bool) -> None:
        with self._is_slot_free:
            if is_live:
                self.num_dropped += self._slot is not None
            else:
                self._is_slot_free.wait_for(lambda: self._slot is None or self._stopping.is_set())
            self._slot = frame
            self.num_read += 1
        self.state, self.error = "running", None
        self._on_frame()

    def _wait_after(self, error: str, delay_s: float) -> None:
        self.state, self.error = "failed", error
        logger.warning("camera=%s failed, next try in %.0f s: %s", self.name, delay_s, error)
        self._stopping.wait(delay_s)


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
