"""Areas and lines in a picture, by fractions of its width and height, so that they fit every size of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vision.types import Detections, Image

Point = tuple[float, float]
Points = NDArray[np.float64]
"""``[n, 2]`` x and y, fractions of width and height."""

Side = Literal["left", "right"]

# why: a box that is cut at the frame's border stands on it, and the border belongs to the areas at it
_BORDER = 1e-6


@dataclass(frozen=True, slots=True)
class Polygon:
    """An area with straight sides, three corners or more, in order.

    Raises:
        ValueError: fewer than three corners, or one outside 0 to 1.
    """

    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        if len(self.points) < 3:
            raise ValueError(f"a polygon needs 3 points or more, not {len(self.points)}")
        check_points(self.points)

    def contains(self, points: Points) -> NDArray[np.bool_]:
        """Tell for each of ``points`` whether it lies inside (even-odd rule)."""
        inside = np.zeros(len(points), np.bool_)
        x, y = np.clip(points, _BORDER, 1 - _BORDER).T
        for (x1, y1), (x2, y2) in zip(self.points, (*self.points[1:], self.points[0]), strict=True):
            if y1 == y2:
                continue
            crosses = ((y1 > y) != (y2 > y)) & (x < (x2 - x1) * (y - y1) / (y2 - y1) + x1)
            inside ^= crosses
        return inside

    def in_pixels(self, width: int, height: int) -> NDArray[np.int32]:
        """Return the corners ``[n, 2]`` in a picture of that size."""
        return np.rint(np.array(self.points) * (width, height)).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line from ``start`` to ``end``.

    Raises:
        ValueError: a point outside 0 to 1, or both the same.
    """

    start: Point
    end: Point

    def __post_init__(self) -> None:
        check_points((self.start, self.end))
        if self.start == self.end:
            raise ValueError("a line needs two different points")

    def crossing(self, before: Point, after: Point) -> Side | None:
        """The side to which the way from ``before`` to ``after`` crosses the line, None if it does not.

        Sides are as seen from the line's start towards its end, in the picture.
        """
        # why: a step may end on the line itself, which belongs to the right
        was_right = _turn(self.start, self.end, before) >= 0
        is_right = _turn(self.start, self.end, after) >= 0
        if was_right == is_right or _turn(before, after, self.start) * _turn(before, after, self.end) > 0:
            return None
        return "right" if is_right else "left"


def check_points(points: Sequence[Point]) -> None:
    """Raise `ValueError` for a point that is not within the picture."""
    for x, y in points:
        if not (0 <= x <= 1 and 0 <= y <= 1):
            raise ValueError(f"point {x:g},{y:g} is outside of the picture (0 to 1)")


def bottom_centers(detections: Detections, image: Image) -> Points:
    """Return where the objects stand: the middle of each box's lower side, ``[n, 2]`` fractions."""
    height, width = image.shape[:2]
    x = (detections.boxes[:, 0] + detections.boxes[:, 2]) / 2 / width
    return np.stack([x, detections.boxes[:, 3] / height], axis=1).astype(np.float64)


def any_contains(polygons: Sequence[Polygon], points: Points) -> NDArray[np.bool_]:
    """Tell for each of ``points`` whether it lies in one of the polygons."""
    inside = np.zeros(len(points), np.bool_)
    for polygon in polygons:
        inside |= polygon.contains(points)
    return inside


def _turn(start: Point, end: Point, point: Point) -> float:
    """Over 0 when ``point`` is to the right of the way from ``start`` to ``end``, with y downwards."""
    return (end[0] - start[0]) * (point[1] - start[1]) - (end[1] - start[1]) * (point[0] - start[0])
