"""Which detections of a camera are believed at all: by class, size, shape and place."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vision.polygons import Points, Polygon, any_contains, bottom_centers
from vision.types import Detections, Image


@dataclass(frozen=True)
class ObjectFilter:
    """What an object of one class must be like.

    Attributes:
        min_score: lowest score of a detection that starts a track, 0 to 1; None leaves it to the detector.
        threshold: lowest median of a track's last ten scores.
        min_area: lowest area of its box, in pixels of the frame, or below 1 as a fraction of it.
        max_area: highest area, likewise.
        min_ratio: lowest width by height.
        max_ratio: highest width by height.
        masks: areas in which no such object can stand.
    """

    min_score: float | None = None
    threshold: float = 0.0
    min_area: float = 0.0
    max_area: float = float("inf")
    min_ratio: float = 0.0
    max_ratio: float = float("inf")
    masks: tuple[Polygon, ...] = ()

    def accepts(self, detections: Detections, image: Image, feet: Points) -> NDArray[np.bool_]:
        """Tell for each row, with its bottom centre in ``feet``, whether size, shape and place fit."""
        num_pixels = image.shape[0] * image.shape[1]
        low, high = (v * num_pixels if v < 1 else v for v in (self.min_area, self.max_area))
        sides = np.maximum(detections.boxes[:, 2:] - detections.boxes[:, :2], 1e-6)
        ratios = sides[:, 0] / sides[:, 1]
        is_sized = (detections.areas >= low) & (detections.areas <= high)
        is_shaped = (ratios >= self.min_ratio) & (ratios <= self.max_ratio)
        return np.asarray(is_sized & is_shaped & ~any_contains(self.masks, feet), np.bool_)


@dataclass(frozen=True)
class FilterConfig:
    """What a camera's detections are filtered by.

    Attributes:
        track: class names to track, None for every class.
        filters: by class name.
        masks: areas in which no object of any class can stand.
    """

    track: tuple[str, ...] | None = None
    filters: Mapping[str, ObjectFilter] = field(default_factory=dict)
    masks: tuple[Polygon, ...] = ()

    @property
    def new_track_scores(self) -> dict[str, float]:
        """Class name → lowest score that starts a track, where one is set."""
        scores = {label: one.min_score for label, one in self.filters.items()}
        return {label: score for label, score in scores.items() if score is not None}

    def apply(self, detections: Detections, image: Image) -> Detections:
        """Return the rows that pass; all of them when nothing is configured."""
        if (self.track is None and not self.filters and not self.masks) or not len(detections):
            return detections
        feet = bottom_centers(detections, image)
        keep = ~any_contains(self.masks, feet)
        labels = np.array(detections.labels)
        if self.track is not None:
            keep &= np.isin(labels, np.array(self.track, str))
        for label, one in self.filters.items():
            keep &= (labels != label) | one.accepts(detections, image, feet)
        return detections[keep]
