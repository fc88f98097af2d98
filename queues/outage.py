"""Health of one connection: when the server last answered, when to try again, what to log."""

import logging
import random
import time

from queues.address import safe_url

logger = logging.getLogger("queues")

_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 2.0
_LOG_EVERY_S = 10.0


class Outage:
    """Follows the answers and failures of one connection to the server at `url`.

    Logs the first failure, then at most one line in ten seconds, then the recovery. `reason` is the newest
    failure's.
    """

    def __init__(self, url: str) -> None:
        self.url = safe_url(url)
        self.num_failures = 0
        self.reason = ""
        self._last_answer = time.monotonic()
        self._next_try = self._next_log = float("-inf")
        self._is_logged = False

    @property
    def silent_s(self) -> float:
        """Seconds since the server's last answer, the measure of health."""
        return time.monotonic() - self._last_answer

    @property
    def delay_s(self) -> float:
        """Seconds until the next try makes sense; 0 when all is well."""
        return max(0.0, self._next_try - time.monotonic()) if self.num_failures else 0.0

    def good(self) -> None:
        """The server answered."""
        if self._is_logged:
            logger.warning("queue at %s answers again after %.1f s", self.url, self.silent_s)
        self._is_logged = False
        self.num_failures = 0
        self._last_answer = time.monotonic()

    def bad(self, error: Exception, cost_s: float = 0.0) -> None:
        """The server could not be reached, or answered with an error that waiting may cure.

        The next try waits `cost_s` at least: what a blocking caller lost on this one.
        """
        self.num_failures += 1
        self.reason = str(error)
        now = time.monotonic()
        longest = min(_FIRST_DELAY_S * 2.0 ** min(self.num_failures - 1, 10), _LONGEST_DELAY_S)
        self._next_try = now + max(cost_s, longest * random.uniform(0.75, 1.0))
        if now >= self._next_log:
            self._next_log = now + _LOG_EVERY_S
            self._is_logged = True
            logger.warning("queue at %s fails (%d in a row): %s", self.url, self.num_failures, error)
