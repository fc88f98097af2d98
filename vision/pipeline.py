"""From frames of several cameras to what is worth describing: one batch, then each camera by itself."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vision.detector import Detector
from vision.errors import UnknownClass
from vision.filters import FilterConfig
from vision.history import History, HistoryConfig
from vision.tracker import LOW_SCORE, Tracker, TrackerKind
from vision.trigger import ON_DEMAND, Trigger, TriggerConfig
from vision.types import Detections, Frame, Observation
from vision.zones import Whereabouts


@dataclass(frozen=True)
class CameraConfig:
    """How the frames of one camera are looked at.

    Attributes:
        name: the camera's name, as in `Frame.camera`.
        frame_rate: frames a second that are processed; None where it is not known.
        tracker: ``bytetrack`` or ``botsort``.
        trigger: what is worth a description, in which zones and over which lines.
        filters: which detections are believed.
        history: how much is kept to show a track as it came.
        is_video: False for separate pictures: no tracking, no cooldown, each picture stands for itself.
    """

    name: str
    frame_rate: float | None = None
    tracker: TrackerKind = "bytetrack"
    trigger: TriggerConfig = field(default_factory=TriggerConfig)
    is_video: bool = True
    filters: FilterConfig = field(default_factory=FilterConfig)
    history: HistoryConfig = field(default_factory=HistoryConfig)


@dataclass(frozen=True, slots=True)
class FrameResult:
    """What became of a frame.

    Attributes:
        frame: the frame.
        detections: its tracked detections.
        observation: set when it is to be described.
        where: where each detection is.
    """

    frame: Frame
    detections: Detections
    observation: Observation | None
    where: tuple[Whereabouts, ...] = ()


class Pipeline:
    """One detector for several cameras, a tracker and a trigger for each.

    Args:
        detector: shared by all.
        cameras: with different names.

    Raises:
        UnknownClass: a trigger wants a class that the detector does not give.
        ValueError: two cameras of one name.
    """

    def __init__(self, detector: Detector, cameras: Sequence[CameraConfig]) -> None:
        self._detector = detector
        self._cameras = {config.name: _Camera(config, detector.config.conf) for config in cameras}
        if len(self._cameras) < len(cameras):
            raise ValueError("two cameras have the same name")
        for config in cameras:
            _check_labels(config, detector)

    def process(
        self, frames: Sequence[Frame], on_failure: Callable[[Frame, Exception], None] | None = None
    ) -> list[FrameResult]:
        """Detect in all frames at once, then track and judge each with its camera.

        Args:
            frames: of any of the cameras, in order of time for each; sizes may differ.
            on_failure: called for a frame that its camera could not be judged by, which then has no result;
                None raises.

        Returns:
            One result a frame, in the same order.

        Raises:
            KeyError: a frame of a camera that is not one of this pipeline's.
        """
        min_score = min(LOW_SCORE, self._detector.config.conf)
        found = self._detector.detect([frame.image for frame in frames], min_score)
        return list(self._judged(frames, found, on_failure))

    def _judged(
        self,
        frames: Sequence[Frame],
        found: Sequence[Detections],
        on_failure: Callable[[Frame, Exception], None] | None,
    ) -> Iterator[FrameResult]:
        for frame, detections in zip(frames, found, strict=True):
            try:
                result = self._cameras[frame.camera].process(frame, detections)
            except Exception as error:
                if on_failure is None:
                    raise
                on_failure(frame, error)
            else:
                yield result

    def ask(self, camera: str) -> None:
        """Have the camera's next frame described, whatever it shows; raises `KeyError` for an unknown one."""
        self._cameras[camera].is_asked_for = True

    def put(self, config: CameraConfig) -> bool:
        """Take in a camera, or another way to look at one, whose counts go on.

        Returns:
            Whether its tracking begins anew; it goes on where nothing but cooldowns is another.

        Raises:
            UnknownClass: its trigger wants a class that the detector does not give; nothing changes then.
        """
        _check_labels(config, self._detector)
        known = self._cameras.get(config.name)
        if known is not None and known.adapt(config):
            return False
        self._cameras[config.name] = _Camera(config, self._detector.config.conf, known)
        return True

    def remove(self, camera: str) -> None:
        """Forget a camera; frames of it are an error from now on."""
        del self._cameras[camera]

    def reset(self, camera: str) -> None:
        """Forget what was seen by one camera: its stream was away, or another recording begins."""
        self._cameras[camera].reset()

    def num_held_back(self, camera: str) -> dict[str, int]:
        """Tracks of a camera that were worth no description of their own, by reason; see `Trigger`."""
        return dict(self._cameras[camera].trigger.num_held_back)


