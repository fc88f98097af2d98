"""From an observation to a job: what the model gets to see, and for how long it is wanted."""

import io
import time

import numpy as np
import pytest
from PIL import Image

from appliance.jobs import decode_job
from appliance.observing import make_job
from appliance.settings import Settings, load_settings
from appliance.viewing import wanted_labels
from vision.detector import Detector
from vision.types import Detections, Frame, Observation

NAMES = {0: "person", 2: "car", 5: "giraffe"}


def observation(width: int = 640, height: int = 360) -> Observation:
    """A red picture with a car in it."""
    image = np.zeros((height, width, 3), np.uint8)
    image[:, :, 2] = 255
    frame = Frame("front", 12, 1.23456, time.time(), image)
    boxes, one = np.array([[10, 20, 110, 220]], np.float32), np.ones(1, np.float32)
    detections = Detections(boxes, one, np.array([2]), NAMES, np.array([7]))
    return Observation(frame, detections, 7, "car", "new_track")


def settings(**describe: object) -> Settings:
    return load_settings(None, {"describe": describe})


def test_the_picture_keeps_its_colours_and_is_made_small():
    job = make_job(observation(), settings(max_side=320), job_id="a", source="a.mp4", is_live=False)

    body = decode_job(job.body)
    with Image.open(io.BytesIO(body.image)) as picture:
        assert picture.size == (320, 180)
        red, green, blue = picture.convert("RGB").getpixel((160, 90))  # type: ignore[misc]
    assert red > 240
    assert green < 15
    assert blue < 15
    assert (body.width, body.height) == (640, 360)
    assert body.detections[0]["box"] == {"x1": 10, "y1": 20, "x2": 110, "y2": 220}
    assert (body.label, body.track_id, body.frame_index, body.time_s) == ("car", 7, 12, 1.235)


@pytest.mark.parametrize("is_live", [True, False])
def test_only_a_live_frame_is_too_old_at_some_time(is_live):
    job = make_job(observation(), settings(max_age_s=5), job_id="a", source="a", is_live=is_live)

    assert (job.expires_at is not None) == is_live
    assert job.key == "front"
    if job.expires_at:
        assert job.expires_at - job.created_at == pytest.approx(5)


def test_without_a_wish_the_usual_classes_are_wanted():
    """Furniture is detected, but nobody asked to hear of it."""
    chosen = load_settings(None, {"detector": {"device": "cpu"}})
    detector = Detector(chosen.detector)

    assert wanted_labels(chosen.view_of("any"), detector) == (
        "person", "bicycle", "car", "motorcycle", "bus", "truck", "dog", "cat",
    )  # fmt: skip
    assert wanted_labels(settings(labels=["giraffe"]).view_of("any"), detector) == ("giraffe",)
    assert wanted_labels(settings(labels=[]).view_of("any"), detector) == ()
