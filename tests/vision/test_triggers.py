"""The reasons for a description besides a new track, what holds them back, what is left out as the same."""

from dataclasses import replace

import numpy as np
import pytest

from tests.vision.moving import BLANK, Thing, detections, frame
from tests.vision.test_places import ENTERS, LEFT, RIGHT, WALKER
from tests.vision.test_trigger import watch
from vision.history import History, HistoryConfig
from vision.pipeline import CameraConfig, _Camera
from vision.polygons import Line
from vision.trigger import Trigger, TriggerConfig
from vision.types import Frame
from vision.zones import LineConfig, ZoneConfig

ZONES = (ZoneConfig("street", LEFT), ZoneConfig("yard", RIGHT))
GATE = LineConfig("gate", Line((0.5, 1.0), (0.5, 0.0)))
QUIET = TriggerConfig(cooldown_s=0, min_hits=1, new_track=False, zones=ZONES, lines=(GATE,))


def reasons(config: TriggerConfig, *things: Thing, num_frames: int = 60) -> list[tuple[int, str]]:
    seen = watch(Trigger(config), things or (WALKER,), num_frames)
    return [(observation.frame.index, observation.reason) for observation in seen]


def test_who_comes_into_a_zone_is_described_once() -> None:
    expected = [(ENTERS + 2, "zone_entry:yard")]
    assert reasons(replace(QUIET, zone_entry=("yard",))) == expected
    forth_and_back = [(2, "zone_entry:street"), *expected]
    assert reasons(replace(QUIET, zone_entry=("yard", "street"))) == forth_and_back


def test_an_observation_tells_the_zones() -> None:
    (seen,) = watch(Trigger(replace(QUIET, zone_entry=("yard",))), [WALKER, Thing(0, 60, 100, label=2)], 60)
    assert (seen.zones, seen.zones_by_row) == (("street", "yard"), (("yard",), ("street",)))


def test_who_stays_is_described_after_that_time() -> None:
    assert reasons(replace(QUIET, dwell_s=2.0), Thing(5, 60, 100)) == [(25, "dwell")]
    assert reasons(replace(QUIET, dwell_s=2.0), Thing(5, 24, 100)) == []
    in_yard = replace(QUIET, dwell_s=2.0, dwell_zones=("yard",))
    assert reasons(in_yard) == [(ENTERS + 20, "dwell:yard")]


def test_who_steps_over_a_line_is_described() -> None:
    there = replace(QUIET, line_crossing=("gate",))
    assert reasons(there) == [(ENTERS, "line_crossing:gate:right")]
    assert reasons(there, Thing(0, 60, 560, -10)) == [(28, "line_crossing:gate:left")]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"new_track": True, "cooldown_s": 4.0}, [(0, "new_track"), (40, "line_crossing:gate:right")]),
        ({"min_hits": 50}, [(49, "line_crossing:gate:right")]),
        ({"line_crossing": (), "zone_entry": ("street",), "min_hits": 50}, [(49, "zone_entry:street")]),
        (
            {"line_crossing": (), "dwell_s": 2.0, "dwell_zones": ("street",), "min_hits": 50},
            [(49, "dwell:street")],
        ),
    ],
)
def test_what_happens_while_nothing_may_be_told_is_told_later(change, expected) -> None:
    """In a cooldown, or before a track is seen for long enough; by then it is over."""
    assert reasons(replace(QUIET, **({"line_crossing": ("gate",)} | change))) == expected


def test_a_crossing_in_a_frame_of_a_low_score_is_told_with_the_next() -> None:
    trigger, seen = Trigger(replace(QUIET, line_crossing=("gate",))), []
    for index in range(ENTERS - 5, ENTERS + 5):
        unsure = replace(WALKER, score=0.3 if index == ENTERS else 0.9)
        tracked = detections([unsure], index).with_tracks(np.array([1]))
        if found := trigger.update(frame(index), tracked):
            seen.append((index, found.reason))
    assert seen == [(ENTERS + 1, "line_crossing:gate:right")]


@pytest.mark.parametrize("is_reset", [False, True])
def test_what_nobody_heard_of_before_its_track_was_gone_is_counted(is_reset: bool) -> None:
    """The walker crosses the line within the cooldown and leaves the picture before that ends."""
    trigger = Trigger(replace(QUIET, new_track=True, line_crossing=("gate",), cooldown_s=20.0))
    leaver = replace(WALKER, last=ENTERS + 5)
    watch(trigger, [leaver], ENTERS + 10)
    assert trigger.num_held_back == {"cooldown": 1}
    if is_reset:
        trigger.reset()
    else:
        watch(trigger, [], ENTERS + 350, start=ENTERS + 10)
    assert trigger.num_held_back == {"cooldown": 1, "gone": 1}


def test_who_stayed_to_be_told_of_is_not_counted_as_gone() -> None:
    trigger = Trigger(replace(QUIET, new_track=True, line_crossing=("gate",), cooldown_s=4.0))
    assert len(watch(trigger, [WALKER], 500)) == 2
    assert trigger.num_held_back == {"cooldown": 1}


