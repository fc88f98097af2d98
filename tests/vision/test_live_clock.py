"""Times of live pictures: by their stamps while these can be true, else by the local clock."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from vision.live_clock import JUMP_S, FrameGate, LiveClock


def test_stamps_are_believed_over_a_network_that_stutters():
    clock = LiveClock()
    arrivals = [0.0, 0.13, 0.19, 0.32, 0.41]
    times = [clock.place(50 + i / 10, 1000 + at).time_s for i, at in enumerate(arrivals)]

    assert times == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("jump", [7200.0, -7200.0])
def test_a_jump_goes_on_by_the_local_clock(jump):
    """V11."""
    clock = LiveClock()
    clock.place(50.0, 1000.0)
    clock.place(50.1, 1000.1)

    assert clock.place(50.2 + jump, 1000.2).time_s == pytest.approx(0.2)
    assert clock.place(50.3 + jump, 1000.3).time_s == pytest.approx(0.3)


def test_stamps_that_step_back_a_little_never_turn_time_back():
    clock = LiveClock()
    times = [clock.place(stamp, 1000 + i).time_s for i, stamp in enumerate((5.0, 6.0, 5.5, 7.0))]

    assert times == sorted(times)


def test_without_stamps_the_local_clock_counts():
    clock = LiveClock()

    assert [clock.place(None, 1000 + i / 4).time_s for i in range(3)] == pytest.approx([0, 0.25, 0.5])


def test_what_comes_late_out_of_a_queue_is_late():
    """A network stalls for three seconds, then gives all at once: only the newest is worth a look."""
    clock = LiveClock()
    assert not any(clock.place(i / 10, i / 10).is_late for i in range(20))
    burst = [clock.place(2 + i / 10, 5.0).is_late for i in range(31)]

    assert burst[0]
    assert not burst[-1]
    assert not clock.place(5.1, 5.1).is_late


def seen_at(arrivals: list[tuple[float, float]]) -> list[float]:
    """When, after ten seconds of ten pictures a second in time, those of (stamp, arrival) are looked at."""
    clock = LiveClock()
    assert not any(clock.place(i / 10, i / 10).is_late for i in range(100))
    moments = [(at, clock.place(stamp, at)) for stamp, at in arrivals]
    times = [moment.time_s for _, moment in moments]
    assert times == pytest.approx([stamp for stamp, _ in arrivals])
    return [at for at, moment in moments if not moment.is_late]


@pytest.mark.parametrize("fps", [1, 2, 25])
@pytest.mark.parametrize("delay_s", [1.5, 3.0, 9.0])
def test_a_way_that_became_longer_blinds_for_a_moment_only(delay_s, fps):
    """A camera that pauses while its stamps go on without a gap, or a stream that takes another way."""
    seen = seen_at([(10 + i / fps, 10 + delay_s + i / fps) for i in range(20 * fps)])

    assert seen[0] <= 10 + delay_s + 3
    assert len(seen) == sum(i / fps >= seen[0] - 10 - delay_s for i in range(20 * fps)), "all that follow"


def test_a_way_that_is_longer_and_uneven_is_seen_too():
    """Bursts of eight pictures, three seconds late at least."""
    seen = seen_at([(10 + i / 10, 13.8 + 0.8 * (i // 8)) for i in range(100)])

    assert seen[0] <= 13.8 + 3.2
    assert len(seen) > 60


@pytest.mark.parametrize("speed", [2, 4, 20])
def test_a_queue_that_empties_is_late_until_it_has_caught_up(speed):
    """After three seconds without a picture they come faster than they were taken."""
    arrivals = [(10 + i / 10, 13 + i / 10 / speed) for i in range(60)]
    late = [(stamp, at) for stamp, at in arrivals if at - stamp > 1.001]

    assert seen_at(arrivals) == [at for stamp, at in arrivals if (stamp, at) not in late]


def test_a_queue_that_stalls_again_is_late_all_the_same():
    """A lone picture, a pause of two seconds, then all at once."""
    arrivals = [(10.0, 13.0), *((10.1 + i / 10, 15.0) for i in range(50)), (15.1, 15.1)]

    assert seen_at(arrivals) == [at for stamp, at in arrivals if at - stamp < 1.001]


def test_who_catches_up_too_slowly_is_looked_at():
    """Nine seconds late, and a tenth faster than life: it would be blind for a minute and a half."""
    arrivals = [(10 + i / 10, 19 + i / 11) for i in range(900)]
    seen = seen_at(arrivals)

    assert seen[0] < 22
    assert len(seen) > 860


def test_a_slow_camera_clock_makes_nothing_late():
    """It loses four seconds a day, and after a day its pictures are still taken."""
    clock = LiveClock()

    assert not any(clock.place(t * (1 - 5e-5), float(t)).is_late for t in range(0, 200_000, 50))


def test_a_stream_in_bursts_is_held_to_its_pace():
    clock = LiveClock(is_paced=True)
    burst = [clock.place(i / 10, 100.0) for i in range(10)]

    assert [moment.wait_s for moment in burst] == pytest.approx([i / 10 for i in range(10)])
    late = clock.place(1.0, 104.0)
    assert (late.is_late, late.wait_s, late.time_s) == (False, 0.0, pytest.approx(4.0))
    assert clock.place(1.1, 104.0).wait_s == pytest.approx(0.1)


def test_the_gate_keeps_the_rate_when_a_clock_jumps_back():
    gate = FrameGate(5.0)
    passed = [t for t in [i / 25 for i in range(50)] + [i / 25 for i in range(50)] if gate.passes(t)]

    assert len(passed) == 20


STAMPS: dict[str, Callable[[float], float | None]] = {
    "stand still": lambda t: 5.0,
    "some missing": lambda t: None if round(t * 10) % 2 else t,
    "a tenth as fast": lambda t: t / 10,
    "half as fast": lambda t: t / 2,
    "a tenth faster": lambda t: t * 1.1,
    "twice as fast": lambda t: t * 2,
    "of another unit": lambda t: t * 90,
    "begin again every three seconds": lambda t: t % 3,
    "begin again every minute": lambda t: t % 60,
    "9 s back at times": lambda t: t - 9 * (t // 20),
    "9 s forth at times": lambda t: t + 9 * (t // 20),
    "8 s to and fro": lambda t: t + 8 * (t // 20 % 2),
}


@pytest.mark.parametrize("stamps", STAMPS.values(), ids=STAMPS)
def test_wrong_stamps_of_any_kind_blind_no_camera(stamps):
    """V11: pictures come ten times a second, and five a second are looked at."""
    clock, gate, seen, times = LiveClock(), FrameGate(5.0), [0.0], [0.0]
    for number in range(1200):
        at = number / 10
        moment = clock.place(stamps(at), 1000 + at)
        times.append(moment.time_s)
        if not moment.is_late and gate.passes(moment.time_s):
            seen.append(at)

    assert times == sorted(times)
    assert times[-1] <= 120 + JUMP_S + 1
    assert max(later - before for before, later in pairwise(seen)) < 3.5
    # why: where a camera's seconds are longer, fewer of them are a fifth of one apart
    is_slow = stamps is STAMPS["a tenth as fast"] or stamps is STAMPS["half as fast"]
    assert len(seen) > (150 if is_slow else 550)
