"""The vision worker: all cameras through one detector, what is worth a sentence into the queue.

It runs in a process of its own, beside the front or on another machine; Redis is all they share.
"""

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

from appliance.board import BoardWriter
from appliance.camera import Camera
from appliance.collecting import collect_s
from appliance.courses import GONE_S, Courses, Teller
from appliance.device_sharing import Hastening, limit_threads, load_detector, share_device
from appliance.fates import why_dropped
from appliance.logs import set_up_logging
from appliance.observing import make_job
from appliance.permits import Permits
from appliance.processes import EXIT_UNUSABLE
from appliance.reloading import telling
from appliance.settings import Settings, SettingsError, from_json
from appliance.showing import Showing
from appliance.viewing import camera_config
from queues.config import QueueConfig
from queues.connection import CURABLE
from queues.errors import QueueError
from queues.producer import JobProducer
from vision.errors import VisionError
from vision.pipeline import CameraConfig, FrameResult, Pipeline
from vision.trigger import ON_DEMAND
from vision.types import Frame, Observation
from vision.urls import redact

logger = logging.getLogger(__name__)

STATUS_EVERY_S = 1.0
IDLE_WAIT_S = 0.25
ASKED_EVERY_S = 0.2
STOP_S = 2.0
QUEUE_AGAIN_S = 0.5


