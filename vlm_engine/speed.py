"""Whether the whole machine became slower or faster: pure Python.

A cost model learns what each kind of work takes, kind by kind, as it is done. When another program
takes half of the cores, all kinds take longer at once, also those that come seldom; waiting until each
is learned again would be minutes of late tokens.
"""

from collections import deque

WINDOW = 9
CHANGE = 1.4
CERTAIN = 64


class MachineSpeed:
    """A factor on all predictions, moved when the last few are all off in the same direction.

    Smaller changes are left to the models, which know more of the work.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._num_seen = 0
        self._ratios: deque[float] = deque(maxlen=WINDOW)

    def see(self, measured_ms: float, predicted_ms: float) -> None:
        """Book a measured piece of work beside what was predicted for it."""
        self._num_seen += 1
        self._ratios.append(measured_ms / max(predicted_ms, 1e-3))
        if len(self._ratios) < WINDOW or self._num_seen < CERTAIN:
            return
        ordered = sorted(self._ratios)
        # why: all but one must agree, since single steps may be off by a lot
        if ordered[1] > CHANGE or ordered[-2] < 1 / CHANGE:
            self.factor *= ordered[WINDOW // 2]
            self._ratios.clear()
