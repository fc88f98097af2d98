"""How good descriptions may be: under overload quality gives way first, then frames, never chat.

Pure Python and told the time. Overload is measured, not guessed: frames wait longer for their turn, in the
queue and in the engine, than suits the age at which a live frame is worthless. The work itself is no wait: a
slow model that keeps up describes at full quality.
"""

from collections import deque
from dataclasses import dataclass, fields, replace
from typing import Literal

RungName = Literal["full", "picture", "tokens", "frames"]
RUNG_NAMES: tuple[RungName, ...] = ("full", "picture", "tokens", "frames")

_MAX_CALM_FACTOR = 8


@dataclass(frozen=True, slots=True)
class LadderConfig:
    """How far quality may give way, and when it does.

    `until` names the last kind of rung: `full` turns the ladder off, `picture` allows smaller pictures,
    `tokens` shorter texts too, `frames` also fewer frames. No picture's longer side is made smaller than
    `min_side` pixels, no answer shorter than `min_tokens`, no camera waits longer than `max_interval_s` from
    one description to the next because of it. A step down in quality follows when frames wait longer than
    `busy_share` of the age at which they expire, a step up when they wait less than `calm_share` of it.
    """

    until: RungName = "frames"
    min_side: int = 224
    min_tokens: int = 24
    max_interval_s: float = 30.0
    busy_share: float = 0.5
    calm_share: float = 0.2

    def __post_init__(self) -> None:
        if self.until not in RUNG_NAMES:
            raise ValueError(f"until must be one of {', '.join(RUNG_NAMES)}, not {self.until!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) and value <= 0:
                raise ValueError(f"{field.name} must be greater than 0, not {value!r}")
        if not self.calm_share < self.busy_share <= 1:
            raise ValueError(
                f"busy_share must be greater than calm_share ({self.calm_share}) and at most 1, "
                f"not {self.busy_share}"
            )


@dataclass(frozen=True, slots=True)
class Rung:
    """What a level of the ladder allows.

    Args:
        name: What gave way last.
        scale: Of the picture's sides, 0 to 1.
        max_tokens: Of the answer.
        interval_s: From one description of a camera to its next, at least.
        min_side: Pixels below which no picture's longer side is made.
    """

    name: RungName
    scale: float
    max_tokens: int
    interval_s: float = 0.0
    min_side: int = 1

    def side(self, longest: int) -> int:
        """The longer side in pixels for a picture whose own is `longest`; never more than that."""
        return min(longest, max(self.min_side, round(longest * self.scale)))


def rungs(config: LadderConfig, max_tokens: int, max_age_s: float) -> tuple[Rung, ...]:
    """The levels from full quality down: half and a quarter of the pixels, half the text, then pauses."""
    fewer = max(min(max_tokens, config.min_tokens), max_tokens // 2)
    pauses = [min(factor * max_age_s, config.max_interval_s) for factor in (1.0, 2.0, 4.0)]
    steps: list[Rung] = [
        Rung("full", 1.0, max_tokens),
        Rung("picture", 0.71, max_tokens),
        Rung("picture", 0.5, max_tokens),
        Rung("tokens", 0.5, fewer),
        *(Rung("frames", 0.5, fewer, pause_s) for pause_s in pauses),
    ]
    last = RUNG_NAMES.index(config.until)
    allowed = [step for step in steps if RUNG_NAMES.index(step.name) <= last]
    # why: a step that changes nothing would only delay the one that helps.
    by_effect = {(rung.scale, rung.max_tokens, rung.interval_s): rung for rung in reversed(allowed)}
    return tuple(replace(rung, min_side=config.min_side) for rung in reversed(by_effect.values()))


class Ladder:
    """The level now: `observe` every frame's wait as it ends, `update` it with what waits still.

    A step down needs half of `max_age_s` of overload; one up needs twice `max_age_s` of calm, and twice as
    long again each time that a step up had to be taken back. So it does not swing.
    """

    def __init__(self, config: LadderConfig, *, max_tokens: int, max_age_s: float) -> None:
        self.config = config
        self.rungs = rungs(config, max_tokens, max_age_s)
        self.level = 0
        self.wait_s = 0.0
        self._max_age_s = max_age_s
        self._waits: deque[tuple[float, float]] = deque()
        self._busy_since: float | None = None
        self._calm_since: float | None = None
        self._calm_factor = 1
        self._rose_at: float | None = None

    @property
    def rung(self) -> Rung:
        """What the level allows."""
        return self.rungs[self.level]

    @property
    def calm_s(self) -> float:
        """Seconds of calm before the next step up in quality."""
        return 2 * self._max_age_s * self._calm_factor

    def observe(self, now: float, wait_s: float, level: int) -> None:
        """A frame that was begun at `level` turns out, at `now` in seconds, to have waited so long."""
        # why: what was begun before a step says nothing about the step.
        if level == self.level:
            self._waits.append((now, wait_s))

    def observe_expired(self, now: float, wait_s: float) -> None:
        """A frame has expired after this wait; unless that was short, no wait would have been enough."""
        is_wait = wait_s >= self.config.calm_share * self._max_age_s
        self.observe(now, self._max_age_s if is_wait else wait_s, self.level)

    def update(self, now: float, waiting_s: float) -> int:
        """The level at `now`, when the frame that waits longest has waited `waiting_s`.

        The wait that counts is that, or the mean of the last `max_age_s` when it is longer.
        """
        while self._waits and now - self._waits[0][0] > self._max_age_s:
            self._waits.popleft()
        mean_s = sum(wait_s for _, wait_s in self._waits) / len(self._waits) if self._waits else 0.0
        self.wait_s = max(waiting_s, mean_s)
        is_busy = self.wait_s > self.config.busy_share * self._max_age_s
        is_calm = self.wait_s < self.config.calm_share * self._max_age_s
        self._busy_since = (now if self._busy_since is None else self._busy_since) if is_busy else None
        self._calm_since = (now if self._calm_since is None else self._calm_since) if is_calm else None
        if self._busy_since is not None and now - self._busy_since >= self._max_age_s / 2:
            self._step(now, 1)
        elif self._calm_since is not None and now - self._calm_since >= self.calm_s:
            self._step(now, -1)
        return self.level

    def _step(self, now: float, by: int) -> None:
        level = min(max(0, self.level + by), len(self.rungs) - 1)
        if level != self.level:
            self._learn_patience(now, by)
            self.level = level
            self._waits.clear()
        self._busy_since = self._calm_since = None

    def _learn_patience(self, now: float, by: int) -> None:
        if by > 0 and self._rose_at is not None:
            was_too_early = now - self._rose_at < self.calm_s
            self._calm_factor = min(2 * self._calm_factor, _MAX_CALM_FACTOR) if was_too_early else 1
        self._rose_at = now if by < 0 else None