class VisionWorker:
    """Runs the configured cameras until stopped; one that fails is tried again beside the others.

    With `stop` it waits for a Redis that is away or refuses until that is set; else it raises `QueueError`.
    """

    def __init__(self, settings: Settings, redis_url: str, stop: threading.Event | None = None) -> None:
        self._settings = settings
        self._wake, self._ending = threading.Event(), list[Camera]()
        self._cameras = {name: Camera(name, camera, self._wake) for name, camera in settings.cameras.items()}
        self._news: SimpleQueue[Settings] = SimpleQueue()
        limit_threads(settings.detector)
        self._detector = load_detector(settings.detector)
        self._gate = share_device(self._detector, settings.detector)
        self._hastening = Hastening(self._detector, settings.detector, self._gate)
        self._pipeline = Pipeline(self._detector, ())
        for camera in self._cameras.values():
            self._prepare(camera)
        self._producer = _open_producer(redis_url, settings.queue, stop)
        self._board = BoardWriter(redis_url)
        self._permits = Permits(self._producer, settings.cameras)
        self._courses, self._teller = Courses(), Teller(self._producer)
        self._asked: dict[str, str] = {}
        self._showing = Showing(self._board)
        self._batch_s = 0.0
        self._asked_at = float("-inf")
        self._watched_at = float("-inf")
        self._reported_at = float("-inf")

    def run(self, stop: threading.Event, *, until_ended: bool = False) -> None:
        """Blocks until `stop` is set, or with `until_ended` until no source has anything left."""
        for camera in self._cameras.values():
            with self._alone(camera):
                self._begin(camera)
        try:
            while not stop.is_set() and not (until_ended and self._is_done):
                self._turn()
            self._stop_cameras()
            self._report()
        finally:
            self._stop_cameras()
            if self._gate is not None:
                self._gate.close()
            self._producer.close()
            self._board.close()

    def _stop_cameras(self) -> None:
        """Together: each may take a moment, and all of them no more than that."""
        deadline = time.monotonic() + STOP_S
        for camera in self._cameras.values():
            camera.reader.request_stop()
        for camera in [*self._ending, *self._cameras.values()]:
            camera.reader.stop(max(0.0, deadline - time.monotonic()))
        self._teller.tell(self._courses.end_all())

    def change(self, settings: Settings) -> None:
        """Makes the cameras those of `settings`, soon; what has not changed in one goes on. Any thread."""
        self._news.put(settings)
        self._wake.set()

    def _config(self, name: str) -> CameraConfig:
        rate, is_video = self._cameras[name].frame_rate, self._cameras[name].is_video
        return camera_config(self._settings, self._detector, name, frame_rate=rate, is_video=is_video)

    def _take_news(self) -> None:
        while not self._news.empty():
            old, self._settings = self._settings.cameras, self._news.get()
            new = self._settings.cameras
            changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
            anew = [name for name in changed if not self._adapt(name)]
            for name in old.keys() & anew:
                self._remove(name)
            self._permits.change(old, new)
            for name in [name for name in anew if name in new]:
                self._add(name)

    def _adapt(self, name: str) -> bool:
        """Whether a camera is looked at as is wanted now, and its stream and counts go on."""
        camera, wanted = self._cameras.get(name), self._settings.cameras.get(name)
        if camera is None or wanted is None or not camera.can_become(wanted):
            return False
        try:
            begins_anew = self._pipeline.put(self._config(name))
        except Exception:
            # why: whoever adds it again meets the same and tells it
            return False
        camera.settings = wanted
        if begins_anew:
            self._teller.tell(self._courses.end(name))
        return True

    def _remove(self, name: str) -> None:
        camera = self._cameras.pop(name)
        camera.reader.request_stop()
        self._ending.append(camera)
        self._pipeline.remove(name)
        self._asked.pop(name, None)
        self._showing.forget(name)
        self._teller.tell(self._courses.end(name))

    def _add(self, name: str) -> None:
        camera = self._cameras[name] = Camera(name, self._settings.cameras[name], self._wake)
        try:
            self._prepare(camera)
        except VisionError as error:
            logger.error("camera=%s cannot be used: %s", name, error)
            camera.refuse(str(error))
        with self._alone(camera):
            self._begin(camera)

    def _prepare(self, camera: Camera) -> None:
        """Takes a camera into the pipeline; raises `VisionError` for settings that cannot be used."""
        # invariant: each of the cameras is one of the pipeline's
        self._pipeline.put(CameraConfig(camera.name))
        try:
            self._pipeline.put(self._config(camera.name))
        except VisionError:
            raise
        except Exception as error:
            # why: what is wrong with one camera ends no other, be it foreseen or not
            logger.error("camera=%s cannot be used", camera.name, exc_info=error)
            camera.refuse(redact(f"{type(error).__name__}: {error}"))

    def _begin(self, camera: Camera) -> None:
        # why: a frame of before may show what is now masked, or a camera that is paused
        self._showing.forget(camera.name)
        camera.start()

    @contextmanager
    def _alone(self, camera: Camera) -> Iterator[None]:
        """What fails inside fails for this camera only."""
        try:
            yield
        except Exception as error:
            self._fail(camera, error)

    def _fail(self, camera: Camera, error: Exception) -> None:
        camera.fail(error)
        self._pipeline.reset(camera.name)
        self._teller.tell(self._courses.end(camera.name))

    @property
    def _is_done(self) -> bool:
        """Whether no source has anything left; one that is paused may go on."""
        return bool(self._cameras) and all(camera.reader.is_done for camera in self._cameras.values())

    def _turn(self) -> None:
        """One batch: the frame that waits of every camera that has one."""
        self._wake.clear()
        self._hastening.step()
        self._take_news()
        self._permits.tell()
        self._look_who_watches()
        frames = self._collect()
        if frames:
            self._look_at(frames)
        else:
            self._wait(IDLE_WAIT_S)
        if time.monotonic() - self._reported_at >= STATUS_EVERY_S:
            self._report()

    def _look_at(self, frames: Sequence[Frame]) -> None:
        started_s = time.monotonic()
        self._take_asked()
        self._forget_reopened()
        for result in self._pipeline.process(frames, self._fail_frame):
            with self._alone(self._cameras[result.frame.camera]):
                self._publish(result)
        self._batch_s = time.monotonic() - started_s

    def _wait(self, seconds: float) -> None:
        started_s = time.monotonic()
        self._wake.wait(seconds)
        if self._gate is not None:
            self._gate.add_idle(time.monotonic() - started_s)

    def _collect(self) -> list[Frame]:
        """The frame that waits of every camera; if there is one, the others have a moment to join it."""
        frames, rates = self._take_frames(), self._rates()
        deadline = time.monotonic() + self._collect_s(rates)
        while frames and len(frames) < len(rates) and (left_s := deadline - time.monotonic()) > 0:
            self._wait(left_s)
            self._wake.clear()
            frames += self._take_frames(but={frame.camera for frame in frames})
        return frames

    def _rates(self) -> list[float]:
        """Of each camera that runs: frames a second."""
        return [camera.rate.fps for camera in self._cameras.values() if camera.reader.state == "running"]

    def _collect_s(self, rates: Sequence[float]) -> float:
        asked_ms = self._settings.detector.collect_ms
        return collect_s(rates, self._batch_s) if asked_ms is None else asked_ms / 1e3

    def _take_frames(self, but: Collection[str] = ()) -> list[Frame]:
        others = [camera for name, camera in self._cameras.items() if name not in but]
        return [frame for camera in others if (frame := camera.reader.take())]

    def _forget_reopened(self) -> None:
        """A stream that was away starts with new tracks."""
        for camera in self._cameras.values():
            if camera.reader.num_openings > camera.num_openings_seen:
                camera.num_openings_seen = camera.reader.num_openings
                self._pipeline.reset(camera.name)
                self._teller.tell(self._courses.end(camera.name))
            if camera.is_video != camera.reader.is_video:
                camera.is_video = camera.reader.is_video
                with self._alone(camera):
                    self._pipeline.put(self._config(camera.name))

    def _fail_frame(self, frame: Frame, error: Exception) -> None:
        self._fail(self._cameras[frame.camera], error)

    def _publish(self, result: FrameResult) -> None:
        camera = self._cameras[result.frame.camera]
        camera.num_detections += len(result.detections)
        self._showing.see(result.frame)
        self._teller.tell(self._courses.see(result))
        if result.observation is not None:
            self._describe(camera, result.observation)
        camera.succeed()

    def _describe(self, camera: Camera, observation: Observation) -> None:
        job_id = f"{camera.name}-{camera.life_id}-{camera.reader.num_openings}-{observation.frame.index}"
        if observation.reason == ON_DEMAND:
            job_id = self._asked.pop(camera.name, job_id)
        job = make_job(observation, self._settings, job_id=job_id, source=camera.shown_source, is_live=True)
        try:
            camera.num_jobs += self._producer.put(job, timeout_s=0)
        except QueueError as error:
            camera.num_refused += 1
            self._producer.count_drop("refused")
            logger.warning("camera=%s job=%s was not queued: %s", camera.name, job_id, error)
            self._teller.tell(self._courses.begin(observation, job_id, why_dropped("refused")))
            return
        self._teller.tell(self._courses.begin(observation, job_id))

    def _take_asked(self) -> None:
        """Who asks for a description waits for the next frame; one question of a camera at a time."""
        now = time.monotonic()
        if now - self._asked_at < ASKED_EVERY_S:
            return
        self._asked_at = now
        free = [name for name in self._cameras if name not in self._asked]
        for name, event_id in self._board.take_asked(free).items():
            self._asked[name] = event_id
            self._pipeline.ask(name)

    def _look_who_watches(self) -> None:
        """Who begins to look gets a frame of now, without waiting for the camera's next one."""
        now = time.monotonic()
        if now - self._watched_at < ASKED_EVERY_S:
            return
        self._watched_at = now
        self._showing.watched = self._board.watched(tuple(self._cameras))
        for name in self._showing.watched:
            with self._alone(self._cameras[name]):
                self._showing.show(name)

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        self._ending = [camera for camera in self._ending if camera.reader.is_alive]
        for camera in self._cameras.values():
            with self._alone(camera):
                camera.reader.watch()
                if camera.reader.is_silent(GONE_S):
                    self._teller.tell(self._courses.end(camera.name))
                held_back = self._pipeline.num_held_back(camera.name)
                self._board.write_status(camera.status(held_back, self._courses.open_events(camera.name)))


