"""Camera pipelines: sources, detection, tracking and the choice of what is worth describing."""

from vision.annotate import draw, encode_jpeg
from vision.detector import Detector, DetectorConfig
from vision.errors import VisionError
from vision.pipeline import CameraConfig, FrameResult, Pipeline
from vision.sources import FrameSource, open_source
from vision.tracker import Tracker, TrackerKind
from vision.trigger import Trigger, TriggerConfig
from vision.types import Detections, Frame, Image, Observation

__all__ = [
    "CameraConfig",
    "Detections",
    "Detector",
    "DetectorConfig",
    "Frame",
    "FrameResult",
    "FrameSource",
    "Image",
    "Observation",
    "Pipeline",
    "Tracker",
    "TrackerKind",
    "Trigger",
    "TriggerConfig",
    "VisionError",
    "draw",
    "encode_jpeg",
    "open_source",
]
