"""Times of the pictures of a live stream, and which of them are looked at."""

from dataclasses import dataclass

JUMP_S = 10.0
"""Time stamps that are so far from the local clock are not believed."""

LATE_S = 1.0
"""A picture that is so much later than the quickest ones only tells of a queue on the way."""

PATIENCE_S = 1.5
"""So long nothing but late pictures may come; then the way has become longer, or they come too slowly."""

STEP_S = 0.5
"""Stamps that go back by more have jumped; pictures that come later by more at once have been held up."""

_FORGET = 1e-3


@dataclass(frozen=True, slots=True)
class Moment:
    """When a picture is.

    Attributes:
        time_s: seconds since the stream's start, never going back.
        wait_s: how long to hold the picture, of a stream that comes in bursts.
        is_late: newer pictures are on their way; there is no use in this one.
    """

    time_s: float
    wait_s: float = 0.0
    is_late: bool = False


@dataclass(slots=True)
class _Delay:
    """Pictures in a row that were all late: where they began, and how far they have caught up."""

    since: float
    first_lag_s: float
    least_lag_s: float

    def will_be_over(self, in_time_lag_s: float) -> bool:
        """Whether in as long again the pictures will be in time, at the rate at which they catch up."""
        return 2 * self.least_lag_s - self.first_lag_s <= in_time_lag_s


class LiveClock:
    """Seconds since the stream's start by its time stamps, while these agree with the local clock.

    Pictures out of a queue on the way are late as long as they catch up. Those that stay behind, after a
    pause of the camera or on a way that has become longer, are the newest there are: soon they are not late.

    Args:
        is_paced: the stream comes in bursts (HLS): its pictures are held until their time.
    """

    def __init__(self, *, is_paced: bool = False) -> None:
        self._is_paced = is_paced
        self._start: float | None = None
        self._shift: float | None = None
        self._stamp_s: float | None = None
        self._last_s = 0.0
        self._seen_at = 0.0
        self._lag_s = 0.0
        self._least_lag_s = 0.0
        self._delay: _Delay | None = None
        self._is_slow = False

    def place(self, stamp_s: float | None, now: float) -> Moment:
        """Return when a picture is.

        Args:
            stamp_s: its time stamp in seconds, None where it has none.
            now: seconds of the local clock, rising.
        """
        if self._start is None:
            self._start, self._seen_at = now, now
        elapsed_s, since_s = now - self._start, now - self._seen_at
        self._seen_at = now
        time_s = self._believed(stamp_s, elapsed_s)
        lag_s = elapsed_s - time_s
        grown_s, self._lag_s = lag_s - self._lag_s, lag_s
        self._is_slow &= lag_s >= self._least_lag_s
        # why: clocks drift by seconds a day; the quickest picture of long ago is forgotten slowly.
        self._least_lag_s = min(lag_s, self._least_lag_s + _FORGET * since_s)
        self._last_s = max(time_s, self._last_s)
        if self._is_paced:
            return Moment(self._last_s, wait_s=max(0.0, -lag_s))
        return Moment(self._last_s, is_late=self._is_late(lag_s, grown_s, now))

    def _is_late(self, lag_s: float, grown_s: float, now: float) -> bool:
        if lag_s - self._least_lag_s <= LATE_S:
            self._delay = None
            return False
        if self._is_slow and grown_s < STEP_S:
            # why: leaving out pictures did not help: there is no queue, the stamps are slow, or the way is
            self._least_lag_s = lag_s - LATE_S
            return False
        delay = self._delay
        # why: what comes later still by so much comes after another stall, and tells nothing of what follows.
        if delay is None or (grown_s >= STEP_S and lag_s > delay.first_lag_s + LATE_S):
            delay = _Delay(now, lag_s, lag_s)
        elif now - delay.since >= PATIENCE_S:
            if not delay.will_be_over(self._least_lag_s + LATE_S):
                self._least_lag_s, self._delay, self._is_slow = min(delay.least_lag_s, lag_s), None, True
                return lag_s - self._least_lag_s > LATE_S
            delay = _Delay(now, lag_s, lag_s)
        self._delay = delay
        delay.least_lag_s = min(delay.least_lag_s, lag_s)
        return True

    def _believed(self, stamp_s: float | None, elapsed_s: float) -> float:
        in_time_s = elapsed_s if self._is_paced else elapsed_s - self._least_lag_s
        before_s, self._stamp_s = self._stamp_s, self._stamp_s if stamp_s is None else stamp_s
        # why: stamps that stand still tell nothing
        if stamp_s is None or stamp_s == before_s:
            return in_time_s
        if self._shift is None:
            self._shift = elapsed_s - stamp_s
        time_s = stamp_s + self._shift
        step_s = 0.0 if before_s is None else stamp_s - before_s
        if self._is_jump(time_s, step_s, elapsed_s, in_time_s):
            self._shift = in_time_s - stamp_s
            return in_time_s
        return time_s

    def _is_jump(self, time_s: float, step_s: float, elapsed_s: float, in_time_s: float) -> bool:
        if abs(elapsed_s - time_s) > JUMP_S or step_s < -STEP_S:
            return True
        if self._is_paced:
            return time_s < elapsed_s
        # why: who was late may leave some out, but nothing comes sooner than what came quickest
        return step_s > LATE_S and time_s > in_time_s + LATE_S


class FrameGate:
    """Lets through so many frames a second, by their own times; all with `max_fps` None."""

    def __init__(self, max_fps: float | None) -> None:
        self._interval_s = 1 / max_fps if max_fps else 0.0
        self._due_s = 0.0

    def passes(self, time_s: float) -> bool:
        """Return whether the frame of that time is one of them."""
        if time_s < self._due_s - self._interval_s:
            # why: a clock that jumped back must not silence the camera until it has caught up.
            self._due_s = time_s
        if time_s < self._due_s - 1e-3:
            return False
        self._due_s = max(self._due_s, time_s - self._interval_s) + self._interval_s
        return True