def run_ingest(settings: Settings, load: Callable[[], Settings] | None = None) -> None:
    """`appliance ingest`: the worker in this process, until Ctrl-C or the end of all sources.

    `load` reads the settings again: at SIGHUP the cameras become those that they name.
    """
    if settings.redis.address is None:
        raise SettingsError("redis.url is missing: give the appliance's Redis with --redis or in --config")
    if not settings.cameras:
        raise SettingsError("cameras is empty: add one in --config")
    set_up_logging(logging.INFO)
    stop, worker = stop_on_signals(), VisionWorker(settings, settings.redis.address)
    if load is not None:
        load_again = telling(load, settings)
        signal.signal(signal.SIGHUP, lambda *_: reload_into(worker, load_again))
    worker.run(stop, until_ended=True)


def _open_producer(url: str, config: QueueConfig, stop: threading.Event | None) -> JobProducer:
    is_told = False
    while True:
        try:
            return JobProducer(url, config)
        except CURABLE as error:
            # why: a worker that ends here loads its detector again for every try.
            if stop is None or stop.wait(QUEUE_AGAIN_S):
                raise
            if not is_told:
                logger.warning("the cameras wait for the queue: %s", error)
            is_told = True


def reload_into(worker: VisionWorker, load: Callable[[], Settings]) -> None:
    """Reads the settings again; with a mistake in them everything stays, and the log says why."""
    try:
        worker.change(load())
    except SettingsError as error:
        logger.error("the settings were not read again: %s", error)


def child_main() -> None:
    """The vision process of `serve`: a line of JSON with the settings on its input, one more a change."""
    _run_child(lambda settings: settings)


def restarted_main() -> None:
    """The same after a crash: a camera that was added since and cannot be used ends nobody else."""
    _run_child(lambda settings: settings.model_copy(update={"cameras": {}}))


def _run_child(begin_with: Callable[[Settings], Settings]) -> None:
    stop = stop_on_signals()
    settings = from_json(sys.stdin.readline())
    assert settings.redis.address is not None
    set_up_logging(logging.WARNING)
    try:
        worker = VisionWorker(begin_with(settings), settings.redis.address, stop)
    except VisionError as error:
        print(f"appliance: {error}", file=sys.stderr)
        sys.exit(EXIT_UNUSABLE)
    except CURABLE:
        # why: it waited, and was told to stop meanwhile.
        return
    except QueueError as error:
        print(f"appliance: {error}", file=sys.stderr)
        sys.exit(EXIT_UNUSABLE)
    worker.change(settings)
    threading.Thread(target=_follow_changes, args=(worker,), name="changes", daemon=True).start()
    worker.run(stop)


def _follow_changes(worker: VisionWorker) -> None:
    for line in sys.stdin:
        reload_into(worker, partial(from_json, line))


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set; main thread only."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop
