"""The visits of one camera: tracks, and what a new track has to do with those that were there before."""

from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from vision.boxes import Box, covered, is_near, overlap
from vision.types import Detections
from vision.zones import MEMORY_FRAMES, MEMORY_S, Whereabouts

_PART_OF_ANOTHER = 0.8
_NUM_SCORES = 10

NEW_TRACK = "new_track"


@dataclass(slots=True)
class Visit:
    """What is remembered of a track.

    `due` are the reasons for a description that came up, `described` those for which it was described, and
    `described_s` the last time. `host` is a described visit that this one seems to be a part of;
    `has_moved_out` tells that it was once seen outside of the motion masks.
    """

    label: str
    box: Box
    began_s: float
    seen_s: float
    where: Whereabouts
    seen_frame: int = 0
    hits: int = 0
    due: set[str] = field(default_factory=set)
    described: set[str] = field(default_factory=set)
    described_s: float | None = None
    host: "Visit | None" = None
    held_back: set[str] = field(default_factory=set)
    scores: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_SCORES))
    has_moved_out: bool = False

    @property
    def is_described(self) -> bool:
        """Whether it was in a frame that was described."""
        return NEW_TRACK in self.described

    @property
    def usual_score(self) -> float:
        """The median of its last scores."""
        return median(self.scores)

    def take_over(self, other: "Visit") -> None:
        """Go on with what `other` began."""
        self.due |= other.due
        self.described |= other.described | {NEW_TRACK}
        self.described_s, self.host = other.described_s, None


class Visits:
    """All visits that are remembered, by the frames' own time.

    A track that starts within `reacquire_s` near the place where a described one of its class was lost is
    the same visit. `num_held_back` counts those under ``reacquired``.
    """

    def __init__(self, reacquire_s: float, num_held_back: Counter[str]) -> None:
        self._reacquire_s = reacquire_s
        self._num_held_back = num_held_back
        self._by_id: dict[int, Visit] = {}
        self._gone: list[Visit] = []
        self._now_s = 0.0
        self._num_frames = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def clear(self) -> None:
        """Forget them all."""
        self._gone += self._by_id.values()
        self._by_id.clear()

    def take_gone(self) -> list[Visit]:
        """Those that were forgotten since the last time."""
        gone, self._gone = self._gone, []
        return gone

    def see(self, now_s: float, detections: Detections, where: list[Whereabouts]) -> list[Visit]:
        """Take the next frame's tracked detections; one visit a row."""
        self._now_s = now_s
        self._num_frames += 1
        ids = track_ids(detections).tolist()
        visits = []
        rows = zip(ids, detections.labels, detections.boxes, detections.scores.tolist(), where, strict=True)
        for track_id, label, box, score, place in rows:
            visit = self._by_id.get(track_id) or self._arrive(label, box, place, in_view=ids)
            self._by_id[track_id] = visit
            visit.label, visit.box, visit.seen_s, visit.where = label, box, now_s, place
            visit.seen_frame = self._num_frames
            visit.hits += 1
            visit.scores.append(score)
            visits.append(visit)
        for visit in visits:
            if not visit.is_described:
                self._join_host(visit, visits)
        self._forget()
        return visits

    def _arrive(self, label: str, box: Box, place: Whereabouts, in_view: list[int]) -> Visit:
        visit = Visit(label, box, self._now_s, self._now_s, place)
        for track_id, lost in self._by_id.items():
            is_recent = self._now_s - lost.seen_s <= self._reacquire_s and track_id not in in_view
            if is_recent and lost.is_described and lost.label == label and is_near(box, lost.box):
                # invariant: a lost visit is taken up by one track at most
                del self._by_id[track_id]
                visit.began_s = lost.began_s
                return self._take_up(visit, lost)
        return visit

    def _join_host(self, visit: Visit, visits: list[Visit]) -> None:
        host = visit.host
        if host and host.seen_s < self._now_s:
            # why: when two tracks lie on one object, either of them may be the one that goes on
            self._take_up(visit, host)
        else:
            visit.host = next((v for v in visits if v.is_described and _is_part(visit, v)), None)

    def _take_up(self, visit: Visit, lost: Visit) -> Visit:
        visit.take_over(lost)
        self._num_held_back["reacquired"] += 1
        return visit

    def _forget(self) -> None:
        # invariant: no sooner than a tracker forgets a lost track, else its return would be a new visit
        oldest_s = self._now_s - max(self._reacquire_s, MEMORY_S)
        oldest_frame = self._num_frames - MEMORY_FRAMES
        lost = [i for i, v in self._by_id.items() if v.seen_s < oldest_s and v.seen_frame <= oldest_frame]
        self._gone += [self._by_id.pop(track_id) for track_id in lost]


def track_ids(detections: Detections) -> NDArray[np.int64]:
    """The ids; raises `ValueError` for detections that were not tracked."""
    if detections.track_ids is None:
        raise ValueError("a trigger needs tracked detections: call Tracker.update first")
    return detections.track_ids


def _is_part(visit: Visit, host: Visit) -> bool:
    """Whether a box lies within another of its class, or on one of any class."""
    if visit.label == host.label:
        return covered(visit.box, host.box) > _PART_OF_ANOTHER
    return overlap(visit.box, host.box) > _PART_OF_ANOTHER
