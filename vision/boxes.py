"""Geometry of boxes, float32 ``[4]`` as x1 y1 x2 y2."""

import numpy as np
from numpy.typing import NDArray

Box = NDArray[np.float32]


def covered(box: Box, other: Box) -> float:
    """Return which part of the smaller of two boxes they share, 0 to 1."""
    return _shared(box, other) / max(min(_area(box), _area(other)), 1e-6)


def overlap(box: Box, other: Box) -> float:
    """Return the shared area by the area of both together (IoU), 0 to 1."""
    shared = _shared(box, other)
    return shared / max(_area(box) + _area(other) - shared, 1e-6)


def is_near(box: Box, other: Box) -> bool:
    """Whether two boxes may show one thing a moment apart.

    That is: their centres are closer than half their mean diagonal.
    """
    distance = np.linalg.norm((box[:2] + box[2:]) - (other[:2] + other[2:])) / 2
    diagonal = (np.linalg.norm(box[2:] - box[:2]) + np.linalg.norm(other[2:] - other[:2])) / 2
    return bool(distance < diagonal / 2)


def _area(box: Box) -> float:
    return float(np.prod(np.clip(box[2:] - box[:2], 0, None)))


def _shared(box: Box, other: Box) -> float:
    sides = np.minimum(box[2:], other[2:]) - np.maximum(box[:2], other[:2])
    return float(np.prod(np.clip(sides, 0, None)))
