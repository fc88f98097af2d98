"""Which frame is worth a description, and why."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vision.near_duplicates import Shown
from vision.polygons import Polygon, any_contains
from vision.types import Detections, Frame, Observation
from vision.visits import NEW_TRACK, Visit, Visits, track_ids
from vision.zones import LineConfig, Places, Whereabouts, ZoneConfig

SCENE = "scene"
"""The label of an observation that is of no track."""

ON_DEMAND = "on_demand"
"""The reason of an observation that was asked for."""

_KINDS = ("line_crossing", "zone_entry", "dwell", NEW_TRACK)


@dataclass(frozen=True)
class TriggerConfig:
    """When a frame is worth a description.

    Attributes:
        labels: wanted class names, None for every class.
        cooldown_s: after a description, seconds of video without another one of the same class. Who comes
            meanwhile and is still there at the end of it is described then, as is what a described one did
            meanwhile.
        camera_cooldown_s: likewise, without another one of any class.
        track_cooldown_s: likewise, without another one of the same track.
        min_score: lowest score of the detection, 0 to 1.
        min_area: lowest area of its box, as a fraction of the frame.
        min_hits: frames that the track must have been seen in.
        reacquire_s: a track that starts within this many seconds near the place where a described one of its
            class was lost is the same visit.
        thresholds: class name → lowest median of a track's last ten scores.
        motion_masks: who was never seen outside of these areas is no reason for a description.
        zones: areas that are noticed.
        lines: lines that are noticed.
        new_track: describe each visit.
        zone_entry: describe who comes into one of these zones.
        dwell_s: describe who stays in view for so many seconds; None for nobody.
        dwell_zones: count the stay in one of these zones instead.
        line_crossing: describe who steps over one of these lines.
        period_s: describe the scene when nothing was described for so many seconds; None for never.
        required_zones: only who has been in one of these zones is a reason; empty for everybody.
        similarity: leave out a frame that shows what was described last: no wanted box has changed, and the
            pictures agree to this degree (1: the same), also within each box; None leaves nothing out.
    """

    labels: tuple[str, ...] | None = None
    cooldown_s: float = 10.0
    min_score: float = 0.4
    min_area: float = 0.002
    min_hits: int = 3
    reacquire_s: float = 5.0
    camera_cooldown_s: float = 0.0
    track_cooldown_s: float = 0.0
    thresholds: Mapping[str, float] = field(default_factory=dict)
    motion_masks: tuple[Polygon, ...] = ()
    zones: tuple[ZoneConfig, ...] = ()
    lines: tuple[LineConfig, ...] = ()
    new_track: bool = True
    zone_entry: tuple[str, ...] = ()
    dwell_s: float | None = None
    dwell_zones: tuple[str, ...] = ()
    line_crossing: tuple[str, ...] = ()
    period_s: float | None = None
    required_zones: tuple[str, ...] = ()
    similarity: float | None = None


class Trigger:
    """The visits of one camera.

    All times are those of the frames, so that a recording gives the same observations at any speed.
    Whatever is in view, big and sure enough when a frame is chosen is described with it, and is no reason
    for another one.

    Attributes:
        num_held_back: tracks that gave no observation (yet), by reason: ``cooldown``, ``part_of_another``
            (its box lies within that of a described one), ``reacquired`` (it goes on with a described visit),
            ``threshold``, ``motion_mask``; frames left out as ``near_duplicate``; and under ``gone`` each
            crossing, entry or stay of which a cooldown let nobody hear until the track was forgotten.
        where: of the newest frame, where each detection is.
    """

    def __init__(self, config: TriggerConfig) -> None:
        self.config = config
        self.num_held_back: Counter[str] = Counter()
        self.where: list[Whereabouts] = []
        self._places = Places(config.zones, config.lines)
        self._visits = Visits(config.reacquire_s, self.num_held_back)
        self._now_s = 0.0
        self._forget_times()

    def update(
        self, frame: Frame, detections: Detections, *, is_asked_for: bool = False
    ) -> Observation | None:
        """Take the next frame, with tracked detections, and tell whether it is to be described, and why.

        One that `is_asked_for` is, whatever it shows.
        """
        track_ids(detections)
        if frame.time_s < self._now_s:
            self.reset()
        self._now_s = frame.time_s
        self.where = self._places.update(frame, detections)
        visits = self._visits.see(self._now_s, detections, self.where)
        self._count_gone()
        for visit in visits:
            visit.due.update(self._arisen(visit))
        is_fit = self._fit(frame, detections)
        rows = np.flatnonzero(is_fit).tolist()
        reasons = {row: reason for row in rows if (reason := self._reason_for(visits[row]))}
        why = ON_DEMAND if is_asked_for else self._period_is_over() if not reasons else None
        if not reasons and not why:
            return None
        scores = detections.scores
        chosen = max(list(reasons) or rows, key=lambda row: float(scores[row]), default=-1)
        is_duplicate = self._is_duplicate(frame, detections[is_fit]) and not is_asked_for
        self._settle([visits[row] for row in rows], is_told=not is_duplicate)
        if is_duplicate:
            self.num_held_back["near_duplicate"] += 1
            return None
        reason = why or reasons[chosen]
        return self._observe(frame, detections, visits, chosen, reason)

    @property
    def num_visits(self) -> int:
        """Tracks in memory."""
        return len(self._visits)

    def reset(self) -> None:
        """Forget all visits: for a new recording. The counts stay."""
        self._visits.clear()
        self._count_gone()
        self._places.reset()
        self._forget_times()
        self._now_s = 0.0

    def _forget_times(self) -> None:
        self._described_s: dict[str, float] = {}
        self._last_s: float | None = None
        self._quiet_since_s: float | None = None
        self._shown: Shown | None = None

    def _fit(self, frame: Frame, detections: Detections) -> NDArray[np.bool_]:
        config = self.config
        is_wanted = [config.labels is None or label in config.labels for label in detections.labels]
        is_big = detections.areas >= config.min_area * frame.width * frame.height
        return np.asarray(is_wanted, np.bool_) & is_big & (detections.scores >= config.min_score)

    def _reason_for(self, visit: Visit) -> str | None:
        """Why a visit is to be described now, None if it is not."""
        self._see_motion(visit)
        if visit.hits < self.config.min_hits:
            return None
        reasons = self._reasons(visit)
        if not reasons or (obstacle := self._obstacle(visit)) is None:
            return next(iter(reasons), None)
        self.num_held_back[obstacle] += obstacle not in visit.held_back
        visit.held_back.add(obstacle)
        return None

    def _reasons(self, visit: Visit) -> list[str]:
        """What a visit was not described for yet, the most special reason first."""
        if not self._is_admitted(visit):
            return []
        return sorted(visit.due - visit.described, key=_rank)

    def _count_gone(self) -> None:
        for visit in self._visits.take_gone():
            untold = {*self._reasons(visit)} - {NEW_TRACK}
            if untold and "cooldown" in visit.held_back:
                self.num_held_back["gone"] += len(untold)

    def _arisen(self, visit: Visit) -> list[str]:
        """What happened in this frame, some of which is over in the next: it is due until it is described."""
        config, where = self.config, visit.where
        crossed = [
            f"line_crossing:{name}:{side}" for name, side in where.crossed if name in config.line_crossing
        ]
        entered = [f"zone_entry:{name}" for name in where.zones if name in config.zone_entry]
        return [*crossed, *entered, *self._dwells(visit), *([NEW_TRACK] if config.new_track else [])]

    def _dwells(self, visit: Visit) -> list[str]:
        dwell_s, stays_s = self.config.dwell_s, visit.where.stays_s
        if dwell_s is None:
            return []
        if self.config.dwell_zones:
            return [f"dwell:{name}" for name in self.config.dwell_zones if stays_s.get(name, -1.0) >= dwell_s]
        return ["dwell"] if self._now_s - visit.began_s >= dwell_s else []

    def _is_admitted(self, visit: Visit) -> bool:
        required = self.config.required_zones
        return not required or any(name in required for name in visit.where.entered)

    def _see_motion(self, visit: Visit) -> None:
        if not visit.has_moved_out:
            masked = any_contains(self.config.motion_masks, np.array([visit.where.foot]))
            visit.has_moved_out = not masked[0]

    def _obstacle(self, visit: Visit) -> str | None:
        if visit.host:
            return "part_of_another"
        if not visit.has_moved_out:
            return "motion_mask"
        if visit.usual_score < self.config.thresholds.get(visit.label, 0.0):
            return "threshold"
        return "cooldown" if self._is_cooling_down(visit) else None

    def _is_cooling_down(self, visit: Visit) -> bool:
        config = self.config
        last = (
            (self._described_s.get(visit.label), config.cooldown_s),
            (self._last_s, config.camera_cooldown_s),
            (visit.described_s, config.track_cooldown_s),
        )
        return any(time_s is not None and self._now_s - time_s < pause_s for time_s, pause_s in last)

    def _period_is_over(self) -> str | None:
        if self._quiet_since_s is None:
            self._quiet_since_s = self._now_s
        period_s = self.config.period_s
        return "periodic" if period_s is not None and self._now_s - self._quiet_since_s >= period_s else None

    def _is_duplicate(self, frame: Frame, wanted: Detections) -> bool:
        if self.config.similarity is None:
            return False
        if self._shown is not None and self._shown.is_shown_by(frame.image, wanted, self.config.similarity):
            return True
        self._shown = Shown.of(frame.image, wanted)
        return False

    def _settle(self, visits: list[Visit], *, is_told: bool) -> None:
        """Nothing is due any more; what was left out as the same as before begins no cooldown."""
        self._quiet_since_s = self._now_s
        self._last_s = self._now_s if is_told else self._last_s
        for visit in visits:
            seen = {*self._reasons(visit), *([NEW_TRACK] if self._is_admitted(visit) else [])}
            if seen - visit.described:
                visit.described |= seen
                visit.host = None
                if is_told:
                    visit.described_s = self._described_s[visit.label] = self._now_s

    def _observe(
        self, frame: Frame, detections: Detections, visits: list[Visit], row: int, reason: str
    ) -> Observation:
        zones_by_row = tuple(where.zones for where in self.where) if self.config.zones else ()
        if row < 0:
            return Observation(frame, detections, 0, SCENE, reason, zones_by_row=zones_by_row)
        track_id, visit = int(track_ids(detections)[row]), visits[row]
        return Observation(
            frame, detections, track_id, visit.label, reason, visit.where.entered, zones_by_row
        )


def _rank(reason: str) -> tuple[int, str]:
    return _KINDS.index(reason.partition(":")[0]), reason
