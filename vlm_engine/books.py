"""Books of plain numbers: histograms, and what was measured beside what was predicted; pure Python."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """How many values fell into which bucket.

    Args:
        bounds: Upper bounds of the buckets in seconds, each inclusive.
        counts: Values a bucket, not cumulative; one more than `bounds`, the last without a bound.
        sum: Of all values, in seconds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float = 0.0

    @property
    def num_values(self) -> int:
        """Values in all buckets."""
        return sum(self.counts)

    def __add__(self, other: "HistogramSnapshot") -> "HistogramSnapshot":
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return HistogramSnapshot(self.bounds, counts, self.sum + other.sum)


class Histogram:
    """Counts values into fixed buckets.

    Args:
        bounds: Upper bounds of the buckets in seconds, rising.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value_s: float) -> None:
        """Count one value, in seconds."""
        self._counts[bisect_left(self._bounds, value_s)] += 1
        self._sum += value_s

    def snapshot(self) -> HistogramSnapshot:
        """The counts as they are now."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._sum)


@dataclass(frozen=True, slots=True)
class WorkStats:
    """Measured and predicted milliseconds of one kind of work, forward passes or encoder slices.

    Args:
        relative_error: Median of the last 256, relative to what was measured.
        residual_ms: By how much the slowest tenth is longer than predicted, at least.
    """

    last_ms: float = 0.0
    last_predicted_ms: float = 0.0
    total_ms: float = 0.0
    total_predicted_ms: float = 0.0
    relative_error: float = 0.0
    residual_ms: float = 0.0

    def after(self, earlier: "WorkStats") -> "WorkStats":
        """This state with the totals of an earlier engine added."""
        total_ms = earlier.total_ms + self.total_ms
        predicted_ms = earlier.total_predicted_ms + self.total_predicted_ms
        return replace(self, total_ms=total_ms, total_predicted_ms=predicted_ms)


@dataclass(slots=True)
class WorkBooks:
    """Measured beside predicted, as it comes."""

    last_ms: float = 0.0
    last_predicted_ms: float = 0.0
    total_ms: float = 0.0
    total_predicted_ms: float = 0.0

    def add(self, measured_ms: float, predicted_ms: float) -> None:
        """Book one piece of work."""
        self.last_ms, self.last_predicted_ms = measured_ms, predicted_ms
        self.total_ms += measured_ms
        self.total_predicted_ms += predicted_ms

    def snapshot(self, relative_error: float, residual_ms: float) -> WorkStats:
        """The books as they are now, with what the cost model says of its errors."""
        return WorkStats(
            self.last_ms,
            self.last_predicted_ms,
            self.total_ms,
            self.total_predicted_ms,
            relative_error,
            residual_ms,
        )


def sums(earlier: Mapping[Key, int], later: Mapping[Key, int]) -> dict[Key, int]:
    """Counts of both by key."""
    return {key: earlier.get(key, 0) + later.get(key, 0) for key in {**earlier, **later}}