def test_who_goes_on_with_a_visit_goes_on_with_what_it_did() -> None:
    """A tracker that lost somebody gives a new number, right after the line, within the cooldown."""
    config = replace(QUIET, new_track=True, line_crossing=("gate",), cooldown_s=4.0)
    trigger, seen = Trigger(config), []
    for index in range(60):
        tracked = detections([WALKER], index).with_tracks(np.array([1 if index <= ENTERS else 2]))
        if found := trigger.update(frame(index), tracked):
            seen.append((index, found.reason))
    assert seen == [(0, "new_track"), (40, "line_crossing:gate:right")]


def test_a_visit_may_be_described_for_several_reasons() -> None:
    config = replace(QUIET, new_track=True, zone_entry=("yard",), dwell_s=5.0)
    expected = [(0, "new_track"), (ENTERS + 2, "zone_entry:yard"), (50, "dwell")]
    assert reasons(config) == expected
    assert reasons(replace(config, track_cooldown_s=2.45)) == [*expected[:2], (56, "dwell")]
    assert reasons(replace(config, camera_cooldown_s=4)) == [(0, "new_track"), (40, "zone_entry:yard")]


def test_a_camera_that_is_looked_at_once_a_minute_sees_visits_too() -> None:
    """Longer than a visit is remembered by time: a tracker still knows who is in the next frame."""
    config = replace(QUIET, new_track=True, min_hits=3, line_crossing=("gate",))
    trigger, seen = Trigger(config), []
    for index in range(8):
        walker = replace(WALKER, step=80.0, gaps=(3,))
        rows = [1] if walker.is_seen(index) else []
        tracked = detections([walker], index).with_tracks(np.array(rows, np.int64))
        if found := trigger.update(frame(index, fps=1 / 60), tracked):
            seen.append((index, found.reason))
    assert seen == [(2, "new_track"), (4, "line_crossing:gate:right")]
    assert trigger.num_visits == 1


def test_a_cooldown_of_the_camera_is_of_all_classes() -> None:
    things = (Thing(0, 60, 0), Thing(5, 60, 400, label=2))
    config = TriggerConfig(cooldown_s=0, min_hits=1, camera_cooldown_s=3)
    assert reasons(config, *things) == [(0, "new_track"), (30, "new_track")]


def test_required_zones_hold_back_who_was_in_none_of_them() -> None:
    config = replace(QUIET, new_track=True, required_zones=("yard",))
    assert reasons(config) == [(ENTERS + 2, "new_track")]
    assert reasons(config, Thing(0, 60, 0)) == []
    passer_by, visitor = Thing(0, 100, 0, 5), Thing(0, 20, 400)
    assert reasons(config, passer_by, visitor, num_frames=80) == [(2, "new_track"), (60, "new_track")], (
        "who was described with another, outside, is described in the zone"
    )


def test_a_quiet_scene_is_described_at_times() -> None:
    config = replace(QUIET, new_track=True, period_s=2.0)
    assert reasons(config, Thing(10, 12, 100)) == [
        (10, "new_track"),
        (30, "periodic"),
        (50, "periodic"),
    ]
    (first, *_) = watch(Trigger(replace(QUIET, period_s=2.0)), [], 25)
    assert (first.frame.index, first.track_id, first.label) == (20, 0, "scene")


def test_a_frame_that_is_asked_for_is_described() -> None:
    """Whatever it shows, in a cooldown too; who is in it was described with it."""
    trigger = Trigger(TriggerConfig(cooldown_s=9, min_hits=1))
    nothing = detections([], 0).with_tracks(np.empty(0, np.int64))
    scene = trigger.update(frame(0), nothing, is_asked_for=True)
    assert scene is not None
    assert (scene.label, scene.reason) == ("scene", "on_demand")
    somebody = detections([Thing(0, 9, 100)], 1).with_tracks(np.array([1]))
    seen = trigger.update(frame(1), somebody, is_asked_for=True)
    assert seen is not None
    assert (seen.label, seen.track_id, seen.reason) == ("person", 1, "on_demand")
    assert trigger.update(frame(2), somebody) is None


@pytest.mark.parametrize(("threshold", "expected"), [(0.8, []), (0.7, [(4, "new_track")])])
def test_a_track_must_be_sure_on_the_whole(threshold: float, expected: list[tuple[int, str]]) -> None:
    """The median of its scores: a single good frame is not enough."""
    trigger = Trigger(TriggerConfig(min_hits=1, thresholds={"person": threshold}))
    seen = []
    for index, score in enumerate((0.5, 0.5, 0.75, 0.75, 0.9, 0.6)):
        tracked = detections([Thing(0, 9, 100, score=score)], index).with_tracks(np.array([1]))
        if found := trigger.update(frame(index), tracked):
            seen.append((index, found.reason))
    assert seen == expected
    assert trigger.num_held_back["threshold"] == 1


