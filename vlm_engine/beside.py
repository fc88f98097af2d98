"""A thread with a core of its own, for work that runs at the same time as the forward pass."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from vlm_engine.native.library import load_library

Main = TypeVar("Main")
Side = TypeVar("Side")


class SideThread:
    """Runs one thing beside another, and shares out the threads of the CPU's kernels between them.

    why: decoding is as fast as memory gives weights, which one core can ask for; a vision encoder computes.
    On cores of their own neither slows the other much, while in turns each waits for the other.

    Args:
        num_threads: Threads in all, at least 2; one is the side thread's, the others stay.
        use_kernels: Whether the CPU kernels compute, which count threads by caller, or torch's.
    """

    def __init__(self, num_threads: int, *, use_kernels: bool) -> None:
        self._num_threads = num_threads
        self._set_threads: Callable[[int], object] = (
            load_library().vlm_set_team if use_kernels else torch.set_num_threads
        )
        self._pool = ThreadPoolExecutor(1, "encoder", lambda: self._set_threads(1))

    def narrow(self, main: Callable[[], Main]) -> Main:
        """Run something on all threads but the side thread's, which others on the machine may need."""
        self._set_threads(self._num_threads - 1)
        try:
            return main()
        finally:
            self._set_threads(self._num_threads)

    def run(self, main: Callable[[], Main], side: Callable[[], Side]) -> tuple[Main, Side]:
        """Run both and wait for both; what the first of them raised is raised."""
        future = self._pool.submit(side)
        try:
            result = self.narrow(main)
        finally:
            wait([future])
        return result, future.result()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()
