"""Whether steps succeed and move something, and when only a new engine helps."""

from collections.abc import Callable

from vlm_engine.errors import EngineBroken

NUM_UNHEALTHY = 3
UNHEALTHY_S = 15.0
"""So long after a failed step the next ones are not trusted: frames wait, one of them tries after it."""
NUM_BROKEN, BROKEN_S = 10, 5.0
STILL_S = 30.0


class StepHealth:
    """Counts failed steps in a row, and how long no step has moved anything.

    One bad request fails its own step; the next good one forgets that.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_failed = 0
        self._failing_since_s = self._failed_s = 0.0
        self._still_since_s: float | None = None
        self._error = ""

    @property
    def reason(self) -> str | None:
        """Why requests fail or do not move, None where they do."""
        now = self._clock()
        if self._num_failed >= NUM_UNHEALTHY and now - self._failed_s < UNHEALTHY_S:
            return f"the last {self._num_failed} steps failed: {self._error}"
        return None

    @property
    def is_doubtful(self) -> bool:
        """Whether one more step that fails is a reason."""
        return self._num_failed >= NUM_UNHEALTHY - 1

    def move(self) -> None:
        """A step moved something, or a request has ended."""
        self._still_since_s = None

    def succeed(self) -> None:
        """A step did what it should."""
        self.move()
        self._num_failed = 0

    def fail(self, error: str, *, is_final: bool = False) -> None:
        """A step failed for all of its requests.

        Args:
            error: What happened.
            is_final: Whether no later step can succeed.

        Raises:
            EngineBroken: Only a new engine may do better.
        """
        self.move()
        self._failed_s = self._clock()
        self._failing_since_s = self._failing_since_s if self._num_failed else self._failed_s
        self._num_failed += 1
        self._error = error
        if is_final:
            raise EngineBroken(f"the device is lost: {error}")
        if self._num_failed >= NUM_BROKEN and self._failed_s - self._failing_since_s >= BROKEN_S:
            raise EngineBroken(f"{self._num_failed} steps in a row failed: {error}")

    def stand_still(self) -> None:
        """A step found nothing that it could do although requests wait.

        Raises:
            EngineBroken: That has been so for long: nothing that comes would change it.
        """
        now = self._clock()
        if self._still_since_s is None:
            self._still_since_s = now
        elif now - self._still_since_s > STILL_S:
            raise EngineBroken(f"no step has moved anything for {STILL_S:.0f} s while requests wait")


def is_lost(error: BaseException) -> bool:
    """Whether an accelerator cannot be used any more by this process; out of memory is no such error."""
    if type(error).__name__ == "OutOfMemoryError":
        return False
    return type(error).__name__ == "AcceleratorError" or "CUDA error:" in str(error)


def told(error: BaseException) -> str:
    """What an error is called and what it says."""
    return f"{type(error).__name__}: {error}"
