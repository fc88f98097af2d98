"""Objects that enter, move, stop and leave, as functions of time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator

from vision.scenes.figures import Look
from vision.scenes.painter import sample_look
from vision.scenes.sampling import (
    GROUND,
    SHAPES,
    VEHICLE_GROUND,
    WALKING_ASPECT,
    is_visible,
    object_size,
    sample_color,
)
from vision.scenes.scene import VEHICLES, Box, SceneObject, area

EPISODE_S = 16.0
MIN_IN_VIEW = 0.3
_CHECK_S = 0.2
_TRIES = 12
_Path = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """Where actors play: place, time of day and the frame's width and height in pixels."""

    place: str
    time_of_day: str
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Actor:
    """One object of an episode.

    foot: where it stands, fraction of the frame's height.
    path: (seconds of the episode, centre as a fraction of the frame's width), in order of time; before
    and after it the actor is not there.
    """

    label: str
    color: str | None
    look: Look
    foot: float
    path: _Path

    def is_there(self, time_s: float) -> bool:
        """Whether the path has begun and not ended."""
        return self.path[0][0] <= time_s <= self.path[-1][0]

    def velocity(self, time_s: float) -> float:
        """Frame widths per second, positive to the right, 0 while it stands."""
        for (start, x1), (end, x2) in zip(self.path, self.path[1:], strict=False):
            if start <= time_s < end:
                return (x2 - x1) / (end - start)
        return 0.0

    def center(self, time_s: float) -> float:
        """Horizontal centre as a fraction of the frame's width."""
        times, xs = zip(*self.path, strict=True)
        return float(np.interp(time_s, times, xs))

    def faces_left(self, time_s: float) -> bool:
        """Whether it moves to the left or did before it stopped."""
        x1, x2 = self.path[0][1], self.path[1][1]
        for (start, a), (_, b) in zip(self.path, self.path[1:], strict=False):
            if start <= time_s and a != b:
                x1, x2 = a, b
        return x2 < x1

    def box(self, time_s: float, stage: Stage) -> Box:
        """x1, y1, x2, y2 in pixels; it may reach beyond the frame."""
        width, height = object_size(self.label, self.foot, stage.height, self._aspect(time_s, stage))
        x, y = self.center(time_s) * stage.width, self.foot * stage.height
        return (x - width / 2, y - height, x + width / 2, y)

    def _aspect(self, time_s: float, stage: Stage) -> float:
        """Width by height; a walker's changes with the stride."""
        still = SHAPES[self.label][1]
        if self.label != "person" or not self.velocity(time_s):
            return still
        step = object_size("person", self.foot, stage.height, 0.75)[0]
        swing = abs(np.sin(np.pi * self.center(time_s) * stage.width / step))
        return float(WALKING_ASPECT[0] - 0.04 + swing * (WALKING_ASPECT[1] - WALKING_ASPECT[0]))

    def action(self, time_s: float) -> str | None:
        """Standing or walking, parked or driving, None for the rest."""
        moves = self.velocity(time_s) != 0
        if self.label in VEHICLES:
            return "driving" if moves else "parked"
        if self.label == "person":
            return "walking" if moves else "standing"
        return None

    def seen(self, time_s: float, stage: Stage) -> tuple[SceneObject, Look]:
        """The actor at a time as an object with its whole box, and its look."""
        look = replace(self.look, mirrored=self.faces_left(time_s))
        box = self.box(time_s, stage)
        return SceneObject(self.label, self.color, box, self.action(time_s), stage.width), look


def sample_episode(rng: Generator, stage: Stage, *, is_first: bool) -> tuple[Actor, ...]:
    """The actors of one episode of EPISODE_S seconds; none in about every eighth, but never in the first."""
    if not is_first and rng.random() < 0.12:
        return ()
    actors: tuple[Actor, ...] = ()
    for index in range(int(rng.integers(4, 7))):
        for _ in range(_TRIES):
            group = _sample_group(rng, stage, latest=1.0 if is_first and index == 0 else EPISODE_S)
            if _is_clear(actors + group, stage):
                actors += group
                break
    return actors


def inside(box: Box, stage: Stage) -> Box:
    """The part of a box within the frame."""
    x1, x2 = (min(max(x, 0.0), float(stage.width)) for x in (box[0], box[2]))
    y1, y2 = (min(max(y, 0.0), float(stage.height)) for y in (box[1], box[3]))
    return (x1, y1, x2, y2)


