"""Turning frames, making them smaller and painting parts over, as a camera's settings ask."""

from dataclasses import dataclass

from vision.pixels import rotate_clockwise, scaled
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
        image = rotate_clockwise(image, self.rotate)
        height, width = image.shape[:2]
        image = scaled(image, min((self.max_width or width) / width, (self.max_height or height) / height))
        return paint_over(image, self.masks) if self.masks else image
