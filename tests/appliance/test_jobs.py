"""What travels through Redis keeps its meaning, and a description's JSON is what readers were promised."""

import json

import msgspec
import pytest

from appliance.jobs import (
    DescribeJob,
    Description,
    Timings,
    decode_description,
    decode_job,
    encode_description,
    encode_job,
)

BOX = {"x1": 1.0, "y1": 2.0, "x2": 3.0, "y2": 4.0}
DETECTIONS = [{"name": "person", "class": 0, "confidence": 0.9, "box": BOX, "track_id": 4}]


def job() -> DescribeJob:
    return DescribeJob(
        job_id="front-1",
        camera="front",
        source="front.mp4",
        frame_index=12,
        time_s=1.2,
        captured_at=1e9,
        track_id=4,
        label="person",
        reason="new_track",
        detections=DETECTIONS,
        width=64,
        height=48,
        prompt="What is there?",
        image=b"\xff\xd8\x00jpeg",
    )


def test_a_job_survives_the_queue():
    assert decode_job(encode_job(job())) == job()


def test_a_description_says_all_that_replay_promises():
    times = {"queue_ms": 1, "preprocess_ms": 2, "encode_ms": 3, "prefill_ms": 4, "decode_ms": 5}
    description = Description.of(
        job(), prompt="What?\n[image]", described_at=1e9 + 1, text="A person.", timings=Timings(**times)
    )

    line = json.loads(encode_description(description))

    assert line["source"] == "front.mp4"
    assert line["time_s"] == 1.2
    assert line["frame_index"] == 12
    assert line["track_id"] == 4
    assert line["detections"] == DETECTIONS
    assert line["prompt"] == "What?\n[image]"
    assert line["description"] == "A person."
    assert line["error"] is None
    assert line["timings"] == times
    assert "image" not in line


def test_an_error_leaves_the_description_null():
    """A8: the error's text stands in its own key."""
    failed = Description.of(job(), prompt="", described_at=0, error="out of memory")
    line = json.loads(encode_description(failed))

    assert line["description"] is None
    assert line["error"] == "out of memory"


def test_a_description_survives_the_result_stream():
    description = Description.of(job(), prompt="p", described_at=2.0, text="Zwei Leute.", model="demo")

    assert decode_description(encode_description(description)) == description


@pytest.mark.parametrize("body", [b"", b"{}", b"\x00", b"not msgpack at all"])
def test_a_body_that_is_no_job_is_said_to_be_none(body):
    with pytest.raises(msgspec.DecodeError):
        decode_job(body)
