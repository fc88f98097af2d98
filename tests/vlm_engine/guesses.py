"""Proposals that are right as often as a test wants."""

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items

from vlm_engine.config import SpeculativeConfig
from vlm_engine.sequence import Sequence
from vlm_engine.speculation import Speculator


class Guesses(Speculator):
    """Proposes what is known to come, with a wrong token here and there, and goes on past the end.

    Args:
        coming: All tokens that each request will say, by its id in the engine; none for a request without.
        wrong: How often a proposed token is another one, 0 to 1.
        most: Most tokens proposed.
    """

    def __init__(self, coming: Mapping[str, Items[int]], *, wrong: float = 0.3, most: int = 5) -> None:
        super().__init__(SpeculativeConfig())
        self._coming, self._wrong, self._most = coming, wrong, most
        self._random = random.Random(len(coming))

    def propose(
        self, sequence: Sequence, room: Callable[[], int], take: Callable[[Items[float]], int]
    ) -> tuple[int, ...]:
        most = max(0, min(room(), self._most, sequence.max_tokens - sequence.num_output_tokens - 1))
        done = sequence.num_output_tokens
        ahead = [*self._coming.get(sequence.request_id, ())[done : done + most], *range(20, 20 + self._most)]
        proposed = [abs(each - 1) if self._random.random() < self._wrong else each for each in ahead[:most]]
        return tuple(proposed[: take([0.01] * len(proposed))])
