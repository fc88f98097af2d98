"""The values that flow through the package: `Frame → Detections → Observation`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
"""A picture, ``[H, W, 3]`` BGR, upright."""

Index = NDArray[np.bool_] | NDArray[np.int64] | slice
"""What selects rows of `Detections`."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One picture of one camera.

    Attributes:
        camera: the camera's name; ids of tracks are unique within it.
        index: position in the source, from 0; frames that were lost leave gaps.
        time_s: seconds since the start of the recording or stream, from the time stamps.
        captured_at: unix seconds when the frame was taken or read.
        image: ``[H, W, 3]`` uint8 BGR, upright.
    """

    camera: str
    index: int
    time_s: float
    captured_at: float
    image: Image

    @property
    def height(self) -> int:
        """Height in pixels."""
        return int(self.image.shape[0])

    @property
    def width(self) -> int:
        """Width in pixels."""
        return int(self.image.shape[1])


@dataclass(frozen=True, slots=True)
class Detections:
    """What was found in one frame, as columns of one length n.

    Attributes:
        boxes: ``[n, 4]`` float32, x1 y1 x2 y2 in pixels of the frame.
        scores: ``[n]`` float32, 0 to 1.
        class_ids: ``[n]`` int64, keys of ``names``.
        names: class id → name, of the model.
        track_ids: ``[n]`` int64, or None before tracking.
    """

    boxes: NDArray[np.float32]
    scores: NDArray[np.float32]
    class_ids: NDArray[np.int64]
    names: Mapping[int, str]
    track_ids: NDArray[np.int64] | None = None

    @classmethod
    def empty(cls, names: Mapping[int, str], *, tracked: bool = False) -> "Detections":
        """Return a value without rows."""
        ids = np.empty(0, np.int64) if tracked else None
        return cls(np.empty((0, 4), np.float32), np.empty(0, np.float32), np.empty(0, np.int64), names, ids)

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, rows: Index) -> "Detections":
        """Return the chosen rows: a boolean mask ``[n]``, an array of positions, or a slice."""
        ids = None if self.track_ids is None else self.track_ids[rows]
        return Detections(self.boxes[rows], self.scores[rows], self.class_ids[rows], self.names, ids)

    def with_tracks(self, track_ids: NDArray[np.int64]) -> "Detections":
        """Return the same rows with track ids ``[n]``."""
        return replace(self, track_ids=np.asarray(track_ids, np.int64))

    @property
    def labels(self) -> list[str]:
        """Class names, one a row."""
        return [self.names[i] for i in self.class_ids.tolist()]

    @property
    def areas(self) -> NDArray[np.float32]:
        """``[n]`` box areas in square pixels."""
        sides = np.clip(self.boxes[:, 2:] - self.boxes[:, :2], 0, None)
        return np.asarray(sides[:, 0] * sides[:, 1], np.float32)

    def to_summary(self, decimals: int = 5) -> list[dict[str, Any]]:
        """Return one plain dict a row, with the keys of ultralytics' ``Results.summary()``.

        Those are ``name``, ``class``, ``confidence``, ``box`` (``x1``, ``y1``, ``x2``, ``y2`` in pixels) and,
        after tracking, ``track_id``.
        """
        rows = [
            {
                "name": self.names[class_id],
                "class": class_id,
                "confidence": round(score, decimals),
                "box": {
                    key: round(v, decimals) for key, v in zip(("x1", "y1", "x2", "y2"), box, strict=True)
                },
            }
            for box, score, class_id in zip(
                self.boxes.tolist(), self.scores.tolist(), self.class_ids.tolist(), strict=True
            )
        ]
        if self.track_ids is not None:
            for row, track_id in zip(rows, self.track_ids.tolist(), strict=True):
                row["track_id"] = track_id
        return rows


@dataclass(frozen=True, slots=True)
class Sighting:
    """A frame from before, kept with what was tracked in it."""

    frame: Frame
    detections: Detections


@dataclass(frozen=True, slots=True)
class Observation:
    """A frame that is worth a description.

    Attributes:
        frame: the frame.
        detections: everything in view of it, tracked.
        track_id: the track that made it worth one; 0 when none did.
        label: that track's class name, ``"scene"`` when there is none.
        reason: why: ``new_track``, ``zone_entry:ZONE``, ``dwell`` or ``dwell:ZONE``,
            ``line_crossing:LINE:SIDE``, ``periodic``, ``on_demand``.
        zones: those that the track has been in.
        zones_by_row: those that each detection is in.
        earlier: frames of the track from before, oldest first.
    """

    frame: Frame
    detections: Detections
    track_id: int
    label: str
    reason: str = "new_track"
    zones: tuple[str, ...] = ()
    zones_by_row: tuple[tuple[str, ...], ...] = ()
    earlier: tuple[Sighting, ...] = ()
