"""Who may use the device now: what a detector asks before it computes."""

from collections.abc import Sequence
from typing import Protocol


class DeviceGate(Protocol):
    """Lends the device to one detector, a few pieces of its work at a time.

    Between `acquire` and `release` the device is the caller's. A gate never keeps its caller waiting for
    ever: where nobody answers, the caller goes on.
    """

    def acquire(self, piece_ms: Sequence[float]) -> int:
        """Wait for the device.

        Args:
            piece_ms: milliseconds that each piece of the work that is left will probably take, in order;
                at least one.

        Returns:
            How many of the pieces may run now, 1 to ``len(piece_ms)``.
        """

    def release(self) -> None:
        """Give the device back once those pieces have run."""


class FreeDevice:
    """A device that nobody else uses: everything may run at once."""

    def acquire(self, piece_ms: Sequence[float]) -> int:
        """See `DeviceGate`."""
        return len(piece_ms)

    def release(self) -> None:
        """See `DeviceGate`."""
