"""A thread with a core of its own, for work that runs beside the steps and may outlast them."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import torch

from vlm_engine.native.library import load_library

Result = TypeVar("Result")
Main = TypeVar("Main")

NICE = 1
"""How much lower the side thread's priority is: the front and what chats wait for go first."""


def stand_aside(niceness: int, thread_id: int) -> None:
    """Have a thread leave half of the machine's cores to what chats wait for; nothing happens but on Linux.

    why: a scheduler that balances load would have it share a core with a step again and again.

    Args:
        niceness: By how much its priority sinks.
        thread_id: As `threading.get_native_id` tells it.
    """
    with suppress(OSError, AttributeError):
        cores = sorted(os.sched_getaffinity(thread_id))
        os.sched_setaffinity(thread_id, cores[len(cores) // 2 :])
        os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + niceness)


def stand_all_aside(niceness: int) -> None:
    """The same with all threads of this process, and those that they start."""
    with suppress(OSError, AttributeError):
        for thread_id in os.listdir("/proc/self/task"):
            stand_aside(niceness, int(thread_id))
        if os.getsid(0) == os.getpid():
            # why: where the kernel groups by session (sched_autogroup), niceness counts only inside of one
            Path("/proc/self/autogroup").write_text(str(niceness), encoding="ascii")


class SideThread(Generic[Result]):
    """Runs one thing beside the steps, and shares out the threads of the CPU's kernels between them.

    why: decoding is as fast as memory gives weights, which one core can ask for; a vision encoder and long
    prompts compute. On cores of their own neither slows the other much, in turns each waits for the other.

    Args:
        num_threads: Threads in all, at least 2; one is the side thread's, the others stay.
        use_kernels: Whether the CPU kernels compute, which count threads by caller, or torch's.
    """

    def __init__(self, num_threads: int, *, use_kernels: bool) -> None:
        self._num_threads = num_threads
        self._set_threads: Callable[[int], object] = (
            load_library().vlm_set_team if use_kernels else torch.set_num_threads
        )
        self._pool = ThreadPoolExecutor(1, "side", self._begin)
        self._future: Future[Result] | None = None

    def _begin(self) -> None:
        # why: the first thing that torch does in a thread is to give it as many as all others have
        torch.get_num_threads()
        self._set_threads(1)
        stand_aside(NICE, threading.get_native_id())

    @property
    def is_busy(self) -> bool:
        """Whether something was started whose result was not taken."""
        return self._future is not None

    def start(self, work: Callable[[], Result]) -> None:
        """Run something; what was started before was taken."""
        assert self._future is None, "the side thread is busy"
        self._future = self._pool.submit(work)

    def is_done(self, wait_s: float = 0.0) -> bool:
        """Whether there is a result to take, or comes within `wait_s`."""
        if self._future is None:
            return False
        return self._future.done() or bool(wait([self._future], wait_s).done)

    def take(self) -> Result:
        """The result, waited for if need be; what the work raised is raised."""
        assert self._future is not None, "nothing was started"
        future, self._future = self._future, None
        return future.result()

    def narrow(self, main: Callable[[], Main]) -> Main:
        """Run something on all threads but the side thread's, which others on the machine may need."""
        self._set_threads(self._num_threads - 1)
        try:
            return main()
        finally:
            self._set_threads(self._num_threads)

    def close(self) -> None:
        """End the thread once it is done."""
        self._pool.shutdown()