def is_in_view(box: Box, stage: Stage) -> bool:
    """Whether enough of a box is within the frame to count as seen."""
    return area(inside(box, stage)) >= MIN_IN_VIEW * area(box)


def _is_clear(actors: Sequence[Actor], stage: Stage) -> bool:
    """Whether no actor ever hides too much of another."""
    for time_s in np.arange(0, EPISODE_S, _CHECK_S):
        boxes = [a.box(time_s, stage) for a in actors if a.is_there(time_s)]
        cut = [inside(box, stage) for box in boxes if is_in_view(box, stage)]
        if not is_visible(cut):
            return False
    return True


def _sample_group(rng: Generator, stage: Stage, latest: float) -> tuple[Actor, ...]:
    """A vehicle, a dog, or a person who may walk a dog, push a bicycle or stop on the way."""
    kind = rng.random()
    if stage.place in VEHICLE_GROUND and kind < 0.45:
        return (_sample_actor(rng, stage, str(rng.choice(VEHICLES)), latest),)
    if kind > 0.92:
        return (_sample_actor(rng, stage, "dog", latest),)
    choice = rng.random()
    company = "dog" if choice < 0.25 else "bicycle" if choice < 0.45 and stage.place != "room" else None
    if company is None:
        return (_sample_actor(rng, stage, "person", latest),)
    person = _sample_actor(rng, stage, "person", latest, company)
    return (person, _beside(rng, stage, person, company))


def _sample_actor(
    rng: Generator, stage: Stage, label: str, latest: float, company: str | None = None
) -> Actor:
    """An actor that starts so far out of view that the company ahead of it is out of view too."""
    low, high = (VEHICLE_GROUND if label in VEHICLES else GROUND)[stage.place]
    foot = float(rng.uniform(low, high))
    color = None if label == "dog" else sample_color(rng, stage.time_of_day)
    half = object_size(label, foot, stage.height, SHAPES[label][1])[0] / 2 / stage.width
    lead = 2 * _lead(stage, company, foot) if company else 0.0
    path = _sample_path(rng, stage, label, half + 0.03, lead, latest)
    return Actor(label, color, sample_look(rng), foot, path)


def _sample_path(
    rng: Generator, stage: Stage, label: str, margin: float, lead: float, latest: float
) -> _Path:
    """From beyond one border to beyond the other, often with a stop, which vehicles in a yard always make."""
    is_vehicle = label in VEHICLES
    stops = rng.random() < (0.3 if stage.place == "street" and is_vehicle else 0.5)
    stops = stops or (is_vehicle and stage.place != "street")
    rest = float(rng.uniform(2.0, 4.0)) if stops else 0.0
    distance = 1 + 2 * margin + lead
    pace = float(rng.uniform(3.2, 5.0) if is_vehicle else rng.uniform(6.5, 9.5))
    crossing = min(pace * distance, EPISODE_S - rest - 0.2)
    start = float(rng.uniform(0, min(latest, EPISODE_S - crossing - rest)))
    middle = float(rng.choice((1 / 6, 1 / 2, 5 / 6)) + rng.uniform(-0.07, 0.07))
    arrive = start + crossing * (middle + margin + lead) / distance
    end = start + crossing + rest
    path: _Path = ((start, -margin - lead), (arrive, middle), (arrive + rest, middle), (end, 1 + margin))
    if not stops:
        path = (path[0], path[-1])
    return path if rng.random() < 0.5 else tuple((t, 1 - x) for t, x in path)


def _beside(rng: Generator, stage: Stage, person: Actor, label: str) -> Actor:
    """A companion that keeps just ahead of a person."""
    forward = -1 if person.faces_left(person.path[0][0]) else 1
    gap = _lead(stage, label, person.foot) * forward
    path = tuple((t, x + gap) for t, x in person.path)
    return Actor(label, None, sample_look(rng), person.foot - 0.004, path)


def _lead(stage: Stage, label: str, foot: float) -> float:
    """How far ahead of a person the centre of a companion is, in frame widths."""
    own, _ = object_size(label, foot, stage.height, SHAPES[label][1])
    arm = object_size("person", foot, stage.height, 0.175 if label == "bicycle" else 0.32)[0]
    return (own / 2 + arm) / stage.width
