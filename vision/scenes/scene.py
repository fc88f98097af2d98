"""What a rendered scene holds: plain values that are the ground truth of its picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Box = tuple[float, float, float, float]

PLACES = ("street", "park", "yard", "room")
TIMES_OF_DAY = ("day", "dusk", "night")
VEHICLES = ("car", "bus", "truck")
LABELS = ("person", *VEHICLES, "bicycle", "dog")


@dataclass(frozen=True, slots=True)
class SceneObject:
    """One visible thing.

    label: COCO name, one of LABELS. color: clothing of a person, body of a vehicle, else None.
    box: x1, y1, x2, y2 in pixels.
    action: standing or walking (person), driving or parked (vehicle), else None.
    frame_width: pixels, so that the object knows where it stands.
    """

    label: str
    color: str | None
    box: Box
    action: str | None = None
    frame_width: int = 448

    @property
    def position(self) -> Literal["left", "middle", "right"]:
        """The third of the frame that holds the centre of the box."""
        third = int(3 * center_x(self.box) / self.frame_width)
        return ("left", "middle", "right")[min(2, max(0, third))]


@dataclass(frozen=True, slots=True)
class Scene:
    """A place at a time of day with what can be seen in it; width and height in pixels."""

    place: str
    time_of_day: str
    width: int
    height: int
    objects: tuple[SceneObject, ...] = ()


def center_x(box: Box) -> float:
    """Horizontal centre of a box in pixels."""
    return (box[0] + box[2]) / 2


def area(box: Box) -> float:
    """Area of a box in square pixels; 0 for an empty one."""
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def intersection(a: Box, b: Box) -> float:
    """Area in square pixels that two boxes share."""
    return area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))


def hidden_fraction(box: Box, nearer: Sequence[Box]) -> float:
    """Upper bound of the share of `box` that nearer boxes cover: their intersections summed."""
    return sum(intersection(box, other) for other in nearer) / area(box)
