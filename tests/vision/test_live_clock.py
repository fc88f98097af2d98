"""Times of live pictures: by their stamps while these can be true, else by the local clock."""

import pytest

from vision.live_clock import FrameGate, LiveClock


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
