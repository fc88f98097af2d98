"""Detections of things that move in a straight line, without a picture or a model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vision.types import Detections, Frame

NAMES = {0: "person", 2: "car", 7: "truck", 56: "chair"}
SHAPE = (480, 640, 3)
BLANK = np.zeros(SHAPE, np.uint8)


@dataclass(frozen=True)
class Thing:
    """An object that is seen in frames `first` to `last`, but not in those of `gaps`."""

    first: int
    last: int
    x: float
    step: float = 0.0
    label: int = 0
    score: float = 0.9
    size: tuple[float, float] = (60, 160)
    gaps: tuple[int, ...] = ()

    def is_seen(self, index: int) -> bool:
        return self.first <= index <= self.last and index not in self.gaps

    def box(self, index: int) -> tuple[float, float, float, float]:
        x = self.x + self.step * (index - self.first)
        return (x, 200, x + self.size[0], 200 + self.size[1])


def detections(things: Sequence[Thing], index: int) -> Detections:
    seen = [thing for thing in things if thing.is_seen(index)]
    return Detections(
        np.array([thing.box(index) for thing in seen], np.float32).reshape(-1, 4),
        np.array([thing.score for thing in seen], np.float32),
        np.array([thing.label for thing in seen], np.int64),
        NAMES,
    )


def frame(index: int, fps: float = 10.0, camera: str = "a") -> Frame:
    return Frame(camera, index, index / fps, 0.0, BLANK)
