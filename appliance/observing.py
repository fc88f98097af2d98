"""From settings to a vision pipeline, and from its observations to jobs for the model."""

import time

from appliance.jobs import DescribeJob, encode_job
from appliance.prompts import DEFAULT_INSTRUCTION
from appliance.settings import DEFAULT_LABELS, Settings
from queues.types import Job
from vision.annotate import encode_jpeg
from vision.detector import Detector
from vision.pipeline import CameraConfig, Pipeline
from vision.pixels import shrink
from vision.trigger import TriggerConfig
from vision.types import Observation

JPEG_QUALITY = 92


def wanted_labels(settings: Settings, detector: Detector) -> tuple[str, ...]:
    """The classes worth a description: what was asked for, else the usual ones that the model gives."""
    if settings.describe.labels is not None:
        return settings.describe.labels
    given = detector.config.classes or tuple(detector.names.values())
    return tuple(label for label in DEFAULT_LABELS if label in given)


def camera_config(
    settings: Settings, detector: Detector, name: str, *, frame_rate: float | None, is_video: bool = True
) -> CameraConfig:
    """How the frames of one camera are looked at."""
    describe = settings.describe
    trigger = TriggerConfig(
        labels=wanted_labels(settings, detector),
        cooldown_s=describe.cooldown_s,
        min_score=describe.min_score,
        min_area=describe.min_area,
        min_hits=describe.min_hits,
    )
    return CameraConfig(name, frame_rate, settings.tracker, trigger, is_video)


def check_labels(settings: Settings, detector: Detector) -> None:
    """Raises `UnknownClass` when a class is to be described that the detector does not give."""
    Pipeline(detector, [camera_config(settings, detector, "any", frame_rate=None)])


def make_job(observation: Observation, settings: Settings, *, job_id: str, source: str, is_live: bool) -> Job:
    """The job that asks for a description of `observation`; one of a live camera expires."""
    frame, detections = observation.frame, observation.detections
    body = DescribeJob(
        job_id=job_id,
        camera=frame.camera,
        source=source,
        frame_index=frame.index,
        time_s=round(frame.time_s, 3),
        captured_at=frame.captured_at,
        track_id=observation.track_id,
        label=observation.label,
        reason=observation.reason,
        detections=detections.to_summary(),
        width=frame.width,
        height=frame.height,
        prompt=settings.describe.prompt or DEFAULT_INSTRUCTION,
        image=encode_jpeg(shrink(frame.image, settings.picture_side), JPEG_QUALITY),
    )
    now = time.time()
    expires_at = now + settings.describe.max_age_s if is_live else None
    return Job(job_id, frame.camera, encode_job(body), now, expires_at)
