"""The vision worker: all cameras through one detector, what is worth a sentence into the queue.

It runs in a process of its own, beside the front or on another machine; Redis is all they share.
"""

import logging
import signal
import sys
import threading
import time
import uuid

from appliance.board import BoardWriter
from appliance.camera_settings import CameraSettings
from appliance.jobs import CameraStatus
from appliance.observing import camera_config, make_job
from appliance.processes import EXIT_UNUSABLE
from appliance.reader import CameraReader, FrameRate
from appliance.settings import Settings, SettingsError
from queues.errors import QueueError
from queues.producer import JobProducer
from vision.annotate import encode_jpeg
from vision.detector import Detector
from vision.errors import SourceError, VisionError
from vision.pipeline import FrameResult, Pipeline
from vision.pixels import shrink
from vision.sources import open_source

logger = logging.getLogger(__name__)

STATUS_EVERY_S = 1.0
FRAME_EVERY_S = 0.2
FRAME_SIDE = 1280
FRAME_QUALITY = 85
IDLE_WAIT_S = 0.25
DEFAULT_FPS = 10.0


class Camera:
    """What the worker knows of one camera: its reader, its settings, its counts."""

    def __init__(self, name: str, settings: CameraSettings, wake: threading.Event) -> None:
        self.name = name
        self.source = settings.source
        self.reader = CameraReader(
            name,
            lambda: open_source(settings.source, camera=name, realtime=True),
            on_frame=wake.set,
            max_fps=settings.fps,
        )
        self.rate = FrameRate()
        self.num_openings_seen = 1
        self.num_detections = 0
        self.num_jobs = 0
        self.num_refused = 0
        self.shown_at = float("-inf")

    def status(self) -> CameraStatus:
        """The camera's state and counts now."""
        reader = self.reader
        return CameraStatus(
            name=self.name,
            state=reader.state,
            num_frames=reader.num_read - reader.num_dropped,
            num_detections=self.num_detections,
            num_jobs=self.num_jobs,
            num_dropped=reader.num_dropped + reader.num_lost + self.num_refused,
            fps=round(self.rate.fps, 1),
            updated_at=time.time(),
            error=reader.error,
        )


class VisionWorker:
    """Runs the configured cameras until stopped; one that fails is tried again beside the others."""

    def __init__(self, settings: Settings, redis_url: str) -> None:
        self._settings = settings
        self._wake = threading.Event()
        self._cameras = {name: Camera(name, camera, self._wake) for name, camera in settings.cameras.items()}
        self._run_id = uuid.uuid4().hex[:8]
        detector = Detector(settings.detector)
        self._pipeline = Pipeline(
            detector,
            [
                camera_config(settings, detector, name, frame_rate=_frame_rate(name, camera))
                for name, camera in settings.cameras.items()
            ],
        )
        self._producer = JobProducer(redis_url, settings.queue)
        self._board = BoardWriter(redis_url)
        self._reported_at = float("-inf")

    def run(self, stop: threading.Event, *, until_ended: bool = False) -> None:
        """Blocks until `stop` is set, or with `until_ended` until no source has anything left."""
        for camera in self._cameras.values():
            camera.reader.start()
        try:
            while not stop.is_set() and not (until_ended and self._is_done):
                self._turn()
        finally:
            for camera in self._cameras.values():
                camera.reader.stop()
            self._report()
            self._producer.close()
            self._board.close()

    @property
    def _is_done(self) -> bool:
        return all(camera.reader.is_done for camera in self._cameras.values())

    def _turn(self) -> None:
        """One batch: the frame that waits of every camera that has one."""
        self._wake.clear()
        frames = [frame for camera in self._cameras.values() if (frame := camera.reader.take())]
        if frames:
            self._forget_reopened()
            for result in self._pipeline.process(frames):
                self._publish(result)
        else:
            self._wake.wait(IDLE_WAIT_S)
        if time.monotonic() - self._reported_at >= STATUS_EVERY_S:
            self._report()

    def _forget_reopened(self) -> None:
        """A stream that was away starts with new tracks."""
        for camera in self._cameras.values():
            if camera.reader.num_openings > camera.num_openings_seen:
                camera.num_openings_seen = camera.reader.num_openings
                self._pipeline.reset(camera.name)

    def _publish(self, result: FrameResult) -> None:
        camera, frame = self._cameras[result.frame.camera], result.frame
        camera.rate.count()
        camera.num_detections += len(result.detections)
        now = time.monotonic()
        if now - camera.shown_at >= FRAME_EVERY_S:
            camera.shown_at = now
            self._board.write_frame(camera.name, encode_jpeg(shrink(frame.image, FRAME_SIDE), FRAME_QUALITY))
        if result.observation is None:
            return
        job_id = f"{camera.name}-{self._run_id}-{camera.reader.num_openings}-{frame.index}"
        job = make_job(result.observation, self._settings, job_id=job_id, source=camera.source, is_live=True)
        try:
            camera.num_jobs += self._producer.put(job, timeout_s=0)
        except QueueError as error:
            camera.num_refused += 1
            self._producer.count_drop("refused")
            logger.warning("camera=%s job=%s was not queued: %s", camera.name, job_id, error)

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        for camera in self._cameras.values():
            self._board.write_status(camera.status())


def _frame_rate(name: str, camera: CameraSettings) -> float:
    if camera.fps:
        return camera.fps
    try:
        source = open_source(camera.source, camera=name)
    except SourceError:
        return DEFAULT_FPS
    source.close()
    return source.fps or DEFAULT_FPS


def run_ingest(settings: Settings) -> None:
    """`appliance ingest`: the worker in this process, until Ctrl-C or the end of all sources."""
    if settings.redis.url is None:
        raise SettingsError("redis.url is missing: give the appliance's Redis with --redis or in --config")
    if not settings.cameras:
        raise SettingsError("cameras is empty: add one in --config")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    VisionWorker(settings, settings.redis.url).run(stop_on_signals(), until_ended=True)


def child_main() -> None:
    """The vision process of `serve`: settings as JSON on standard input, with the URL of Redis in them."""
    stop = stop_on_signals()
    settings = Settings.model_validate_json(sys.stdin.read())
    assert settings.redis.url is not None
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    try:
        worker = VisionWorker(settings, settings.redis.url)
    except VisionError as error:
        print(f"appliance: {error}", file=sys.stderr)
        sys.exit(EXIT_UNUSABLE)
    worker.run(stop)


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set; main thread only."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop
