"""Polygons, lines, filters and zones, on things that move in a straight line."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.vision.moving import BLANK, Thing, detections, frame
from vision.filters import FilterConfig, ObjectFilter
from vision.polygons import Line, Polygon
from vision.zones import LineConfig, Places, Whereabouts, ZoneConfig

LEFT = Polygon(((0, 0), (0.5, 0), (0.5, 1), (0, 1)))
RIGHT = Polygon(((0.5, 0), (1, 0), (1, 1), (0.5, 1)))
# feet of a `Thing` are at x + 30 of 640 pixels and at 360 of 480
WALKER = Thing(0, 100, 0, 10)
ENTERS = 29
"""The walker's first frame with its feet in the right half."""


def walk(places: Places, things: Sequence[Thing], num_frames: int = 60) -> list[list[Whereabouts]]:
    """Where each thing is, frame by frame (10 a second); its track id is its position, from 1."""
    course = []
    for index in range(num_frames):
        ids = [number for number, thing in enumerate(things, 1) if thing.is_seen(index)]
        course.append(
            places.update(frame(index), detections(things, index).with_tracks(np.array(ids, np.int64)))
        )
    return course


@pytest.mark.parametrize(
    ("point", "is_inside"),
    [((0.2, 0.5), True), ((0.6, 0.5), False), ((0.2, 1.0), True), ((0.0, 0.0), True), ((0.2, 1.2), True)],
)
def test_a_box_at_the_border_of_the_picture_stands_in_the_areas_there(point, is_inside) -> None:
    assert LEFT.contains(np.array([point]))[0] == is_inside


def test_an_area_may_have_a_notch() -> None:
    area = Polygon(((0, 0), (1, 0), (1, 1), (0.5, 0.2), (0, 1)))
    assert area.contains(np.array([(0.1, 0.5), (0.5, 0.5), (0.9, 0.5), (0.5, 0.1)])).tolist() == [
        True, False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("points", [((0, 0), (1, 1)), ((0, 0), (1, 0), (1, 1.5))])
def test_what_is_no_area_is_refused(points) -> None:
    with pytest.raises(ValueError, match=r"3 points or more|outside of the picture"):
        Polygon(points)


def test_the_side_of_a_line_is_as_seen_along_it() -> None:
    up = Line((0.5, 1.0), (0.5, 0.5))
    assert up.crossing((0.4, 0.7), (0.6, 0.7)) == "right"
    assert up.crossing((0.6, 0.7), (0.4, 0.7)) == "left"
    assert up.crossing((0.4, 0.3), (0.6, 0.3)) is None, "it goes past the line's end"
    assert up.crossing((0.4, 0.7), (0.45, 0.7)) is None
    assert [up.crossing((0.4, 0.7), (0.5, 0.7)), up.crossing((0.5, 0.7), (0.6, 0.7))] == ["right", None]


def test_a_zone_needs_frames_in_a_row_to_enter_and_to_leave() -> None:
    course = walk(Places([ZoneConfig("yard", RIGHT, inertia=3)]), [Thing(0, 60, 0, 10, gaps=(35,))], 62)
    inside = [index for index, rows in enumerate(course) if rows and "yard" in rows[0].zones]
    assert inside == [i for i in range(ENTERS + 2, 61) if i != 35]
    back = Thing(0, 60, 310, 0)
    wobbly = [replace(back, x=310 if index % 2 else 250) for index in range(40)]
    places = Places([ZoneConfig("yard", RIGHT, inertia=3)])
    for index, thing in enumerate(wobbly):
        (where,) = places.update(frame(index), detections([thing], index).with_tracks(np.array([1])))
        assert where.zones == (), "it was never three frames inside"


def test_a_zone_may_ask_for_a_stay() -> None:
    """Times are the video's, from the first frame inside."""
    course = walk(Places([ZoneConfig("yard", RIGHT, inertia=2, loitering_s=1.5)]), [WALKER])
    first = next(index for index, rows in enumerate(course) if rows[0].zones)
    assert first == ENTERS + 15
    assert course[first][0].stays_s["yard"] == pytest.approx(1.5)


def test_a_zone_counts_its_classes_only_and_remembers_who_was_there() -> None:
    places = Places(
        [ZoneConfig("yard", LEFT, labels=("car",), inertia=1), ZoneConfig("all", LEFT, inertia=1)]
    )
    course = walk(places, [WALKER])
    assert course[5][0].zones == ("all",)
    assert (course[50][0].zones, course[50][0].entered) == ((), ("all",))


def test_a_line_is_noticed_in_the_frame_that_steps_over_it() -> None:
    line = Line((0.5, 1.0), (0.5, 0.0))
    lines = [
        LineConfig("gate", line),
        LineConfig("out", line, to_side="left"),
        LineConfig("c", line, ("car",)),
    ]
    course = walk(Places([], lines), [WALKER])
    assert {index: rows[0].crossed for index, rows in enumerate(course) if rows[0].crossed} == {
        ENTERS: (("gate", "right"),)
    }


@pytest.mark.parametrize(
    ("one", "passes"),
    [
        (ObjectFilter(min_area=9600), True),
        (ObjectFilter(min_area=9601), False),
        (ObjectFilter(min_area=0.031), True),
        (ObjectFilter(min_area=0.032), False),
        (ObjectFilter(max_area=9599), False),
        (ObjectFilter(max_area=0.03), False),
        (ObjectFilter(min_ratio=0.4), False),
        (ObjectFilter(max_ratio=0.3), False),
        (ObjectFilter(min_ratio=0.3, max_ratio=0.4), True),
        (ObjectFilter(masks=(RIGHT,)), True),
        (ObjectFilter(masks=(RIGHT, LEFT)), False),
    ],
)
def test_a_filter_is_of_its_class(one: ObjectFilter, passes: bool) -> None:
    """Sizes in pixels or as a share of the frame, shapes, and masks; a box of 60 x 160 in 640 x 480."""
    person, car = Thing(0, 1, 100), Thing(0, 1, 100, label=2)
    config = FilterConfig(filters={"person": one})
    assert config.apply(detections([person, car], 0), BLANK).labels == ["person", "car"][not passes :]


def test_classes_and_masks_for_all() -> None:
    both = detections([Thing(0, 1, 100), Thing(0, 1, 500, label=2)], 0)
    assert FilterConfig(track=("car",)).apply(both, BLANK).labels == ["car"]
    assert FilterConfig(masks=(RIGHT,)).apply(both, BLANK).labels == ["person"]
    assert FilterConfig().apply(both, BLANK) is both
    filters = {"car": ObjectFilter(min_score=0.6), "person": ObjectFilter()}
    assert FilterConfig(filters=filters).new_track_scores == {"car": 0.6}
