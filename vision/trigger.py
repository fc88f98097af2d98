"""Which frame is worth a description: one for each visit of a wanted object."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vision.boxes import Box, covered, is_near, overlap
from vision.types import Detections, Frame, Observation

_PART_OF_ANOTHER = 0.8
# invariant: longer than a tracker keeps a lost track, else its return would be a new visit
_MEMORY_S = 30.0


@dataclass(frozen=True)
class TriggerConfig:
    """When a new track is worth a description.

    Attributes:
        labels: wanted class names; empty for every class.
        cooldown_s: after a description, seconds of video without another one of the same class. Who comes
            meanwhile and is still there at the end of it is described then.
        min_score: lowest score of the detection, 0 to 1.
        min_area: lowest area of its box, as a fraction of the frame.
        min_hits: frames that the track must have been seen in.
        reacquire_s: a track that starts within this many seconds near the place where a described one of its
            class was lost is the same visit.
    """

    labels: tuple[str, ...] = ()
    cooldown_s: float = 10.0
    min_score: float = 0.4
    min_area: float = 0.002
    min_hits: int = 3
    reacquire_s: float = 5.0


@dataclass(slots=True)
class _Visit:
    """What is remembered of a track."""

    label: str
    box: Box
    seen_s: float
    hits: int = 0
    is_described: bool = False
    host: "_Visit | None" = None
    held_back: set[str] = field(default_factory=set)


class Trigger:
    """The visits of one camera.

    All times are those of the frames, so that a recording gives the same observations at any speed.
    Whatever is in view, big and sure enough when a frame is chosen is described with it, and is no reason
    for another one.

    Attributes:
        num_held_back: tracks that gave no observation (yet), by reason: ``cooldown``, ``part_of_another``
            (its box lies within that of a described one), ``reacquired`` (it goes on with a described visit).
    """

    def __init__(self, config: TriggerConfig) -> None:
        self.config = config
        self.num_held_back: Counter[str] = Counter()
        self._visits: dict[int, _Visit] = {}
        self._described_s: dict[str, float] = {}
        self._now_s = 0.0

    def update(self, frame: Frame, detections: Detections) -> Observation | None:
        """Take the next frame, with tracked detections, and tell whether it is to be described, and why."""
        if frame.time_s < self._now_s:
            self.reset()
        self._now_s = frame.time_s
        visits = self._see(detections)
        is_fit = self._fit(frame, detections)
        due = [row for row in np.flatnonzero(is_fit).tolist() if self._is_due(visits[row])]
        if not due:
            return None
        self._describe([visits[row] for row in np.flatnonzero(is_fit)])
        track_ids = _ids(detections)
        best = max(due, key=lambda row: float(detections.scores[row]))
        return Observation(frame, detections, int(track_ids[best]), visits[best].label)

    @property
    def num_visits(self) -> int:
        """Tracks in memory."""
        return len(self._visits)

    def reset(self) -> None:
        """Forget all visits: for a new recording. The counts stay."""
        self._visits.clear()
        self._described_s.clear()
        self._now_s = 0.0

    def _see(self, detections: Detections) -> list[_Visit]:
        ids = _ids(detections).tolist()
        visits = []
        for track_id, label, box in zip(ids, detections.labels, detections.boxes, strict=True):
            visit = self._visits.get(track_id) or self._arrive(label, box, in_view=ids)
            self._visits[track_id] = visit
            visit.label, visit.box, visit.seen_s, visit.hits = label, box, self._now_s, visit.hits + 1
            visits.append(visit)
        for visit in visits:
            if not visit.is_described:
                self._join_host(visit, visits)
        self._forget()
        return visits

    def _arrive(self, label: str, box: Box, in_view: list[int]) -> _Visit:
        visit = _Visit(label, box, self._now_s)
        for track_id, lost in self._visits.items():
            is_recent = self._now_s - lost.seen_s <= self.config.reacquire_s and track_id not in in_view
            if is_recent and lost.is_described and lost.label == label and is_near(box, lost.box):
                # invariant: a lost visit is taken up by one track at most
                del self._visits[track_id]
                return self._take_up(visit)
        return visit

    def _join_host(self, visit: _Visit, visits: list[_Visit]) -> None:
        host = visit.host
        if host and host.seen_s < self._now_s:
            # why: when two tracks lie on one object, either of them may be the one that goes on
            self._take_up(visit)
        else:
            visit.host = next((v for v in visits if v.is_described and _is_part(visit, v)), None)

    def _take_up(self, visit: _Visit) -> _Visit:
        visit.is_described, visit.host = True, None
        self.num_held_back["reacquired"] += 1
        return visit

    def _forget(self) -> None:
        oldest = self._now_s - max(self.config.reacquire_s, _MEMORY_S)
        for track_id in [i for i, visit in self._visits.items() if visit.seen_s < oldest]:
            del self._visits[track_id]

    def _fit(self, frame: Frame, detections: Detections) -> NDArray[np.bool_]:
        config = self.config
        is_wanted = [not config.labels or label in config.labels for label in detections.labels]
        is_big = detections.areas >= config.min_area * frame.width * frame.height
        return np.asarray(is_wanted, np.bool_) & is_big & (detections.scores >= config.min_score)

    def _is_due(self, visit: _Visit) -> bool:
        if visit.is_described or visit.hits < self.config.min_hits:
            return False
        if visit.host:
            return self._hold_back(visit, "part_of_another")
        described_s = self._described_s.get(visit.label)
        if described_s is not None and self._now_s - described_s < self.config.cooldown_s:
            return self._hold_back(visit, "cooldown")
        return True

    def _hold_back(self, visit: _Visit, reason: str) -> bool:
        self.num_held_back[reason] += reason not in visit.held_back
        visit.held_back.add(reason)
        return False

    def _describe(self, visits: list[_Visit]) -> None:
        for visit in visits:
            if not visit.is_described:
                visit.is_described, visit.host = True, None
                self._described_s[visit.label] = self._now_s


def _is_part(visit: _Visit, host: _Visit) -> bool:
    """Whether a box lies within another of its class, or on one of any class."""
    if visit.label == host.label:
        return covered(visit.box, host.box) > _PART_OF_ANOTHER
    return overlap(visit.box, host.box) > _PART_OF_ANOTHER


def _ids(detections: Detections) -> NDArray[np.int64]:
    if detections.track_ids is None:
        raise ValueError("a trigger needs tracked detections: call Tracker.update first")
    return detections.track_ids
