"""How many threads a step of few rows is worth, measured on this machine."""

import logging
import time

import torch

from vlm_engine.native.library import load_library
from vlm_engine.native.ops import NativeLinear

log = logging.getLogger(__name__)

GAIN = 0.85
NUM_ROWS = (1, 2, 4, 8)
REPEATS = 3


def tune_threads(layer: NativeLinear) -> dict[int, int]:
    """Give linear layers of few rows the fewest threads that are about as fast as any.

    Decoding is as fast as memory gives weights. Where one core can ask for all of it, more threads only make
    every layer wait for the one that the machine holds up (another process, an interrupt).

    Args:
        layer: A layer that is larger than the caches, best the head.

    Returns:
        Threads by rows, for each number of rows that was measured; as set in the kernels.
    """
    library, chosen, above = load_library(), {}, 0
    counts = _thread_counts(torch.get_num_threads())
    for rows in NUM_ROWS:
        x = torch.zeros(rows, layer.in_features, dtype=torch.bfloat16)
        times = {count: _best_s(layer, x, count) for count in counts}
        fastest = min(times.values())
        chosen[rows] = min(count for count in counts if GAIN * times[count] <= fastest)
        for each in range(above + 1, rows + 1):
            library.vlm_set_threads(each, chosen[rows])
        above = rows
    for each in range(above + 1, library.vlm_tile_rows() + 1):
        library.vlm_set_threads(each, 0)
    log.info("threads for steps of few rows: %s", chosen)
    return chosen


def _thread_counts(most: int) -> list[int]:
    """1, 2, 4 … and the most."""
    return sorted({most, *(2**power for power in range(most.bit_length()) if 2**power <= most)})


def _best_s(layer: NativeLinear, x: torch.Tensor, count: int) -> float:
    load_library().vlm_set_threads(len(x), count)
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        layer(x)
        times.append(time.perf_counter() - started)
    return min(times)
