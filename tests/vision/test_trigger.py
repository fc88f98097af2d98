"""Which frame is worth a description."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.vision.moving import Thing, detections, frame
from vision.trigger import Trigger, TriggerConfig
from vision.types import Observation

PLAIN = TriggerConfig(cooldown_s=0, min_hits=1)


def watch(
    trigger: Trigger,
    things: Sequence[Thing],
    num_frames: int,
    ids: Sequence[int] | None = None,
    start: int = 0,
) -> list[Observation]:
    """Show things as tracks: the id of each is its position in `ids`, or in `things`, from 1."""
    numbers = ids or range(1, len(things) + 1)
    seen = []
    for index in range(start, num_frames):
        rows = [number for number, thing in zip(numbers, things, strict=True) if thing.is_seen(index)]
        tracked = detections(things, index).with_tracks(np.array(rows, np.int64))
        if observation := trigger.update(frame(index), tracked):
            seen.append(observation)
    return seen


def when(observations: list[Observation]) -> list[tuple[int, int]]:
    return [(observation.frame.index, observation.track_id) for observation in observations]


def test_one_observation_a_track() -> None:
    seen = watch(Trigger(PLAIN), [Thing(3, 50, 100)], 60)
    assert when(seen) == [(3, 1)]
    assert (seen[0].label, seen[0].reason) == ("person", "new_track")
    assert len(seen[0].detections) == 1


def test_nothing_in_view_is_nothing_to_describe() -> None:
    assert watch(Trigger(PLAIN), [], 20) == []


def test_only_wanted_labels() -> None:
    config = TriggerConfig(labels=("car",), cooldown_s=0, min_hits=1)
    assert when(watch(Trigger(config), [Thing(0, 20, 100), Thing(5, 20, 300, label=2)], 20)) == [(5, 2)]


@pytest.mark.parametrize(
    ("config", "thing", "expected"),
    [
        (TriggerConfig(min_hits=4), Thing(2, 20, 100), [5]),
        (TriggerConfig(min_hits=4), Thing(2, 20, 100, gaps=(3, 4, 5)), [8]),
        (TriggerConfig(min_hits=4), Thing(2, 4, 100), []),
        (TriggerConfig(min_score=0.5), Thing(0, 20, 100, score=0.45), []),
        (TriggerConfig(min_score=0.4), Thing(0, 20, 100, score=0.45), [2]),
        (TriggerConfig(min_area=60 * 160 / (480 * 640) + 1e-3), Thing(0, 20, 100), []),
        (TriggerConfig(min_area=60 * 160 / (480 * 640) - 1e-3), Thing(0, 20, 100), [2]),
    ],
)
def test_long_sure_and_big_enough(config: TriggerConfig, thing: Thing, expected: list[int]) -> None:
    assert [index for index, _ in when(watch(Trigger(config), [thing], 30))] == expected


def test_cooldown_is_of_the_class_and_in_video_time() -> None:
    """Who comes within it and stays is described at its end; who has left by then is not."""
    trigger = Trigger(TriggerConfig(cooldown_s=5, min_hits=1))
    things = [Thing(0, 20, 0), Thing(10, 80, 200), Thing(15, 40, 400), Thing(5, 8, 550, label=2)]
    assert when(watch(trigger, things, 100)) == [(0, 1), (5, 4), (50, 2)]
    assert trigger.num_held_back == {"cooldown": 2}


def test_who_waits_is_described_with_another_class() -> None:
    things = [Thing(0, 20, 0), Thing(10, 80, 200), Thing(20, 30, 550, label=2)]
    assert when(watch(Trigger(TriggerConfig(cooldown_s=5, min_hits=1)), things, 100)) == [(0, 1), (20, 3)]


def test_all_in_view_are_described_together() -> None:
    things = [
        Thing(4, 60, 100, score=0.8),
        Thing(4, 60, 300, score=0.9),
        Thing(0, 60, 500, label=2, score=0.2),
    ]
    assert when(watch(Trigger(PLAIN), things, 60)) == [(4, 2)]


def test_a_track_found_again_is_the_same_visit() -> None:
    """Near the place, within the time, one for one; elsewhere or later it is a new one."""
    first, again = Thing(0, 20, 100), Thing(30, 60, 120)
    trigger = Trigger(PLAIN)
    assert when(watch(trigger, [first, again], 70)) == [(0, 1)]
    assert trigger.num_held_back == {"reacquired": 1}
    assert when(watch(Trigger(PLAIN), [first, Thing(30, 60, 400)], 70)) == [(0, 1), (30, 2)]
    assert when(watch(Trigger(PLAIN), [first, Thing(80, 90, 120)], 100)) == [(0, 1), (80, 2)]
    assert when(watch(Trigger(PLAIN), [first, Thing(30, 60, 120, label=2)], 70)) == [(0, 1), (30, 2)]
    both = [first, again, Thing(32, 60, 130)]
    assert when(watch(Trigger(PLAIN), both, 70)) == [(0, 1)], "the third box lies on the second"
    apart = [first, again, Thing(32, 60, 165)]
    assert when(watch(Trigger(PLAIN), apart, 70)) == [(0, 1), (32, 3)]


def test_two_boxes_on_one_object() -> None:
    """The second is no visit; nor when it is the one that goes on."""
    trigger = Trigger(PLAIN)
    things = [Thing(0, 30, 100), Thing(10, 90, 104, size=(50, 150))]
    assert when(watch(trigger, things, 100)) == [(0, 1)]
    assert trigger.num_held_back == {"part_of_another": 1, "reacquired": 1}


def test_someone_who_steps_out_from_behind_another_is_described() -> None:
    things = [Thing(0, 60, 100), Thing(10, 60, 104, 3)]
    indices = [index for index, _ in when(watch(Trigger(PLAIN), things, 61))]
    assert len(indices) == 2
    assert indices[0] == 0
    assert 12 <= indices[1] <= 20


def test_a_vehicle_that_changes_its_class_is_one() -> None:
    """A van is a car in one frame and a truck in the next: two tracks, one box."""
    things = [Thing(0, 60, 100, label=2), Thing(3, 60, 101, label=7)]
    assert when(watch(Trigger(PLAIN), things, 61)) == [(0, 1)]
    rider = [Thing(0, 60, 100, label=2, size=(200, 160)), Thing(3, 60, 150)]
    assert when(watch(Trigger(PLAIN), rider, 61)) == [(0, 1), (3, 2)], (
        "a person before a car is no part of it"
    )


def test_time_that_goes_back_is_another_recording() -> None:
    trigger = Trigger(TriggerConfig(min_hits=1))
    assert when(watch(trigger, [Thing(0, 20, 100)], 20)) == [(0, 1)]
    assert when(watch(trigger, [Thing(0, 20, 100)], 20, ids=[2])) == [(0, 2)]


def test_memory_is_bounded() -> None:
    """V16, in short: 2,000 visitors."""
    trigger = Trigger(PLAIN)
    for index in range(0, 20_000, 10):
        watch(trigger, [Thing(index, index + 3, (index * 7) % 500)], index + 4, ids=[index + 1], start=index)
    assert trigger.num_visits < 40


def test_it_needs_tracks() -> None:
    with pytest.raises(ValueError, match=r"Tracker\.update"):
        Trigger(PLAIN).update(frame(0), detections([Thing(0, 1, 100)], 0))
