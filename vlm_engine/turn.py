"""A turn of a detector on the engine's device, and the books of all turns; pure Python."""

from collections import Counter
from dataclasses import dataclass, field, replace

from vlm_engine.books import Histogram, HistogramSnapshot, WorkBooks, WorkStats, sums

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_EMPTY = Histogram(_BOUNDS).snapshot()


@dataclass(frozen=True, slots=True)
class Turn:
    """The device is lent: one detector runs some pieces of its network while the engine waits.

    Args:
        number: Tells this turn from all others.
        client: Whose turn it is.
        num_pieces: How many of the pieces that it asked for, 1 or more.
        piece_ms: How long these take, as the detector says.
        predicted_ms: How long the turn takes, as was learned from the turns before.
        cost_ms: What the step books for it: that and what predictions err by.
        lease_ms: After this time the engine goes on, whatever the detector does.
        waited_s: Since the detector asked.
        ends_round: Whether nothing of the detector's batch is left after it.
        is_overrun: Whether it was given for the floor's sake though it did not fit.
    """

    number: int
    client: int
    num_pieces: int
    piece_ms: float
    predicted_ms: float
    cost_ms: float
    lease_ms: float
    waited_s: float
    ends_round: bool
    is_overrun: bool


@dataclass(frozen=True, slots=True)
class TurnStats:
    """What detectors got of the device; counts are since the start.

    Args:
        num_clients: Detectors that are connected.
        num_rounds: Batches that went through their network within turns.
        counts: ``floor_overruns``, turns given for the floor's sake though they did not fit;
            ``expired``, leases that ended before the turn; ``died``, detectors that went away during
            theirs; ``ungated``, times that a detector went on since nobody answered it.
        wait: From asking to the turn.
        length: Of turns that were given back.
        work: The same, beside what was predicted.
    """

    num_clients: int = 0
    num_rounds: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    wait: HistogramSnapshot = _EMPTY
    length: HistogramSnapshot = _EMPTY
    work: WorkStats = field(default_factory=WorkStats)

    def ended(self) -> "TurnStats":
        """After the engine's death: nobody is connected."""
        return replace(self, num_clients=0)

    def after(self, earlier: "TurnStats") -> "TurnStats":
        """This state with the counts of an earlier engine added."""
        return TurnStats(
            self.num_clients,
            earlier.num_rounds + self.num_rounds,
            sums(earlier.counts, self.counts),
            earlier.wait + self.wait,
            earlier.length + self.length,
            self.work.after(earlier.work),
        )


class TurnBooks:
    """What is written down of turns while they happen."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.num_rounds = 0
        self._wait, self._length = Histogram(_BOUNDS), Histogram(_BOUNDS)
        self._work = WorkBooks()

    def add_start(self, turn: Turn) -> None:
        """Book a turn that begins."""
        self._wait.observe(turn.waited_s)
        self.counts["floor_overruns"] += turn.is_overrun

    def add_end(self, turn: Turn, measured_ms: float) -> None:
        """Book a turn that was given back."""
        self._length.observe(measured_ms / 1e3)
        self._work.add(measured_ms, turn.predicted_ms)
        self.num_rounds += turn.ends_round

    def snapshot(self, num_clients: int, relative_error: float, residual_ms: float) -> TurnStats:
        """The books as they are now, with what the cost model says of its errors."""
        return TurnStats(
            num_clients,
            self.num_rounds,
            dict(self.counts),
            self._wait.snapshot(),
            self._length.snapshot(),
            self._work.snapshot(relative_error, residual_ms),
        )
