"""Where the tracks of one camera are: zones that they are in, lines that they cross."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vision.polygons import Line, Point, Polygon, Side, bottom_centers
from vision.types import Detections, Frame

# invariant: longer than a tracker keeps a lost track, which is some frames at least, however far apart
MEMORY_S = 30.0
MEMORY_FRAMES = 6


@dataclass(frozen=True)
class ZoneConfig:
    """An area in which objects are noticed; they are where the bottom centre of their box is.

    Attributes:
        name: as it is told.
        polygon: the area.
        labels: class names that count; empty for every class.
        inertia: frames in a row that an object must be inside to be in the zone, and outside to have left.
        loitering_s: seconds that it must have stayed to be in the zone.
    """

    name: str
    polygon: Polygon
    labels: tuple[str, ...] = ()
    inertia: int = 3
    loitering_s: float = 0.0


@dataclass(frozen=True)
class LineConfig:
    """A line that is noticed when an object steps over it.

    Attributes:
        name: as it is told.
        line: from where to where.
        labels: class names that count; empty for every class.
        to_side: the side that it must step to, as seen from the line's start to its end; None for both.
    """

    name: str
    line: Line
    labels: tuple[str, ...] = ()
    to_side: Side | None = None


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where one track is in one frame.

    Attributes:
        foot: its bottom centre, fractions of the frame.
        zones: those that it is in.
        entered: those that it has ever been in, in order.
        stays_s: zone → seconds since it came in, for those that it is in.
        crossed: ``(line, side)`` for the lines that it stepped over since the last frame with it.
    """

    foot: Point
    zones: tuple[str, ...] = ()
    entered: tuple[str, ...] = ()
    stays_s: dict[str, float] = field(default_factory=dict)
    crossed: tuple[tuple[str, Side], ...] = ()


@dataclass(slots=True)
class _Stay:
    """One track and one zone; `num_frames` is how long it is on the side of the zone's edge where it is."""

    is_inside: bool = False
    num_frames: int = 0
    since_s: float | None = None
    is_in: bool = False

    def see(self, zone: ZoneConfig, is_inside: bool, now_s: float) -> None:
        if is_inside != self.is_inside:
            self.is_inside, self.num_frames = is_inside, 0
        self.num_frames += 1
        # why: one that was outside for less than the inertia was inside all the time
        if is_inside and self.since_s is None:
            self.since_s = now_s
        if self.num_frames < zone.inertia:
            return
        if not is_inside:
            self.since_s = None
        has_stayed = self.since_s is not None and now_s - self.since_s >= zone.loitering_s
        self.is_in = is_inside and (self.is_in or has_stayed)

    def length_s(self, now_s: float) -> float:
        return 0.0 if self.since_s is None else now_s - self.since_s


@dataclass(slots=True)
class _Way:
    """What is remembered of a track."""

    foot: Point
    seen_s: float
    seen_frame: int
    stays: dict[str, _Stay] = field(default_factory=dict)
    entered: dict[str, None] = field(default_factory=dict)


class Places:
    """The zones and lines of one camera and what its tracks have to do with them, by the frames' time."""

    def __init__(self, zones: Sequence[ZoneConfig] = (), lines: Sequence[LineConfig] = ()) -> None:
        self._zones = tuple(zones)
        self._lines = tuple(lines)
        self._ways: dict[int, _Way] = {}
        self._now_s = 0.0
        self._num_frames = 0

    def update(self, frame: Frame, detections: Detections) -> list[Whereabouts]:
        """Take the next frame with its tracked detections; one answer a row."""
        if frame.time_s < self._now_s:
            self.reset()
        self._now_s = frame.time_s
        self._num_frames += 1
        assert detections.track_ids is not None
        feet = bottom_centers(detections, frame.image)
        inside = {zone.name: zone.polygon.contains(feet).tolist() for zone in self._zones}
        rows = zip(detections.track_ids.tolist(), detections.labels, feet.tolist(), strict=True)
        found = [
            self._see(track_id, label, (x, y), {name for name, column in inside.items() if column[row]})
            for row, (track_id, label, (x, y)) in enumerate(rows)
        ]
        oldest_s, oldest_frame = self._now_s - MEMORY_S, self._num_frames - MEMORY_FRAMES
        self._ways = {
            track_id: way
            for track_id, way in self._ways.items()
            if way.seen_s >= oldest_s or way.seen_frame > oldest_frame
        }
        return found

    def reset(self) -> None:
        """Forget all tracks."""
        self._ways.clear()
        self._now_s = 0.0

    def _see(self, track_id: int, label: str, foot: Point, inside: set[str]) -> Whereabouts:
        way = self._ways.setdefault(track_id, _Way(foot, self._now_s, self._num_frames))
        crossed = tuple(self._crossed(label, way.foot, foot))
        way.foot, way.seen_s, way.seen_frame = foot, self._now_s, self._num_frames
        for zone in self._zones:
            if not zone.labels or label in zone.labels:
                way.stays.setdefault(zone.name, _Stay()).see(zone, zone.name in inside, self._now_s)
        stays_s = {name: stay.length_s(self._now_s) for name, stay in way.stays.items() if stay.is_in}
        way.entered.update(dict.fromkeys(stays_s))
        return Whereabouts(foot, tuple(stays_s), tuple(way.entered), stays_s, crossed)

    def _crossed(self, label: str, before: Point, after: Point) -> list[tuple[str, Side]]:
        counting = [one for one in self._lines if not one.labels or label in one.labels]
        sides = [(one, one.line.crossing(before, after)) for one in counting]
        return [(one.name, side) for one, side in sides if side and one.to_side in (None, side)]