class _Camera:
    """What is remembered of one camera; counts, and a wish to be asked for, are those of the one `before`."""

    def __init__(self, config: CameraConfig, new_track_score: float, before: "_Camera | None" = None) -> None:
        self._config = config
        self._is_video = config.is_video
        self._new_track_score = new_track_score
        self._filters = config.filters
        self._tracker = Tracker(
            config.tracker, config.frame_rate or 10.0, new_track_score, config.filters.new_track_scores
        )
        self._history = History(config.history)
        self.trigger = Trigger(_trigger_of(config))
        self.is_asked_for = False
        self._size: tuple[int, int] | None = None
        if before is not None:
            before.reset()
            self.trigger.num_held_back.update(before.trigger.num_held_back)
            self.is_asked_for = before.is_asked_for

    def adapt(self, config: CameraConfig) -> bool:
        """Whether it is looked at so from now on, and forgets nothing."""
        if _without_cooldowns(config) != _without_cooldowns(self._config):
            return False
        self._config, self.trigger.config = config, _trigger_of(config)
        return True

    def process(self, frame: Frame, detections: Detections) -> FrameResult:
        size = (frame.width, frame.height)
        if not self._is_video or self._size not in (None, size):
            self.reset()
        self._size = size
        believed = self._filters.apply(detections, frame.image)
        tracked = self._tracker.update(believed, frame.image)
        observation = self.trigger.update(frame, tracked, is_asked_for=self.is_asked_for)
        if observation is not None:
            self.is_asked_for = False
            observation = replace(observation, earlier=self._history.of_track(observation.track_id))
        if observation is not None and observation.reason == ON_DEMAND and not len(tracked):
            # why: who asks wants to hear of those too who came just now and are not tracked yet
            sure = believed[believed.scores >= self._new_track_score]
            sure = sure.with_tracks(np.zeros(len(sure), np.int64))
            observation = replace(observation, detections=sure, zones_by_row=())
        self._history.keep(frame, tracked)
        return FrameResult(frame, tracked, observation, tuple(self.trigger.where))

    def reset(self) -> None:
        self._tracker.reset()
        self._history.clear()
        self.trigger.reset()


def _trigger_of(config: CameraConfig) -> TriggerConfig:
    return config.trigger if config.is_video else _for_pictures(config.trigger)


def _without_cooldowns(config: CameraConfig) -> CameraConfig:
    trigger = replace(config.trigger, cooldown_s=0.0, camera_cooldown_s=0.0, track_cooldown_s=0.0)
    return replace(config, trigger=trigger)


def _for_pictures(trigger: TriggerConfig) -> TriggerConfig:
    """The same for pictures that do not follow each other: nothing that takes time."""
    return replace(
        trigger,
        cooldown_s=0.0,
        camera_cooldown_s=0.0,
        track_cooldown_s=0.0,
        min_hits=1,
        zones=tuple(replace(zone, inertia=1, loitering_s=0.0) for zone in trigger.zones),
        dwell_s=None,
        period_s=None,
        similarity=None,
    )


def _check_labels(config: CameraConfig, detector: Detector) -> None:
    given = detector.config.classes or tuple(detector.names.values())
    trigger, filters = config.trigger, config.filters
    wanted = [*(trigger.labels or ()), *(filters.track or ()), *filters.filters, *trigger.thresholds]
    wanted += [label for zone in trigger.zones for label in zone.labels]
    wanted += [label for line in trigger.lines for label in line.labels]
    if unknown := [label for label in dict.fromkeys(wanted) if label not in given]:
        raise UnknownClass(unknown, given, f"the detector (for camera {config.name!r})")
