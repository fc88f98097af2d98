"""What a camera saw a moment ago: a few frames, so that a track can be shown as it came."""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from vision.pixels import shrink
from vision.types import Detections, Frame, Sighting


@dataclass(frozen=True)
class HistoryConfig:
    """How much is kept.

    Attributes:
        num_frames: frames besides the newest; 0 keeps nothing.
        interval_s: least time between two of them.
        max_side: they are made smaller, so that their longer side has at most so many pixels.
    """

    num_frames: int = 0
    interval_s: float = 1.0
    max_side: int = 1280


class History:
    """The last frames of one camera that showed a track, oldest first."""

    def __init__(self, config: HistoryConfig) -> None:
        self._config = config
        self._kept: deque[Sighting] = deque(maxlen=config.num_frames)

    def keep(self, frame: Frame, detections: Detections) -> None:
        """Remember a frame with its tracked detections, if it shows any and the last one is old enough."""
        if not self._config.num_frames or not len(detections):
            return
        if self._kept and frame.time_s - self._kept[-1].frame.time_s < self._config.interval_s:
            return
        self._kept.append(_small(frame, detections, self._config.max_side))

    def of_track(self, track_id: int) -> tuple[Sighting, ...]:
        """The kept frames with that track, oldest first."""
        return tuple(one for one in self._kept if track_id in one.detections.track_ids)  # type: ignore[operator]

    def clear(self) -> None:
        """Forget them."""
        self._kept.clear()


def _small(frame: Frame, detections: Detections, max_side: int) -> Sighting:
    image = shrink(frame.image, max_side)
    scale = np.array([image.shape[1] / frame.width, image.shape[0] / frame.height] * 2, np.float32)
    return Sighting(replace(frame, image=image), replace(detections, boxes=detections.boxes * scale))
