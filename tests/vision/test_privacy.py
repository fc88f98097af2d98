"""Privacy masks: what is under one is never seen, whatever the others do."""

import math

import cv2
import numpy as np
import pytest

from vision.polygons import Polygon
from vision.privacy import paint_over

LEFT = Polygon(((0.1, 0.1), (0.6, 0.1), (0.6, 0.6), (0.1, 0.6)))
RIGHT = Polygon(((0.3, 0.3), (0.9, 0.3), (0.9, 0.9), (0.3, 0.9)))
WHITE = np.full((80, 120, 3), 255, np.uint8)


def is_hidden(*masks: Polygon) -> np.ndarray:
    """``[80, 120]``: what is black of a white picture."""
    painted = paint_over(WHITE, masks)
    assert painted.shape == WHITE.shape
    assert WHITE.min() == 255
    return np.asarray((painted == 0).all(axis=2))


@pytest.mark.parametrize("masks", [(LEFT, RIGHT), (LEFT, LEFT), (RIGHT, LEFT, RIGHT, LEFT)])
def test_masks_over_each_other_hide_all_that_each_hides(masks: tuple[Polygon, ...]) -> None:
    together = is_hidden(*masks)
    assert together[30, 50]
    assert (together == np.logical_or.reduce([is_hidden(mask) for mask in masks])).all()


def test_a_mask_that_crosses_itself_hides_its_middle_too() -> None:
    corners = [math.tau * (0.4 * point - 0.25) for point in range(5)]
    star = Polygon(tuple((0.5 + 0.4 * math.cos(a), 0.5 + 0.4 * math.sin(a)) for a in corners))
    hidden = is_hidden(star)
    assert hidden[40, 60]
    assert not hidden[2, 2]
    assert not hidden[70, 60]


def test_a_plain_mask_hides_what_it_did_and_no_more() -> None:
    """Corners inwards, at the picture's edge, of any shape: as OpenCV fills them, at most a pixel beside."""
    rng = np.random.default_rng(3)
    for _ in range(30):
        angles = np.sort(rng.uniform(0, math.tau, 9))
        radii = rng.uniform(0.05, 0.5, 9)
        points = np.stack([0.5 + radii * np.cos(angles), 0.5 + radii * np.sin(angles)], axis=1)
        if np.diff(angles, append=angles[0] + math.tau).max() > math.pi:
            continue
        mask = Polygon(tuple((x, y) for x, y in points.tolist()))
        expected = np.zeros((80, 120), np.uint8)
        cv2.fillPoly(expected, [mask.in_pixels(120, 80)], 255)
        assert (is_hidden(mask) | (expected == 0)).all()
        grown = cv2.dilate(expected, np.ones((3, 3), np.uint8))
        assert not is_hidden(mask)[grown == 0].any()
    assert is_hidden(Polygon(((0, 0), (1, 0), (1, 1), (0, 1)))).all()


def test_four_masks_around_a_place_leave_it_open() -> None:
    sides = [(0.1, 0.1, 0.9, 0.3), (0.1, 0.7, 0.9, 0.9), (0.1, 0.1, 0.3, 0.9), (0.7, 0.1, 0.9, 0.9)]
    hidden = is_hidden(*(Polygon(((x1, y1), (x2, y1), (x2, y2), (x1, y2))) for x1, y1, x2, y2 in sides))
    assert not hidden[26:54, 38:82].any()
    assert hidden[12:70, 14:34].all()
    assert not hidden[0:6].any()
