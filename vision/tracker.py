"""Which box of this frame is which of the last: the tracks of one camera, by ultralytics' trackers."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vision.types import Detections, Image
from vision.ultralytics_quiet import import_ultralytics

TrackerKind = Literal["bytetrack", "botsort"]

LOW_SCORE = 0.1
"""Detections from this score on carry a track on, but do not start one (ByteTrack's second association)."""

_LANE_WIDTHS = 4
"""Widths of the picture between the lanes of two classes: more than a track may leave the picture by."""

_Kind = tuple[float, int]
"""Which boxes have a tracker in common: lowest score of a new track, and the class where each has its own."""

LOST_S = 2.0
"""A track that is out of sight for longer than this is over."""


class Tracker:
    """The tracks of one camera.

    Ids rise from 1 and are never given twice, not after a `reset` either, so that (camera, track id) names
    one track for as long as this object lives.

    why: ultralytics' trackers do not look at classes, and the ghost of a table that was just lost takes over
    the person who steps in front of it. So each class has a lane of its own: its boxes are shown to the
    tracker so far aside that none overlaps one of another class. Trackers of their own, each of which takes
    as long, have only classes with a lowest score of their own, and those of a moving camera, which turns
    lanes.

    Args:
        kind: ``bytetrack`` (motion only), or ``botsort`` (also follows the camera's own movement; slower).
        frame_rate: frames a second that `update` is called with.
        new_track_score: lowest score of a detection that starts a track.
        new_track_scores: the same by class name, where it differs.
    """

    def __init__(
        self,
        kind: TrackerKind = "bytetrack",
        frame_rate: float = 10.0,
        new_track_score: float = 0.25,
        new_track_scores: Mapping[str, float] | None = None,
    ) -> None:
        import_ultralytics()
        self._kind = kind
        self._frame_rate = frame_rate
        self._new_track_score = new_track_score
        self._new_track_scores = dict(new_track_scores or {})
        self._motion = _CameraMotion() if kind == "botsort" else None
        self._new_ids = itertools.count(1)
        self._by_kind: dict[_Kind, Any] = {}
        self._lanes: dict[int, int] = {}
        self._ids: dict[tuple[_Kind, int], int] = {}
        self._shape: tuple[int, ...] | None = None

    def update(self, detections: Detections, image: Image) -> Detections:
        """Take the next frame and return those of its detections that belong to a track, with track ids.

        Detections should come down to `LOW_SCORE`. A track shows from its second frame on, in the very first
        frame at once. A change of the picture's size starts afresh.

        Args:
            detections: of this frame, not tracked.
            image: the frame, ``[H, W, 3]``; only ``botsort`` looks at its pixels.
        """
        if self._shape not in (None, image.shape):
            self.reset()
        if self._motion:
            self._motion.see(image, detections.boxes)
        kinds = self._kinds(detections)
        for kind in sorted({*self._by_kind, *kinds}):
            self._update_kind(kind, detections, np.array([one == kind for one in kinds], np.bool_), image)
        self._shape = image.shape
        rows = self._rows_with_ids(detections)
        self._forget()
        found = np.array(sorted(rows), np.int64)
        return detections[found].with_tracks(np.array([rows[row] for row in found.tolist()], np.int64))

    def reset(self) -> None:
        """Forget all tracks: for a new recording, or a stream that was away."""
        self._by_kind.clear()
        self._lanes.clear()
        self._ids.clear()
        self._shape = None
        if self._motion:
            self._motion.reset()

    @property
    def num_tracks(self) -> int:
        """Tracks in memory, in sight or lost."""
        return sum(len(_tracks(tracker)) for tracker in self._by_kind.values())

    def _kinds(self, detections: Detections) -> list[_Kind]:
        """Which tracker each row belongs to."""
        scores = [self._new_track_scores.get(label, self._new_track_score) for label in detections.labels]
        of_classes = detections.class_ids.tolist() if self._motion else [0] * len(scores)
        return list(zip(scores, of_classes, strict=True))

    def _update_kind(
        self, kind: _Kind, detections: Detections, is_of_kind: NDArray[np.bool_], image: Image
    ) -> None:
        if kind not in self._by_kind:
            self._by_kind[kind] = self._build(kind, detections)
        rows = np.flatnonzero(is_of_kind)
        tracker = self._by_kind[kind]
        tracker.update(self._in_lanes(detections[rows], image.shape), image)
        tracker.rows = rows

    def _in_lanes(self, detections: Detections, shape: tuple[int, ...]) -> Any:
        boxes = detections.boxes
        if not self._motion:
            # invariant: a class keeps its lane as long as there may be tracks in it
            lanes = [self._lanes.setdefault(i, len(self._lanes)) for i in detections.class_ids.tolist()]
            aside = np.array(lanes, np.float32) * (_LANE_WIDTHS * shape[1])
            boxes = boxes + np.outer(aside, np.array([1, 0, 1, 0], np.float32))
        return _as_boxes(replace(detections, boxes=boxes), shape)

    def _build(self, kind: _Kind, detections: Detections) -> Any:
        from ultralytics.trackers import BOTSORT, BYTETracker

        make = {"bytetrack": BYTETracker, "botsort": BOTSORT}[self._kind]
        tracker = make(_settings(self._frame_rate, kind[0]))
        if self._motion:
            tracker.gmc = self._motion
        if self._shape is not None:
            # why: a tracker takes all of its first frame for confirmed; only the camera's first is to be so
            tracker.update(_as_boxes(Detections.empty(detections.names), self._shape))
        return tracker

    def _rows_with_ids(self, detections: Detections) -> dict[int, int]:
        rows: dict[int, int] = {}
        for kind, tracker in self._by_kind.items():
            for track in tracker.tracked_stracks:
                # invariant: a track in this list that is confirmed was matched in this frame
                if track.is_activated:
                    key = (kind, track.track_id)
                    self._ids[key] = self._ids.get(key) or next(self._new_ids)
                    rows[int(tracker.rows[int(track.idx)])] = self._ids[key]
        return rows

    def _forget(self) -> None:
        self._by_kind = {kind: tracker for kind, tracker in self._by_kind.items() if _tracks(tracker)}
        alive = {(kind, one.track_id) for kind, tracker in self._by_kind.items() for one in _tracks(tracker)}
        self._ids = {key: track_id for key, track_id in self._ids.items() if key in alive}


class _CameraMotion:
    """How the whole picture moved since the last frame: worked out once, for the trackers of all classes."""

    method = "sparseOptFlow"

    def __init__(self) -> None:
        from ultralytics.trackers.utils.gmc import GMC

        self._estimate = GMC(method=self.method)
        self._warp = np.eye(2, 3)

    def see(self, image: Image, boxes: NDArray[np.float32]) -> None:
        self._warp = self._estimate.apply(image, boxes)

    def apply(self, image: Image, boxes: NDArray[np.float32]) -> NDArray[Any]:
        """Return the ``[2, 3]`` warp; the name and arguments are those that ultralytics' trackers call."""
        return self._warp

    def reset(self) -> None:
        self._estimate.reset_params()


def _tracks(tracker: Any) -> list[Any]:
    return [*tracker.tracked_stracks, *tracker.lost_stracks]


def _as_boxes(detections: Detections, shape: tuple[int, ...]) -> Any:
    from ultralytics.engine.results import Boxes

    columns = (detections.boxes, detections.scores, detections.class_ids.astype(np.float32))
    return Boxes(np.column_stack(columns).astype(np.float32), shape[:2])


def _settings(frame_rate: float, new_track_score: float) -> SimpleNamespace:
    return SimpleNamespace(
        track_high_thresh=new_track_score,
        track_low_thresh=min(LOW_SCORE, new_track_score),
        new_track_thresh=new_track_score,
        track_buffer=max(round(LOST_S * frame_rate), 3),
        match_thresh=0.8,
        fuse_score=True,
        gmc_method="none",
        proximity_thresh=0.5,
        appearance_thresh=0.8,
        with_reid=False,
        model="auto",
    )
