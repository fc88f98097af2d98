"""Drawing in unit coordinates: a figure is written once and drawn at any size, mirrored or dimmed."""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from vision.scenes.palette import RGB, Light
from vision.scenes.scene import Box

Image = NDArray[np.uint8]
Point = tuple[float, float]
_SHIFT = 4
_ONE = 1 << _SHIFT


@dataclass(frozen=True, slots=True)
class Canvas:
    """A box of an image: coordinates are 0..1 from its upper left corner, radii and widths in box heights.

    image: uint8 [H, W, 3] BGR, drawn in place. box: pixels.
    light: tints every colour. mirrored: left is right.
    """

    image: Image
    box: Box
    light: Light
    mirrored: bool = False

    @property
    def aspect(self) -> float:
        """Width of the box in heights."""
        return (self.box[2] - self.box[0]) / self.height

    @property
    def height(self) -> float:
        """Height of the box in pixels."""
        return self.box[3] - self.box[1]

    def pixel(self, point: Point) -> Point:
        """Unit coordinates as pixels."""
        x = 1 - point[0] if self.mirrored else point[0]
        return (
            self.box[0] + x * (self.box[2] - self.box[0]),
            self.box[1] + point[1] * self.height,
        )

    def polygon(self, points: Sequence[Point], color: RGB) -> None:
        """Fill a polygon."""
        corners = np.array([[_fixed(v) for v in self.pixel(p)] for p in points], np.int32)
        cv2.fillPoly(self.image, [corners], self.light.tint(color), cv2.LINE_AA, _SHIFT)

    def rect(self, x1: float, y1: float, x2: float, y2: float, color: RGB) -> None:
        """Fill an upright rectangle."""
        self.polygon(((x1, y1), (x2, y1), (x2, y2), (x1, y2)), color)

    def disc(self, x: float, y: float, radius: float, color: RGB) -> None:
        """Fill a circle."""
        self.oval(x, y, radius, radius, color)

    def oval(self, x: float, y: float, rx: float, ry: float, color: RGB) -> None:
        """Fill an ellipse with radii in heights."""
        center = tuple(_fixed(v) for v in self.pixel((x, y)))
        axes = (_fixed(rx * self.height), _fixed(ry * self.height))
        cv2.ellipse(self.image, center, axes, 0, 0, 360, self.light.tint(color), -1, cv2.LINE_AA, _SHIFT)

    def limb(self, points: Sequence[Point], width: float, color: RGB) -> None:
        """Draw a line with round ends and joints, at least one pixel wide."""
        corners = np.array([[_fixed(v) for v in self.pixel(p)] for p in points], np.int32)
        thickness = max(1, round(width * self.height))
        cv2.polylines(self.image, [corners], False, self.light.tint(color), thickness, cv2.LINE_AA, _SHIFT)

    def ring(self, x: float, y: float, radius: float, width: float, color: RGB) -> None:
        """Draw a circle's outline whose outer edge has the given radius."""
        thickness = max(1, round(width * self.height))
        center = tuple(_fixed(v) for v in self.pixel((x, y)))
        middle = _fixed(max(1.0, radius * self.height - thickness / 2))
        cv2.circle(self.image, center, middle, self.light.tint(color), thickness, cv2.LINE_AA, _SHIFT)


def _fixed(value: float) -> int:
    return round(value * _ONE)
