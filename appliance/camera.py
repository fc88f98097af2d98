"""One camera as the vision worker knows it: its settings, the reader of its frames, its counts."""

import logging
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from functools import cached_property, partial

from appliance.camera_settings import CameraSettings, is_same_stream
from appliance.jobs import CameraStatus
from appliance.reader import LOG_AGAIN_S, CameraReader, FrameRate, Patience
from appliance.viewing import privacy_masks
from vision.options import SourceOptions, StreamConfig
from vision.reach import check_reach, within
from vision.sources import FrameSource, open_source
from vision.urls import is_stream, redact, shown_address

logger = logging.getLogger(__name__)

DEFAULT_FPS = 10.0
GRACE_S = 10.0
REACH_S = 1.5
PATIENT_EVERY = 8
OPEN_S = 5.0
"""How long whoever is no reader waits for a file to open."""


class Camera:
    """A camera that is read until it is stopped; one that is not enabled stays stopped."""

    def __init__(self, name: str, settings: CameraSettings, wake: threading.Event) -> None:
        self.name = name
        self.settings = settings
        # invariant: no two lives of a camera give a job the same id, for the queue takes an id once.
        self.life_id = uuid.uuid4().hex[:8]
        self._begun_at = time.time()
        self.reader = CameraReader(
            name,
            self._open,
            on_frame=wake.set,
            max_fps=settings.max_fps,
            patience=_patience(settings),
        )
        self.rate = FrameRate()
        self.num_openings_seen = 1
        self.is_video = True
        self.num_detections = 0
        self.num_jobs = 0
        self.num_refused = 0
        self.num_failed = 0
        self._refusal: str | None = None
        self._failure: str | None = None
        self._logged = ("", float("-inf"))
        self._num_opened = 0

    @property
    def shown_source(self) -> str:
        """Where the frames come from, without passwords and paths of streams."""
        return shown_address(self.settings.source)

    @cached_property
    def frame_rate(self) -> float:
        """Frames a second that it will give, as far as that can be known without connecting to it."""
        settings = self.settings
        if settings.max_fps:
            return settings.max_fps
        if is_stream(settings.source):
            return DEFAULT_FPS
        try:
            source = within(OPEN_S, partial(open_source, settings.source, camera=self.name))
        except Exception:
            # why: only a guess is lost; whoever reads the camera meets the same and tells it.
            return DEFAULT_FPS
        source.close()
        return source.fps or DEFAULT_FPS

    def can_become(self, settings: CameraSettings) -> bool:
        """Whether it may go on with these settings as it is read now."""
        return self._refusal is None and is_same_stream(self.settings, settings)

    def start(self) -> None:
        """Begins to read."""
        if self.settings.enabled and self._refusal is None:
            self.reader.start()

    def refuse(self, reason: str) -> None:
        """Makes it a camera that is never read, since its settings cannot be used."""
        self._refusal = reason

    def fail(self, error: Exception) -> None:
        """Counts a frame that could not be worked on; the status tells why until another one could."""
        self.num_failed += 1
        self._failure = redact(f"{type(error).__name__}: {error}")
        text, at = self._logged
        if self._failure != text or time.monotonic() - at > LOG_AGAIN_S:
            self._logged = self._failure, time.monotonic()
            logger.error("camera=%s a frame was given up", self.name, exc_info=error)

    def succeed(self) -> None:
        """A frame was worked on."""
        self.rate.count()
        self._failure = None

    def status(self, held_back: Mapping[str, int], open_events: Iterable[str] = ()) -> CameraStatus:
        """The camera's state and counts now, with those of its trigger, and which of its events go on."""
        reader, dropped = self.reader, self.reader.dropped
        num_seen = reader.num_read - dropped["replaced"]
        dropped["refused"], dropped["failed"] = self.num_refused, self.num_failed
        return CameraStatus(
            name=self.name,
            state="unsupported" if self._refusal else reader.state,
            num_frames=num_seen,
            num_detections=self.num_detections,
            num_jobs=self.num_jobs,
            num_dropped=dropped.total(),
            dropped=dict(+dropped),
            held_back=dict(held_back),
            num_openings=reader.num_openings,
            fps=round(self.rate.fps, 1),
            frame_age_s=None if reader.last_frame_at is None else round(reader.frame_age_s, 2),
            updated_at=time.time(),
            begun_at=self._begun_at,
            error=self._refusal or self._failure or reader.error,
            open_events=list(open_events),
        )

    def _open(self) -> FrameSource:
        self._num_opened += 1
        # why: a host that takes longer than that to answer has all the time it may take now and then
        if self.reader.error is not None and self._num_opened % PATIENT_EVERY:
            check_reach(self.settings.source, min(REACH_S, self.settings.stream.open_s))
        return open_source(
            self.settings.source, camera=self.name, realtime=True, options=source_options(self.settings)
        )


def source_options(settings: CameraSettings) -> SourceOptions:
    """How the camera's source is to be read."""
    stream, detect = settings.stream, settings.detect
    return SourceOptions(
        loop=settings.loop,
        rotate=settings.rotate,
        max_width=detect.width,
        max_height=detect.height,
        masks=privacy_masks(settings),
        stream=StreamConfig(
            transport=stream.transport,
            open_s=stream.open_s,
            first_frame_s=stream.first_frame_s,
            silence_s=stream.silence_s,
            max_fps=settings.max_fps,
        ),
    )


def _patience(settings: CameraSettings) -> Patience:
    stream = settings.stream
    # why: opening has two steps, each of which may take its time.
    opening_s = 2 * stream.open_s + max(stream.first_frame_s, stream.silence_s)
    return Patience(opening_s + GRACE_S, stream.silence_s + GRACE_S)
