"""Pace and threads of a training that shares its machine: both may be changed while it runs."""

import os
import time
from pathlib import Path

import torch

THREADS_VARIABLE = "DEMO_VLM_THREADS_FILE"


class Pace:
    """The time a stage has, from now on: ``seconds``, or until the unix time in ``deadline_file``."""

    def __init__(self, seconds: float, deadline_file: Path | None = None) -> None:
        self._start = time.time()
        self._seconds, self._file = seconds, deadline_file

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.time() - self._start

    def progress(self) -> float:
        """Share of the time that is over; 1 or more at the end."""
        seconds = self._seconds
        if self._file is not None and self._file.exists():
            seconds = float(self._file.read_text()) - self._start
        return self.elapsed() / max(1.0, seconds)


def apply_threads() -> None:
    """Use as many cores as the file named by DEMO_VLM_THREADS_FILE says; nothing without it."""
    name = os.environ.get(THREADS_VARIABLE)
    if not name or not Path(name).exists():
        return
    cores = set(range(int(Path(name).read_text() or 1)))
    if cores and cores != os.sched_getaffinity(0):
        torch.set_num_threads(len(cores))
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
