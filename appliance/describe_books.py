"""What the dispatcher counts, and the snapshot of it that `/metrics` and `/health` show."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from appliance.ladder import RUNG_NAMES, Ladder, RungName
from vlm_engine.books import Histogram, HistogramSnapshot

OUTCOMES = ("described", "failed", "retried", "dead", "duplicate", "invalid", "expired", "withdrawn")
"""What becomes of a delivery: a text; an error for good; it comes again; the last try failed; another
worker was first; the body is no job; it was too old before it could be encoded; its camera was masked,
paused or removed."""

LATENCY_BOUNDS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True)
class DescribeStats:
    """A snapshot of the dispatcher's books; counts are since its start.

    Args:
        outcomes: Deliveries by what became of them, see `OUTCOMES`.
        level: Of the ladder, 0 is full quality; `max_level` is the last.
        rung: What gave way last at this level.
        wait_s: How long frames wait for their turn, as the ladder sees it.
        by_rung: Descriptions by the rung that they were made on.
        latency: By camera, seconds from a frame's capture to its description.
    """

    outcomes: Mapping[str, int]
    level: int = 0
    max_level: int = 0
    rung: RungName = "full"
    wait_s: float = 0.0
    by_rung: Mapping[str, int] = field(default_factory=dict)
    latency: Mapping[str, HistogramSnapshot] = field(default_factory=dict)


class DescribeBooks:
    """The counts, as they come."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.num_expired_in_a_row = 0
        self._by_rung: Counter[str] = Counter(dict.fromkeys(RUNG_NAMES, 0))
        self._latency: dict[str, Histogram] = {}

    def settle(self, outcome: str) -> None:
        """Book what became of one delivery."""
        self.outcomes[outcome] += 1
        self.num_expired_in_a_row = self.num_expired_in_a_row + 1 if outcome == "expired" else 0

    def describe(self, camera: str, rung: str, latency_s: float) -> None:
        """Book a description, made `latency_s` after its frame was captured."""
        self._by_rung[rung] += 1
        self._latency.setdefault(camera, Histogram(LATENCY_BOUNDS)).observe(max(0.0, latency_s))

    def snapshot(self, ladder: Ladder) -> DescribeStats:
        """The counts as they are now, with where the ladder stands."""
        return DescribeStats(
            dict(self.outcomes),
            ladder.level,
            len(ladder.rungs) - 1,
            ladder.rung.name,
            ladder.wait_s,
            dict(self._by_rung),
            {camera: histogram.snapshot() for camera, histogram in self._latency.items()},
        )
