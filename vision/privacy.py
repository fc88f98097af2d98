"""Parts of the picture that nobody is to see: painted over before a frame is handed on."""

from collections.abc import Sequence
from functools import lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray

from vision.polygons import Polygon
from vision.types import Image


def paint_over(image: Image, masks: Sequence[Polygon]) -> Image:
    """Return a picture ``[H, W, 3]`` with the masked areas black; the given one stays as it is.

    Each mask covers all that it winds around, also where others lie over it or it crosses itself.
    """
    painted = image.copy()
    cv2.fillPoly(painted, _outlines(tuple(masks), image.shape[1], image.shape[0]), (0, 0, 0))
    return painted


@lru_cache(maxsize=64)
def _outlines(masks: tuple[Polygon, ...], width: int, height: int) -> Sequence[NDArray[np.int32]]:
    """The edges of all that is hidden, none over another, as OpenCV fills them: by the even-odd rule."""
    hidden = np.zeros((height, width), np.uint8)
    for mask in masks:
        corners = mask.in_pixels(width, height)
        # why: the winding leaves out the half of the border that belongs to the pixels beside it
        cv2.polylines(hidden, [corners], True, 255)
        hidden[_windings(corners, width, height) != 0] = 255
    outlines, _ = cv2.findContours(hidden, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    return [np.asarray(outline, np.int32) for outline in outlines]


def _windings(corners: NDArray[np.int32], width: int, height: int) -> NDArray[np.int32]:
    """``[height, width]``: how often the sides go around each pixel, by how many pass to the left of it."""
    turns = np.zeros((height, width + 1), np.int32)
    for (x1, y1), (x2, y2) in zip(corners.tolist(), np.roll(corners, -1, axis=0).tolist(), strict=True):
        if y1 == y2:
            continue
        rows = np.arange(min(y1, y2), min(max(y1, y2), height))
        crossings = x1 + (rows - y1) * (x2 - x1) / (y2 - y1)
        columns = np.minimum(np.floor(crossings).astype(np.int64) + 1, width)
        turns[rows, columns] += 1 if y2 > y1 else -1
    return np.cumsum(turns[:, :width], axis=1, dtype=np.int32)
