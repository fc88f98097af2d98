"""Random scenes whose every object can be told by a person who looks at the picture."""

from collections.abc import Sequence

from numpy.random import Generator

from vision.scenes.palette import COLORS
from vision.scenes.scene import (
    PLACES,
    TIMES_OF_DAY,
    VEHICLES,
    Box,
    Scene,
    SceneObject,
    center_x,
    hidden_fraction,
)

MAX_HIDDEN = 0.3
_BORDER_MARGIN = 0.035
_TRIES = 40
_RESTARTS = 6
# invariant: feet stand between these heights (fraction of the frame), far to near
GROUND = {"street": (0.53, 0.97), "park": (0.54, 0.97), "yard": (0.54, 0.97), "room": (0.60, 0.97)}
VEHICLE_GROUND = {"street": (0.64, 0.88), "yard": (0.64, 0.86)}
SHAPES = {
    "person": (1.0, 0.34),
    "car": (0.60, 2.15),
    "bus": (0.92, 1.80),
    "truck": (0.86, 1.75),
    "bicycle": (0.56, 1.62),
    "dog": (0.40, 1.42),
}
"""Heights relative to a person at the same distance, and width by height."""
WALKING_ASPECT = (0.42, 0.52)


def sample_scene(
    rng: Generator,
    *,
    size: tuple[int, int] = (448, 256),
    place: str | None = None,
    time_of_day: str | None = None,
) -> Scene:
    """A random scene of (width, height) pixels; place and time of day are drawn where they are None."""
    place = place or str(rng.choice(PLACES, p=(0.4, 0.2, 0.25, 0.15)))
    time_of_day = time_of_day or str(rng.choice(TIMES_OF_DAY, p=(0.4, 0.25, 0.35)))
    labels = _sample_labels(rng, place)
    empty = Scene(place, time_of_day, *size)
    best: list[SceneObject] = []
    for _ in range(_RESTARTS):
        objects = _place_all(rng, empty, labels)
        best = max(best, objects, key=len)
        if len(best) == len(labels):
            break
    return Scene(place, time_of_day, *size, tuple(best))


def person_height(foot: float, height: int) -> float:
    """Pixels that a person is tall whose feet are at `foot` (fraction of the frame's height)."""
    return height * (0.30 + 0.62 * (foot - 0.53))


def sample_color(rng: Generator, time_of_day: str) -> str:
    """A colour name that can be told at that time of day."""
    names = [name for name in COLORS if name != "black" or time_of_day == "day"]
    return str(rng.choice(names))


def _sample_labels(rng: Generator, place: str) -> list[str]:
    """Which objects a scene shall hold, the widest first."""
    labels = ["person"] * int(rng.integers(0, 5))
    if place in VEHICLE_GROUND:
        most = (0.22, 0.34, 0.26, 0.18) if place == "street" else (0.4, 0.4, 0.2, 0.0)
        count = int(rng.choice(4, p=most))
        labels += [str(v) for v in rng.choice(VEHICLES, count, p=(0.4, 0.3, 0.3))]
    if place != "room" and rng.random() < 0.25:
        labels.append("bicycle")
    if rng.random() < 0.27:
        labels += ["dog"] * (1 if rng.random() < 0.85 else 2)
    order = ("bus", "truck", "car", "bicycle", "person", "dog")
    return sorted(labels, key=order.index)


def _place_all(rng: Generator, scene: Scene, labels: Sequence[str]) -> list[SceneObject]:
    objects: list[SceneObject] = []
    for label in labels:
        for _ in range(_TRIES):
            item = _sample_object(rng, scene, label)
            if is_clear(item.box, [o.box for o in objects], scene.width):
                objects.append(item)
                break
    return objects


def is_clear(box: Box, others: Sequence[Box], width: int) -> bool:
    """Whether a box may join others: its third is unambiguous and nothing hides too much of anything."""
    thirds = (width / 3, 2 * width / 3)
    if any(abs(center_x(box) - border) < _BORDER_MARGIN * width for border in thirds):
        return False
    return is_visible([*others, box])


def is_visible(boxes: Sequence[Box]) -> bool:
    """Whether no box is hidden by more than MAX_HIDDEN, where lower edges tell which is nearer."""
    return all(
        hidden_fraction(box, [o for o in boxes if o is not box and o[3] >= box[3]]) <= MAX_HIDDEN
        for box in boxes
    )


def _sample_object(rng: Generator, scene: Scene, label: str) -> SceneObject:
    low, high = (VEHICLE_GROUND if label in VEHICLES else GROUND)[scene.place]
    foot = float(rng.uniform(low, high))
    action = _sample_action(rng, scene.place, label)
    width, height = object_size(label, foot, scene.height, _sample_aspect(rng, label, action))
    left = float(rng.uniform(1, max(2.0, scene.width - width - 1)))
    bottom = foot * scene.height
    has_color = label == "person" or label in VEHICLES
    color = sample_color(rng, scene.time_of_day) if has_color else None
    return SceneObject(label, color, (left, bottom - height, left + width, bottom), action, scene.width)


def object_size(label: str, foot: float, frame_height: int, aspect: float) -> tuple[float, float]:
    """Width and height in pixels of an object that stands at `foot` (fraction of the frame's height)."""
    height = SHAPES[label][0] * person_height(foot, frame_height)
    return height * aspect, height


def _sample_aspect(rng: Generator, label: str, action: str | None) -> float:
    if action == "walking":
        return float(rng.uniform(*WALKING_ASPECT))
    return SHAPES[label][1] * float(rng.uniform(0.95, 1.05))


def _sample_action(rng: Generator, place: str, label: str) -> str | None:
    if label == "person":
        return "walking" if rng.random() < 0.5 else "standing"
    if label in VEHICLES:
        return "driving" if place == "street" and rng.random() < 0.55 else "parked"
    return None
