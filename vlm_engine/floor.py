"""The share of the time that background work is owed: pure Python."""

import math


class Floor:
    """The share of the time that background work gets under any load of chats.

    Work of c milliseconds pays for the next ``c / share``; work that waits and does not get its share
    may then take more at once. Neither side saves up more than a `window`, and nothing is owed for
    the time when no background work was there.

    Args:
        share: 0 to 1.
        window_s: Seconds.
    """

    def __init__(self, share: float, window_s: float = 2.0) -> None:
        self.share = share
        self.window_s = window_s
        self._paid_until_s = -math.inf

    def begin(self, now: float, *, is_wanted: bool) -> None:
        """Start a step at `now`; `is_wanted` says whether there is background work."""
        if not is_wanted or math.isinf(self._paid_until_s):
            self._paid_until_s = max(now, self._paid_until_s)

    def owed_ms(self, now: float) -> float:
        """Milliseconds of work that are due to background at `now`; at most 0 when it has its share."""
        return 1e3 * self.share * min(now - self._paid_until_s, self.window_s)

    def pay(self, cost_ms: float, now: float) -> None:
        """Book background work that was planned."""
        since = max(self._paid_until_s, now - self.window_s)
        self._paid_until_s = min(since + cost_ms / 1e3 / self.share, now + self.window_s)
