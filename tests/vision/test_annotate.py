"""Drawings: on a copy, inside the picture, whatever the size and the text."""

import cv2
import numpy as np
import pytest

from tests.vision.moving import NAMES
from vision.annotate import caption_bar, draw, encode_jpeg
from vision.types import Detections, Frame


def scene(width: int, height: int) -> tuple[Frame, Detections]:
    boxes = np.array(
        [[10, 20, 60, 90], [-50, -40, width + 50, height + 40], [width - 5, 5, width, 30]], np.float32
    )
    found = Detections(boxes, np.array([0.9, 0.5, 0.4], np.float32), np.array([0, 2, 7]), NAMES)
    return Frame("a", 0, 0.0, 0.0, np.full((height, width, 3), 90, np.uint8)), found


@pytest.mark.parametrize(("width", "height"), [(640, 480), (160, 120), (40, 32), (3840, 2160), (101, 677)])
def test_boxes_and_labels(width: int, height: int) -> None:
    """V12: a picture of any size, boxes that stick out of it."""
    frame, found = scene(width, height)
    for detections in (found, found.with_tracks(np.array([1, 22, 333])), found[:0]):
        image = draw(frame, detections)
        assert image.shape == frame.image.shape
        assert image.dtype == np.uint8
        assert (image != 90).any() == (len(detections) > 0)
    assert (frame.image == 90).all()


def test_the_box_is_where_the_detection_is() -> None:
    frame, found = scene(640, 480)
    changed = (draw(frame, found[:1]) != 90).any(axis=2)
    assert changed[50, 10]
    assert changed[90, 30]
    assert not changed[50, 30]
    assert not changed[200:].any()


def test_a_caption_goes_below_the_picture() -> None:
    frame, found = scene(320, 240)
    plain, short, long = (draw(frame, found, text) for text in (None, "A café.", "word " * 400))
    assert plain.shape == (240, 320, 3)
    assert np.array_equal(short[:240], plain)
    assert short.shape[0] > 240
    assert short.shape[0] < long.shape[0] < 480, "cut after some lines"
    assert (short[240:] > 128).any()


@pytest.mark.parametrize("text", ["", "x" * 500, "日本語 Ωμέγα émigré", "two\nlines\tand\0more"])
def test_any_text(text: str) -> None:
    bar = caption_bar(text, 200, 14)
    assert bar.shape[1:] == (200, 3)
    assert bar.shape[0] >= 14


def test_letters_beyond_ascii_are_drawn() -> None:
    pytest.importorskip("matplotlib")
    assert not np.array_equal(caption_bar("é", 40, 14), caption_bar("è", 40, 14))


def test_jpeg() -> None:
    frame, _ = scene(64, 48)
    data = encode_jpeg(frame.image, 80)
    decoded = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert abs(decoded.astype(int) - 90).max() <= 3
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    assert len(encode_jpeg(noise, 20)) < len(encode_jpeg(noise, 95))
    for quality in (0, 101):
        with pytest.raises(ValueError, match="1 to 100"):
            encode_jpeg(frame.image, quality)
    with pytest.raises(ValueError, match="cannot be a JPEG"):
        encode_jpeg(np.zeros((0, 4, 3), np.uint8))