def test_who_never_leaves_a_motion_mask_is_no_reason() -> None:
    """A tree that is taken for a person; somebody who walks through the mask is described once outside."""
    trigger = Trigger(TriggerConfig(min_hits=1, motion_masks=(LEFT,)))
    assert watch(trigger, [Thing(0, 60, 100)], 60) == []
    assert trigger.num_held_back == {"motion_mask": 1}
    assert reasons(TriggerConfig(min_hits=1, motion_masks=(LEFT,))) == [(ENTERS, "new_track")]


def test_the_same_picture_is_left_out_and_counted() -> None:
    config = TriggerConfig(cooldown_s=0, min_hits=1, period_s=1.0, similarity=0.97)
    trigger = Trigger(config)
    parked = Thing(0, 60, 100, label=2)
    assert [seen.reason for seen in watch(trigger, [parked], 45)] == ["new_track"]
    assert trigger.num_held_back == {"near_duplicate": 4}


@pytest.mark.parametrize(
    "other",
    [Thing(12, 60, 400), Thing(0, 8, 400, label=2), Thing(0, 60, 300, 8, label=2)],
    ids=["in", "out", "moved"],
)
def test_a_wanted_box_that_changed_is_never_left_out(other: Thing) -> None:
    config = TriggerConfig(cooldown_s=0, min_hits=1, period_s=1.5, similarity=0.5)
    seen = watch(Trigger(config), [Thing(0, 60, 100, label=2), other], 20)
    assert len(seen) == 2


def test_somebody_else_in_the_same_place_is_not_left_out() -> None:
    """A wanted box changed, though not where it is, and of the whole picture it is a few percent."""
    trigger = Trigger(TriggerConfig(cooldown_s=0, min_hits=1, similarity=0.97))
    parked = Thing(0, 900, 100, label=2)
    picture = BLANK.copy()
    seen = []
    for index, (track_id, shade) in enumerate([(1, 60), (1, 60), (2, 60), (3, 120)]):
        picture[200:360, 100:160] = shade
        tracked = detections([parked], index).with_tracks(np.array([track_id]))
        if trigger.update(Frame("a", index, index * 20.0, 0.0, picture.copy()), tracked):
            seen.append(track_id)
    assert seen == [1, 3]
    assert trigger.num_held_back == {"near_duplicate": 1}


def test_what_was_left_out_begins_no_cooldown() -> None:
    """Nothing was told, so that the next who comes is told of at once."""
    config = TriggerConfig(cooldown_s=5, camera_cooldown_s=5, min_hits=1, dwell_s=6.0, similarity=0.9)
    trigger = Trigger(config)
    seen = watch(trigger, [Thing(0, 90, 100), Thing(65, 70, 400)], 90)
    assert [(one.frame.index, one.track_id) for one in seen] == [(0, 1), (65, 2)]
    assert trigger.num_held_back == {"near_duplicate": 1}


def test_a_picture_that_changed_is_not_left_out() -> None:
    """Somebody switched the light on: the boxes are the same."""
    trigger = Trigger(TriggerConfig(cooldown_s=0, min_hits=1, period_s=1.0, similarity=0.9))
    tracked = detections([Thing(0, 60, 100)], 0).with_tracks(np.array([1]))
    light = np.full_like(BLANK, 200)
    pictures = [BLANK, BLANK, light]
    seen = [
        trigger.update(Frame("a", index, index * 1.0, 0.0, picture), tracked)
        for index, picture in enumerate(pictures)
    ]
    assert [observation is not None for observation in seen] == [True, False, True]


def test_a_track_is_shown_as_it_came() -> None:
    history = History(HistoryConfig(num_frames=2, interval_s=0.5, max_side=320))
    for index in range(14):
        rows = [1] if index < 6 else [1, 2]
        things = [WALKER, Thing(6, 20, 300)][: len(rows)]
        history.keep(frame(index), detections(things, index).with_tracks(np.array(rows)))
    earlier = history.of_track(1)
    assert [one.frame.index for one in earlier] == [5, 10]
    assert earlier[0].frame.image.shape == (240, 320, 3)
    assert earlier[0].detections.boxes[0].tolist() == [25, 100, 55, 180]
    assert [one.frame.index for one in history.of_track(2)] == [10]
    assert history.of_track(3) == ()
    nothing = History(HistoryConfig())
    nothing.keep(frame(0), detections([WALKER], 0).with_tracks(np.array([1])))
    assert nothing.of_track(1) == ()


def test_who_came_just_now_is_told_of_to_somebody_who_asks() -> None:
    """A track shows from its second frame on; the frame that was asked for may be its first."""
    camera = _Camera(CameraConfig("a", 10.0), 0.25)
    camera.process(frame(0), detections([], 0))
    camera.is_asked_for = True
    result = camera.process(frame(1), detections([Thing(1, 9, 100), Thing(1, 9, 400, score=0.15)], 1))
    assert result.observation is not None
    assert (result.observation.reason, result.observation.track_id) == ("on_demand", 0)
    assert result.observation.detections.labels == ["person"]
    assert len(result.detections) == 0
