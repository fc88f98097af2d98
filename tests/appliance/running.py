"""Starting the real command for end-to-end tests, and looking at every process that came of it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil

from tests.children import HEAR_SIGINT

T = TypeVar("T")

START_S = 240.0
"""Generous: a loaded machine of two cores loads torch three times."""


def until(what: Callable[[], T], timeout_s: float = 120.0) -> T:
    """The first true value of `what`, asked again and again; fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return value


class Running:
    """One `appliance …` process with its output in files."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._out = folder / "stdout.txt"
        self._err = folder / "stderr.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # why: tests that are killed themselves leave nothing behind either.
        tie = f"from appliance.processes import end_with_parent; end_with_parent({os.getpid()})"
        main = "import sys; from appliance.cli import main; sys.argv[0] = 'appliance'; main()"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{tie}; {HEAR_SIGINT}; {main}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )
        self._family: set[psutil.Process] = set()

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        """What it has complained of so far."""
        return self._err.read_text()

    def family(self) -> set[psutil.Process]:
        """The process and all that it ever started, as far as this was called while they lived."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            self._family |= {parent, *parent.children(recursive=True)}
        return self._family

    def find(self, word: str) -> list[psutil.Process]:
        """The living descendants whose command line has `word` in it."""
        return [p for p in self.family() if _is_alive(p) and word in " ".join(_command(p))]

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = START_S) -> int:
        """Sends the signal and waits; the exit code."""
        self.family()
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def assert_nothing_is_left(self, timeout_s: float = 120.0) -> None:
        """Every process of the family is gone within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while alive := [p for p in self._family if _is_alive(p)]:
            assert time.monotonic() < deadline, f"left behind: {[_command(p) for p in alive]}"
            time.sleep(0.05)


@contextlib.contextmanager
def running(folder: Path, *arguments: str) -> Iterator[Running]:
    """The command, killed at the end if a test has not stopped it."""
    command = Running(folder, *arguments)
    try:
        yield command
    finally:
        for process in command.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        command.process.wait()


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return list(process.cmdline())
    return []
