"""Parts of the picture that nobody is to see: painted over before a frame is handed on."""

from collections.abc import Sequence

from vision.polygons import Polygon
from vision.types import Image


def paint_over(image: Image, masks: Sequence[Polygon]) -> Image:
    """Return a picture ``[H, W, 3]`` with the masked areas black; the given one stays as it is."""
    # why: the command line knows the options of sources, and must not wait for OpenCV
    import cv2

    painted = image.copy()
    height, width = image.shape[:2]
    cv2.fillPoly(painted, [mask.in_pixels(width, height) for mask in masks], (0, 0, 0))
    return painted
