"""Tracks: one id a thing, unique in its camera, bounded state."""

from collections import defaultdict

import cv2
import numpy as np
import pytest

from tests.vision.moving import BLANK, NAMES, Thing, detections
from vision.tracker import LOST_S, Tracker, TrackerKind
from vision.types import Detections

KINDS: tuple[TrackerKind, ...] = ("bytetrack", "botsort")


def ids_by_frame(tracker: Tracker, things: list[Thing], num_frames: int) -> list[list[int]]:
    found = [tracker.update(detections(things, i), BLANK).track_ids for i in range(num_frames)]
    return [[] if ids is None else ids.tolist() for ids in found]


@pytest.mark.parametrize("kind", KINDS)
def test_a_thing_keeps_its_id(kind: TrackerKind) -> None:
    """Through a second out of sight and a moment of low score too."""
    things = [Thing(0, 60, 50, 4, gaps=tuple(range(20, 28))), Thing(3, 60, 500, -3, label=2)]
    tracker = Tracker(kind)
    ids = ids_by_frame(tracker, things, 60)
    assert ids[0] == [1]
    assert ids[3] == [1], "the second shows from its second frame on"
    assert ids[4] == [1, 2]
    assert ids[22] == [2]
    assert ids[59] == [1, 2]


def test_a_weak_detection_carries_a_track_on_but_starts_none() -> None:
    tracker = Tracker(new_track_score=0.25)
    strong, weak = Thing(0, 5, 100), Thing(6, 20, 100, score=0.15)
    stranger = Thing(6, 20, 400, score=0.2)
    ids = ids_by_frame(tracker, [strong, weak, stranger], 15)
    assert ids[5] == ids[14] == [1]


def test_a_thing_that_was_away_too_long_is_another() -> None:
    away = int(LOST_S * 10) + 2
    things = [Thing(0, 5, 100), Thing(6 + away, 40, 100)]
    assert ids_by_frame(Tracker(frame_rate=10), things, 40)[-1] == [2]
    shorter = [Thing(0, 5, 100), Thing(away - 4, 40, 100)]
    assert ids_by_frame(Tracker(frame_rate=10), shorter, 40)[-1] == [1]


def test_boxes_are_those_of_the_detector() -> None:
    tracker, things = Tracker(), [Thing(0, 9, 100, 7, score=0.3), Thing(0, 9, 400, -5, label=2)]
    for index in range(10):
        given = detections(things, index)
        tracked = tracker.update(given, BLANK)
        assert np.array_equal(tracked.boxes, given.boxes)
        assert np.array_equal(tracked.scores, given.scores)
        assert tracked.labels == ["person", "car"]


def test_a_lost_chair_does_not_take_over_a_person() -> None:
    """Tracks do not cross classes: seen in the clip of V22, where a table's ghost split every visit."""
    chair = Thing(0, 10, 200, label=56, size=(80, 160))
    person = Thing(8, 40, 120, 6, size=(80, 160))
    tracker = Tracker()
    people = defaultdict(set)
    for index in range(40):
        tracked = tracker.update(detections([chair, person], index), BLANK)
        assert tracked.track_ids is not None
        for label, track_id in zip(tracked.labels, tracked.track_ids.tolist(), strict=True):
            people[label].add(track_id)
    assert people == {"chair": {1}, "person": {2}}


def test_two_cameras_do_not_mix() -> None:
    """V17: each has its own ids, from 1, and a reset of one is nothing to the other."""
    door, yard = Tracker(), Tracker()
    things = [Thing(0, 30, 100, 2), Thing(0, 30, 400, -2)]
    for index in range(10):
        for tracker in (door, yard):
            ids = tracker.update(detections(things, index), BLANK).track_ids
            assert ids is not None
            assert ids.tolist() == [1, 2]
    door.reset()
    assert door.update(detections(things, 10), BLANK).track_ids.tolist() == [3, 4]  # type: ignore[union-attr]
    assert yard.update(detections(things, 10), BLANK).track_ids.tolist() == [1, 2]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_another_picture_size_starts_afresh(kind: TrackerKind) -> None:
    """V13: boxes of the old size mean nothing in the new one."""
    tracker, things = Tracker(kind), [Thing(0, 30, 100)]
    assert ids_by_frame(tracker, things, 5)[-1] == [1]
    larger = cv2.resize(BLANK, (1280, 960))
    assert tracker.update(detections(things, 5), larger).track_ids.tolist() == [2]  # type: ignore[union-attr]


def test_a_camera_that_moves() -> None:
    """BoT-SORT follows the picture: everything jumps by more than the boxes are wide."""
    rng = np.random.default_rng(0)
    view = cv2.resize(rng.integers(0, 256, (60, 200, 3), np.uint8), (2000, 600))
    tracker = Tracker("botsort")
    ids = []
    for index in range(12):
        shift = 40 * index
        box = np.array([[1200 - shift, 200, 1230 - shift, 280]], np.float32)
        found = Detections(box, np.array([0.9], np.float32), np.array([0]), NAMES)
        ids.append(tracker.update(found, np.ascontiguousarray(view[:, shift : shift + 1300])).track_ids)
    assert {track_id for row in ids[3:] if row is not None for track_id in row.tolist()} == {1}


@pytest.mark.parametrize("box", [(10, 10, 10, 50), (10, 10, 50, 10), (50, 50, 10, 10)])
def test_boxes_without_area(box: tuple[float, ...]) -> None:
    tracker = Tracker()
    flat = Detections(np.array([box], np.float32), np.array([0.9], np.float32), np.array([0]), NAMES)
    for _ in range(3):
        assert len(tracker.update(flat, BLANK)) == 0


def test_state_stays_bounded() -> None:
    """V16, in short: thousands of things come and go; only the recent ones are remembered."""
    tracker = Tracker(frame_rate=5)
    rng = np.random.default_rng(0)
    most = 0
    for _ in range(1500):
        corners = rng.uniform(0, 400, (4, 2))
        boxes = np.hstack([corners, corners + rng.uniform(20, 80, (4, 2))]).astype(np.float32)
        found = Detections(boxes, rng.uniform(0.1, 1, 4).astype(np.float32), rng.choice([0, 2, 7], 4), NAMES)
        tracker.update(found, BLANK)
        most = max(most, tracker.num_tracks)
    assert most < 4 * 5 * (LOST_S + 1)
    for _ in range(int(5 * LOST_S) + 2):
        tracker.update(Detections.empty(NAMES), BLANK)
    assert tracker.num_tracks == 0
