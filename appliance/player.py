"""The vision half of `replay`: recordings through detection, tracking and trigger, in a thread of its own."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from appliance.observing import make_job
from appliance.recordings import Recording
from appliance.settings import Settings
from appliance.view_settings import ViewSettings
from appliance.viewing import camera_config
from queues.connection import CURABLE
from queues.errors import JobTooLarge
from queues.producer import JobProducer
from queues.types import Job
from vision.detector import Detector
from vision.errors import VisionError
from vision.live_clock import FrameGate
from vision.pipeline import FrameResult, Pipeline
from vision.readable import readable
from vision.sources import FrameSource

logger = logging.getLogger(__name__)

PUT_TIMEOUT_S = 0.5
PUT_AGAIN_S = 0.1


@dataclass(slots=True)
class PlayCounts:
    """How far the player is; written by its thread, read by the display.

    `damaged` and `missing` count the frames that could not be read, by the file that they are of.
    """

    recording: Recording | None = None
    num_frames_of_recording: int = 0
    num_frames: int = 0
    damaged: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    num_detections: int = 0
    num_jobs: int = 0
    failures: list[str] = field(default_factory=list)


class Player:
    """Plays recordings one after the other, every frame; a queue that is full or away is waited for.

    A recording is looked at as its name's camera is, or all of them as `camera` is; else as the settings say
    for all cameras. `on_result` sees every frame with its detections, `on_end` each recording that is over,
    with the number of its jobs.
    """

    def __init__(
        self,
        settings: Settings,
        detector: Detector,
        producer: JobProducer,
        *,
        run_id: str,
        realtime: bool,
        camera: str | None = None,
        on_result: Callable[[Recording, FrameResult], None] = lambda recording, result: None,
        on_end: Callable[[Recording, int], None] = lambda recording, num_jobs: None,
    ) -> None:
        self.counts = PlayCounts()
        self._settings = settings
        self._detector = detector
        self._producer = producer
        self._run_id = run_id
        self._realtime = realtime
        self._as_camera = camera
        self._on_result = on_result
        self._on_end = on_end
        self._stop = threading.Event()

    def play(self, recordings: Sequence[Recording]) -> None:
        """Blocks until all are played or `stop` is called; one that fails on the way is noted."""
        for recording in recordings:
            if self._stop.is_set():
                return
            self.counts.recording, self.counts.num_frames_of_recording = recording, 0
            num_before = self.counts.num_jobs
            try:
                self._play_one(recording)
            except VisionError as error:
                logger.error("%s", error)
                self.counts.failures.append(str(error))
            if not self._stop.is_set():
                self._on_end(recording, self.counts.num_jobs - num_before)

    def stop(self) -> None:
        """Ends `play` after the frame in hand; from any thread."""
        self._stop.set()

    def _play_one(self, recording: Recording) -> None:
        source = recording.open(realtime=self._realtime)
        try:
            self._play_source(recording, source)
        finally:
            losses = dict(source.losses)
            of = readable(recording.uri)
            self.counts.missing[of] += losses.pop("missing", 0)
            self.counts.damaged[of] += sum(losses.values())
            source.close()

    def _play_source(self, recording: Recording, source: FrameSource) -> None:
        view = self._view(recording)
        camera = camera_config(
            self._settings,
            self._detector,
            recording.name,
            view=view,
            frame_rate=_frame_rate(source.fps, view.max_fps),
            is_video=recording.is_video,
        )
        pipeline, counts = Pipeline(self._detector, [camera]), self.counts
        gate = FrameGate(view.max_fps if recording.is_video else None)
        for frame in source:
            if self._stop.is_set():
                return
            if not gate.passes(frame.time_s):
                continue
            (result,) = pipeline.process([frame])
            counts.num_frames += 1
            counts.num_frames_of_recording += 1
            counts.num_detections += len(result.detections)
            self._on_result(recording, result)
            if result.observation is not None:
                job_id = f"{self._run_id}-{recording.name}-{frame.index}"
                self._put(
                    make_job(
                        result.observation,
                        self._settings,
                        job_id=job_id,
                        source=readable(recording.uri),
                        is_live=False,
                        view=view,
                    )
                )

    def _view(self, recording: Recording) -> ViewSettings:
        view = self._settings.view_of(self._as_camera or recording.name)
        # why: the model is asked as of that camera; the frames bear the recording's name.
        return view.model_copy(update={"friendly_name": view.friendly_name or self._as_camera})

    def _put(self, job: Job) -> None:
        """Queues a job, waiting as long as it takes for room, and for a server that is away."""
        while not self._stop.is_set():
            try:
                self._producer.put(job, timeout_s=PUT_TIMEOUT_S)
            except CURABLE:
                self._stop.wait(max(PUT_AGAIN_S, self._producer.outage.delay_s))
                continue
            except JobTooLarge as error:
                logger.error("%s", error)
                self.counts.failures.append(str(error))
                return
            # why: also when it was there already, put by a try whose answer was lost
            self.counts.num_jobs += 1
            return


def _frame_rate(given: float | None, most: float | None) -> float | None:
    rates = [rate for rate in (given, most) if rate]
    return min(rates, default=None)
