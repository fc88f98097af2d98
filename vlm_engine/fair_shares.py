"""Whose turn it is among those that send background work: pure Python.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): each request gets a place when it
comes, one cost behind its tenant's last one, but not before what is being served. So a tenant that
sends a thousand requests waits behind itself, and one that sends a request now and then goes next.
"""

from vlm_engine.sequence import Sequence

MOST_OUTPUT = 128


class FairShares:
    """Places of sequences; those of one tenant keep the order in which they came."""

    def __init__(self) -> None:
        self._served = 0.0
        self._ends: dict[str, float] = {}

    def enter(self, sequence: Sequence) -> None:
        """Give the sequence its place."""
        tenant = sequence.request.tenant
        sequence.place = max(self._served, self._ends.get(tenant, 0.0))
        self._ends[tenant] = sequence.place + _cost(sequence)

    def start(self, sequence: Sequence) -> None:
        """Book that a sequence runs: nobody who comes later gets a place before it."""
        self._served = max(self._served, sequence.place)
        self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._served}

    def give_back(self, sequence: Sequence) -> None:
        """Take back what a sequence was to cost that ends without having run."""
        tenant = sequence.request.tenant
        if tenant in self._ends:
            self._ends[tenant] -= _cost(sequence)


def _cost(sequence: Sequence) -> int:
    """Tokens, as far as they are known; answers are mostly shorter than they may be."""
    return sequence.num_prompt_tokens + min(sequence.max_tokens, MOST_OUTPUT)
