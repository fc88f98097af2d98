"""The describe prompt: one text for the appliance and for the training of the demo model."""

import pytest

from appliance.prompts import (
    CLIP,
    DEFAULT_INSTRUCTION,
    RULES,
    SEVERAL,
    context_line,
    describe_messages,
    detection_line,
)


def test_detection_line_counts_and_places():
    line = detection_line(["car", "person", "person"], [0.9, 0.5, 0.1])
    assert line == "Detected: 2 person (left, middle), 1 car (right)."


def test_detection_line_orders_equal_counts_by_name():
    assert detection_line(["dog", "bus"], [0.2, 0.8]) == "Detected: 1 bus (right), 1 dog (left)."


def test_nothing_detected():
    assert detection_line([], []) == "Detected: nothing."


def test_a_crowd_is_told_by_thirds():
    line = detection_line(["person"] * 8, [0.05 * i for i in range(8)])
    assert line == "Detected: 8 person (left, middle)."


@pytest.mark.parametrize(
    ("x", "position"), [(0.0, "left"), (0.34, "middle"), (1.0, "right"), (1.2, "right"), (-0.1, "left")]
)
def test_positions_are_thirds_and_stay_inside(x, position):
    assert detection_line(["dog"], [x]) == f"Detected: 1 dog ({position})."


def test_labels_and_centres_belong_together():
    with pytest.raises(ValueError, match="2 labels but 1 centres"):
        detection_line(["dog", "cat"], [0.5])


def test_the_stable_text_stands_before_the_picture():
    picture = object()
    (message,) = describe_messages(DEFAULT_INSTRUCTION, picture, "Detected: nothing.")
    assert message["role"] == "user"
    assert message["content"] == [
        {"type": "text", "text": f"{DEFAULT_INSTRUCTION}\n"},
        {"type": "image", "image": picture},
        {"type": "text", "text": "\nDetected: nothing."},
    ]


def test_without_a_detection_line_the_picture_is_last():
    assert describe_messages(" Look. ", None, "")[0]["content"] == [
        {"type": "text", "text": "Look.\n"},
        {"type": "image", "image": None},
    ]


def test_as_a_clip_several_pictures_are_one_video():
    (message,) = describe_messages("Look.", "new", "", earlier=["old", "older"], clip_fps=0.5)
    assert message["content"] == [
        {"type": "text", "text": f"Look.\n{CLIP}\n"},
        {"type": "video", "frames": ["old", "older", "new"], "fps": 0.5},
    ]
    assert describe_messages("Look.", "new", "", clip_fps=0.5) == describe_messages("Look.", "new", "")


def test_with_a_context_the_model_is_told_where_and_when_and_to_speak_of_nothing_else():
    zones = [("person", ["porch", "yard"]), ("car", []), ("person", ["porch", "yard"])]
    context = context_line("Front door", "2026-01-31 12:00:00", zones)
    assert context == "Camera: Front door. Time: 2026-01-31 12:00:00. In zones: person in porch and yard."
    assert context_line("Gate", "", []) == "Camera: Gate."
    (message,) = describe_messages(
        "Look.", "new", "Detected: nothing.", earlier=["old", "older"], context=context
    )
    assert message["content"] == [
        {"type": "text", "text": f"Look.\n{RULES}\n{SEVERAL}\n"},
        *({"type": "image", "image": name} for name in ("old", "older", "new")),
        {"type": "text", "text": f"\n{context}\nDetected: nothing."},
    ]
