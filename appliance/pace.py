"""When each camera may be described again, and how much of a frame's wait was for the engine."""

from collections.abc import Mapping
from math import inf


class Pace:
    """Told the time in seconds of one clock.

    A frame also waits because its camera was held back, or because the engine was away; neither is a sign of
    overload, and neither counts.
    """

    def __init__(self) -> None:
        self._free_at: dict[str, float] = {}
        self._moving_since = -inf

    def begin(self, camera: str, now: float, interval_s: float) -> None:
        """A frame of the camera is being described; the next is wanted `interval_s` from now."""
        self._free_at[camera] = now + interval_s

    def stand_still(self, now: float) -> None:
        """Nothing moves now, for another reason than too much work."""
        self._moving_since = now

    def held(self, now: float) -> frozenset[str]:
        """The cameras of which nothing is wanted yet."""
        return frozenset(camera for camera, free_at in self._free_at.items() if free_at > now)

    def own_wait_s(self, camera: str, now: float, wait_s: float) -> float:
        """The part of `wait_s` (until now) in which the camera could have had its turn."""
        free_at = max(self._free_at.get(camera, -inf), self._moving_since)
        return max(0.0, min(wait_s, now - free_at))

    def longest_wait_s(self, waits_s: Mapping[str, float], now: float) -> float:
        """How long the most patient camera waits for its turn; 0 when none does."""
        return max((self.own_wait_s(camera, now, wait_s) for camera, wait_s in waits_s.items()), default=0.0)
