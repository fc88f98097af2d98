"""Whether a frame shows what was described last: the same wanted boxes in the same picture."""

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from vision.boxes import overlap
from vision.types import Detections, Image

_THUMBNAIL = (32, 18)
# why: a box that stands still trembles by a few percent from frame to frame
_SAME_BOX = 0.85


@dataclass(frozen=True, slots=True)
class Shown:
    """A frame as it is remembered: its wanted detections, and the picture in 32 x 18 grey points."""

    detections: Detections
    thumbnail: NDArray[np.float32]

    @classmethod
    def of(cls, image: Image, detections: Detections) -> "Shown":
        """What is remembered of a frame with these wanted detections."""
        grey = cv2.cvtColor(cv2.resize(image, _THUMBNAIL, interpolation=cv2.INTER_AREA), cv2.COLOR_BGR2GRAY)
        return cls(detections, np.asarray(grey, np.float32))

    def is_like(self, other: "Shown", similarity: float) -> bool:
        """Whether no wanted box came, went or moved, and the pictures agree to ``similarity``, 0 to 1."""
        difference = float(np.abs(self.thumbnail - other.thumbnail).mean()) / 255
        return 1 - difference >= similarity and _have_same_boxes(self.detections, other.detections)


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
