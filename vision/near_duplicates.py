"""Whether a frame shows what was described last: the same wanted boxes in the same picture."""

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from vision.boxes import Box, overlap
from vision.types import Detections, Image

Thumbnail = NDArray[np.float32]

_WHOLE = (32, 18)
_BOX = (16, 16)
# why: a box that stands still trembles by a few percent from frame to frame
_SAME_BOX = 0.85


@dataclass(frozen=True, slots=True)
class Shown:
    """A frame as it is remembered: its wanted detections, small grey pictures of it and of each of them."""

    detections: Detections
    whole: Thumbnail
    looks: tuple[Thumbnail, ...]

    @classmethod
    def of(cls, image: Image, detections: Detections) -> "Shown":
        """What is remembered of a frame ``[H, W, 3]`` with these wanted detections."""
        return cls(detections, _small(image, _WHOLE), _looks(image, detections))

    def is_shown_by(self, image: Image, detections: Detections, similarity: float) -> bool:
        """Whether another frame shows the same.

        That is: no wanted box came, went or moved, and the pictures agree to ``similarity``, 0 to 1, as a
        whole and within each of the boxes, which may hold somebody else now.
        """
        if not _have_same_boxes(detections, self.detections):
            return False
        # why: both are cut where the boxes were, or their trembling would be a difference
        pairs = [
            (self.whole, _small(image, _WHOLE)),
            *zip(self.looks, _looks(image, self.detections), strict=True),
        ]
        return all(1 - float(np.abs(before - now).mean()) / 255 >= similarity for before, now in pairs)


def _looks(image: Image, detections: Detections) -> tuple[Thumbnail, ...]:
    return tuple(_small(_cut(image, box), _BOX) for box in detections.boxes)


def _cut(image: Image, box: Box) -> Image:
    height, width = image.shape[:2]
    left, top = int(np.clip(box[0], 0, width - 1)), int(np.clip(box[1], 0, height - 1))
    return image[top : max(top + 1, int(box[3])), left : max(left + 1, int(box[2]))]


def _small(image: Image, size: tuple[int, int]) -> Thumbnail:
    small = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    return np.asarray(cv2.cvtColor(small, cv2.COLOR_BGR2GRAY), np.float32)


def _have_same_boxes(one: Detections, other: Detections) -> bool:
    if sorted(one.labels) != sorted(other.labels):
        return False
    left = list(zip(other.labels, other.boxes, strict=True))
    for label, box in zip(one.labels, one.boxes, strict=True):
        same = [i for i, (name, b) in enumerate(left) if name == label and overlap(box, b) >= _SAME_BOX]
        if not same:
            return False
        # invariant: each box of one frame stands for one of the other
        left.pop(same[0])
    return True
