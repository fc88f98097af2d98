"""From an observation to a job: what the model gets to see, and for how long it is wanted."""

import dataclasses
import io
import time
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from appliance.describer import prompt_of
from appliance.jobs import decode_job
from appliance.observing import make_job
from appliance.settings import Settings, load_settings
from appliance.viewing import wanted_labels
from vision.detector import Detector
from vision.types import Detections, Frame, Observation, Sighting

NAMES = {0: "person", 2: "car", 5: "giraffe"}


def observation(width: int = 640, height: int = 360, captured_at: float | None = None) -> Observation:
    """A red picture with a car in it."""
    image = np.zeros((height, width, 3), np.uint8)
    image[:, :, 2] = 255
    frame = Frame("front", 12, 1.23456, captured_at or time.time(), image)
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


def test_the_prompt_is_of_the_class_and_knows_where_it_is():
    chosen = load_settings(
        None,
        {
            "describe": {"prompt": "Any.", "object_prompts": {"car": '{camera}, {zones}: {label}? {"a": 1}'}},
            "cameras": {
                "front": {
                    "source": "a.mp4",
                    "friendly_name": "Front door",
                    "zones": {"p": {"coordinates": "0,0,1,0,1,1", "friendly_name": "Porch"}},
                }
            },
        },
    )
    seen = replace(observation(), zones=("p",), zones_by_row=(("p",),))

    body = decode_job(make_job(seen, chosen, job_id="a", source="a", is_live=False).body)

    assert body.prompt == 'Front door, Porch: car? {"a": 1}'
    assert (body.camera_name, body.taken) == ("Front door", "0:01.2 into the recording")
    assert body.detections[0]["zones"] == ["p"]
    (message,) = prompt_of(body, Image.new("RGB", (64, 36)), has_context=True)
    told = message["content"][-1]["text"]
    assert "\nCamera: Front door. Time: 0:01.2 into the recording. In zones: car in Porch.\n" in told
    other = make_job(observation(), settings(prompt="Any."), job_id="a", source="a", is_live=True)
    assert decode_job(other.body).prompt == "Any."


def test_a_crop_shows_the_object_with_a_margin_and_earlier_pictures_are_cut_alike():
    half = observation(320, 180)
    earlier = Sighting(half.frame, replace(half.detections, boxes=half.detections.boxes / 2))
    seen = replace(observation(), earlier=(earlier,))
    chosen = settings(image="crop", crop_margin=0.1, max_images=2)

    body = decode_job(make_job(seen, chosen, job_id="a", source="a", is_live=False).body)

    assert body.crop == [0, 0, 130, 240], "20 pixels around 10,20 to 110,220, within the frame"
    sizes = [Image.open(io.BytesIO(picture)).size for picture in (body.image, *body.earlier)]
    assert sizes == [(130, 240), (65, 120)]
    (message,) = prompt_of(body, Image.new("RGB", (130, 240)), has_context=False)
    assert message["content"][-1]["text"] == "\nDetected: 1 car (middle)."


def test_pictures_of_a_track_are_a_clip_where_the_model_reads_videos_and_sizes_agree():
    chosen = settings(max_images=3, image_interval=2.0, images_as="clip")
    body = decode_job(make_job(observation(), chosen, job_id="a", source="a", is_live=False).body)
    assert body.clip_fps == 0.5
    now, before, smaller = (Image.new("RGB", size) for size in ((96, 64), (96, 64), (48, 32)))

    def kinds(*earlier: Image.Image, reads_videos: bool = True) -> list[str]:
        (message,) = prompt_of(body, now, earlier=earlier, reads_videos=reads_videos)
        return [part["type"] for part in message["content"][1:-1]]

    assert kinds(before, before) == ["video"]
    assert kinds(before, before, reads_videos=False) == ["image"] * 3
    assert kinds(smaller, before) == ["image"] * 3
    assert kinds() == ["image"]
    plain = make_job(observation(), settings(max_images=3), job_id="a", source="a", is_live=False)
    assert decode_job(plain.body).clip_fps is None


@pytest.mark.parametrize("is_live", [True, False])
def test_only_a_live_frame_is_too_old_at_some_time(is_live):
    job = make_job(observation(), settings(max_age_s=5), job_id="a", source="a", is_live=is_live)

    assert (job.expires_at is not None) == is_live
    assert job.key == "front"
    assert (job.slot is not None) == is_live
    if job.expires_at:
        assert job.expires_at - job.created_at == pytest.approx(5, abs=1)


@pytest.mark.parametrize(("age_s", "left_s"), [(1.0, 4.0), (8.0, 2.5), (-60.0, 5.0)])
def test_a_frame_ages_from_its_capture(age_s, left_s):
    """V15; half of its time is left behind a slow detector, no more than all where the clock is ahead."""
    late = observation(captured_at=time.time() - age_s)

    job = make_job(late, settings(), job_id="a", source="a", is_live=True)

    assert job.expires_at
    assert job.expires_at - job.created_at == pytest.approx(left_s, abs=0.5)


@pytest.mark.parametrize(
    ("replaced_by", "reason", "slot"),
    [
        ("camera", "new_track", "front"),
        ("track", "new_track", "front/7"),
        ("none", "new_track", None),
        ("camera", "on_demand", None),
    ],
)
def test_what_a_newer_frame_replaces(replaced_by, reason, slot):
    """By default a camera's newest; each visit for itself if wanted; never what somebody asked for."""
    wanted = dataclasses.replace(observation(), reason=reason)

    job = make_job(wanted, settings(replace=replaced_by), job_id="a", source="a", is_live=True)

    assert job.slot == slot


def test_without_a_wish_the_usual_classes_are_wanted():
    """Furniture is detected, but nobody asked to hear of it."""
    chosen = load_settings(None, {"detector": {"device": "cpu"}})
    detector = Detector(chosen.detector)

    assert wanted_labels(chosen.view_of("any"), detector) == (
        "person", "bicycle", "car", "motorcycle", "bus", "truck", "dog", "cat",
    )  # fmt: skip
    assert wanted_labels(settings(labels=["giraffe"]).view_of("any"), detector) == ("giraffe",)
    assert wanted_labels(settings(labels=[]).view_of("any"), detector) is None
