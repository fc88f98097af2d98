"""Quality gives way step by step under overload, and comes back without swinging: on a clock of our own."""

import random
from collections.abc import Callable

import pytest

from appliance.ladder import Ladder, LadderConfig, rungs
from appliance.pace import Pace

MAX_AGE_S = 5.0


def ladder(**config: object) -> Ladder:
    return Ladder(LadderConfig(**config), max_tokens=64, max_age_s=MAX_AGE_S)  # type: ignore[arg-type]


def levels(ladder: Ladder, seconds: float, wait_s: Callable[[float], float], start: float = 0.0) -> list[int]:
    """The level at every half second while frames wait `wait_s` of the time."""
    return [ladder.update(start + tick / 2, wait_s(start + tick / 2)) for tick in range(round(2 * seconds))]


def test_the_rungs_in_their_order() -> None:
    """Fewer image tokens, then fewer output tokens, then fewer frames."""
    steps = rungs(LadderConfig(), max_tokens=64, max_age_s=5.0)
    names = [step.name for step in steps]
    assert names == ["full", "picture", "picture", "tokens", "frames", "frames", "frames"]
    assert [round(step.scale**2, 2) for step in steps] == [1, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25]
    assert [step.max_tokens for step in steps] == [64, 64, 64, 32, 32, 32, 32]
    assert [step.interval_s for step in steps] == [0, 0, 0, 0, 5, 10, 20]


@pytest.mark.parametrize(("until", "last"), [("full", 0), ("picture", 2), ("tokens", 3), ("frames", 6)])
def test_the_ladder_has_an_end(until: str, last: int) -> None:
    """It goes no further than the settings allow, and `full` turns it off."""
    one = ladder(until=until)
    assert max(levels(one, 300, lambda now: 60.0)) == last
    assert one.rung.name == until


def test_steps_that_change_nothing_are_left_out() -> None:
    steps = rungs(LadderConfig(min_tokens=64, max_interval_s=5.0), max_tokens=64, max_age_s=5.0)
    assert [step.name for step in steps] == ["full", "picture", "picture", "frames"]
    assert rungs(LadderConfig(min_tokens=64), max_tokens=16, max_age_s=5.0)[-1].max_tokens == 16


@pytest.mark.parametrize(("longest", "side"), [(1280, 909), (300, 224), (100, 100)])
def test_a_picture_is_made_smaller_but_not_too_small(longest: int, side: int) -> None:
    assert rungs(LadderConfig(), 64, 5.0)[1].side(longest) == side


def test_full_quality_while_frames_hardly_wait() -> None:
    assert set(levels(ladder(), 600, lambda now: random.Random(now).uniform(0, 2.4))) == {0}


def test_a_moment_of_overload_changes_nothing() -> None:
    """A stall of two seconds, again and again, is no lack of power."""
    assert set(levels(ladder(), 300, lambda now: 10.0 if now % 30 < 2 else 0.1)) == {0}


def test_overload_takes_one_step_at_a_time_and_calm_gives_it_back() -> None:
    one = ladder()
    rising = levels(one, 30, lambda now: 4.0)
    assert rising == sorted(rising)
    assert rising[:5] == [0] * 5
    assert rising[-1] == 6
    assert rising.index(6) / 2 <= 20
    falling = levels(one, 120, lambda now: 0.1, start=30.0)
    assert falling == sorted(falling, reverse=True)
    assert falling.index(5) / 2 >= 2 * MAX_AGE_S
    assert falling[-1] == 0


def test_between_the_two_marks_it_stays() -> None:
    one = ladder()
    levels(one, 6, lambda now: 4.0)
    assert one.level == 2
    assert set(levels(one, 300, lambda now: 1.5, start=6.0)) == {2}


def test_it_does_not_swing() -> None:
    """A load that full quality cannot carry and the first step can: it tries again ever more seldom."""
    one, seen, now = ladder(), [], 0.0
    while now < 1200:
        seen.append(one.update(now, 3.5 if one.level == 0 else 0.3))
        now += 0.5
    steps = [index / 2 for index in range(1, len(seen)) if seen[index] != seen[index - 1]]
    assert set(seen) == {0, 1}
    assert sum(seen) / len(seen) > 0.9
    assert len([step for step in steps if step < 100]) > len([step for step in steps if step > 1000])
    assert len(steps) < 40


def test_waits_of_frames_count_until_the_next_step() -> None:
    """Frames that are through tell as well; those that were begun before a step do not."""
    one = ladder()
    for now in range(4):
        one.observe(now, 4.0, level=0)
        one.update(now, 0.0)
    assert one.level == 1
    assert one.wait_s == 4.0
    one.observe(4, 4.0, level=0)
    assert one.update(4, 0.0) == 1
    assert one.wait_s == 0.0
    one.observe(5, 3.0, level=1)
    one.observe(5, 1.0, level=1)
    one.update(5, 0.5)
    assert one.wait_s == 2.0
    one.update(11, 0.5)
    assert one.wait_s == 0.5


def test_frames_that_expire_in_the_queue_are_overload() -> None:
    """Quality gives way before frames do; a camera that is held back on purpose loses its frames in peace."""
    one, held = ladder(), ladder()
    for now in range(8):
        one.observe_expired(now, 2.4)
        held.observe_expired(now, 0.3)
        one.update(now, 0.0)
        held.update(now, 0.0)
    assert (one.level, held.level) == (2, 0)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"until": "chat"}, "until must be one of full, picture, tokens, frames, not 'chat'"),
        ({"min_side": 0}, "min_side must be greater than 0, not 0"),
        ({"busy_share": 0.1}, r"busy_share must be greater than calm_share \(0.2\) and at most 1, not 0.1"),
    ],
)
def test_a_config_that_cannot_be(config: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        LadderConfig(**config)  # type: ignore[arg-type]


def test_a_wait_that_was_wanted_is_no_overload() -> None:
    """Neither a camera's pause nor an engine that was away counts."""
    pace = Pace()
    assert pace.longest_wait_s({}, 0.0) == 0
    pace.begin("busy", 10.0, 5.0)
    pace.begin("quiet", 10.0, 0.0)
    assert pace.held(12.0) == {"busy"}
    assert pace.held(15.0) == frozenset()
    assert pace.own_wait_s("busy", 16.0, 6.0) == 1
    assert pace.own_wait_s("new", 16.0, 6.0) == 6
    assert pace.longest_wait_s({"busy": 6.0, "quiet": 3.0}, 16.0) == 3
    pace.stand_still(15.5)
    assert pace.longest_wait_s({"busy": 6.0, "quiet": 3.0, "new": 6.0}, 16.0) == 0.5
