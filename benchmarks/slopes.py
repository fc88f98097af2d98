"""A slope and how sure it is: does memory grow, or is that noise?"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NUM_BLOCKS = 20


@dataclass(frozen=True, slots=True)
class Slope:
    """Least squares over the means of blocks; `interval` is half of the 95 % interval."""

    value: float
    interval: float

    @property
    def least(self) -> float:
        """What it grows by at least."""
        return self.value - self.interval


def slope_of(times: Sequence[float], values: Sequence[float], num_blocks: int = NUM_BLOCKS) -> Slope | None:
    """None for less than two samples a block.

    why: memory jumps and stays, so that samples a second apart say nearly the same; means of blocks are
    closer to the independent errors of which the interval makes its width.
    """
    size = len(times) // num_blocks
    if size < 2:
        return None
    at = [statistics.fmean(times[i * size : (i + 1) * size]) for i in range(num_blocks)]
    level = [statistics.fmean(values[i * size : (i + 1) * size]) for i in range(num_blocks)]
    fit = statistics.linear_regression(at, level)
    left = [y - fit.slope * x - fit.intercept for x, y in zip(at, level, strict=True)]
    spread, free = statistics.pvariance(at) * num_blocks, num_blocks - 2
    # why: Student's t for 95 %, within 2 % from six degrees of freedom on.
    student = 1.96 + 2.5 / (free - 0.5)
    return Slope(fit.slope, student * math.sqrt(sum(x * x for x in left) / free / spread))
