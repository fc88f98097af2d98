"""Turning frames, making them smaller and painting parts over, as a camera's settings ask."""

from dataclasses import dataclass

from vision.pixels import rotate_clockwise
from vision.polygons import Polygon
from vision.privacy import paint_over
from vision.types import Image


@dataclass(frozen=True)
class FrameShape:
    """How frames are turned, and how large they may be.

    Attributes:
        rotate: quarter turns clockwise, in degrees.
        max_width: pixels after turning, None for any.
        max_height: likewise.
        masks: areas of the turned picture that are painted black.
    """

    rotate: int = 0
    max_width: int | None = None
    max_height: int | None = None
    masks: tuple[Polygon, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether frames stay as they are."""
        return not (self.rotate or self.max_width or self.max_height or self.masks)

    def apply(self, image: Image) -> Image:
        """Return the picture ``[H, W, 3]`` turned, made smaller in proportion, then painted over."""
        image = self._smaller(rotate_clockwise(image, self.rotate))
        return paint_over(image, self.masks) if self.masks else image

    def _smaller(self, image: Image) -> Image:
        import cv2
        import numpy as np

        height, width = image.shape[:2]
        factor = min(1.0, (self.max_width or width) / width, (self.max_height or height) / height)
        if factor == 1.0:
            return image
        size = (max(1, round(width * factor)), max(1, round(height * factor)))
        return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), np.uint8)
