"""Child processes that end with their parent: in a session of their own, stopped by pid, never by name."""

import asyncio
import ctypes
import io
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from appliance.child_pipe import ChildPipe
from appliance.progress import Stopwatch

logger = logging.getLogger(__name__)

EXIT_UNUSABLE = 2
STOP_TIMEOUT_S = 5.0
BACK_OFF_S = (1.0, 2.0, 5.0, 15.0, 30.0)
STABLE_AFTER_S = 60.0
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Asks the kernel (Linux) for SIGTERM when the parent dies; exits at once if it already has.

    An appliance that is killed hard must not leave a worker behind that holds cameras and memory.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        sys.exit(1)


class ChildError(Exception):
    """A child said that its settings cannot be used; starting it again would not help."""


class Child:
    """One child that runs `target`, a `package.module:function`, with `payload` on its standard input.

    With `is_told_more` the input stays open for `send`, with `is_heard` the parent gets what it and its own
    children write to standard error (`lines`). A session of its own keeps the terminal's Ctrl-C with the
    parent, which then stops its children in order.
    """

    def __init__(
        self, target: str, payload: bytes, *, is_told_more: bool = False, is_heard: bool = False
    ) -> None:
        # invariant: called from the main thread; the parent-death signal follows the thread that forked.
        module, function = target.split(":")
        code = (
            f"from appliance.processes import end_with_parent; end_with_parent({os.getpid()}); "
            "from appliance.heap import leave_garbage; leave_garbage(); "
            f"from {module} import {function}; {function}()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE if is_heard else None,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        self._stdin = ChildPipe(self._process.stdin)
        self._stdin.send(payload)
        if not is_told_more:
            self._stdin.close()

    def send(self, payload: bytes) -> None:
        """Writes to the child's standard input and never waits: of payloads without room the newest stays."""
        self._stdin.send(payload)

    def lines(self) -> Iterator[str]:
        """Lines that it writes to standard error, until nobody is left to write any."""
        assert self._process.stderr is not None, "a child that is not heard"
        with io.BufferedReader(self._process.stderr) as stream:  # type: ignore[type-var]
            for line in stream:
                yield line.decode(errors="replace").rstrip("\n")

    @property
    def pid(self) -> int:
        """The child's process id, which is also its process group and session."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        return self._process.poll()

    def ask_to_stop(self) -> None:
        """SIGTERM, without waiting."""
        self._process.terminate()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """SIGTERM, then SIGKILL after `timeout_s`; returns when the process is gone."""
        self.ask_to_stop()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdin.close(is_given_up=True)


class Supervisor:
    """Keeps one child running: starts it again with back-off when it dies, until `stop()`."""

    def __init__(self, name: str, start: Callable[[], Child]) -> None:
        self.num_restarts = 0
        self._name = name
        self._start = start
        self._ended: Stopwatch | None = None
        self.started_s = time.monotonic()
        self._child = start()
        self._is_stopping = False

    @property
    def pid(self) -> int:
        """The process id of the child that runs now (or ran last)."""
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        """Whether the child is not there; another one is started soon, unless this is stopping."""
        return self._child.exit_code is not None

    @property
    def is_awaited(self) -> bool:
        """Whether the child ended, and the one in its place has yet to do its work."""
        return self._ended is not None

    def note_up(self) -> None:
        """The child that was started last does its work: after a crash the log tells so."""
        if self._ended is not None and not self.has_ended:
            self._ended.tell(f"the {self._name} is up again")
            self._ended = None

    async def run(self) -> None:
        """Watches the child until cancelled, and then tells it to end.

        Raises `ChildError` when the child exits with `EXIT_UNUSABLE`.
        """
        try:
            await self._watch()
        finally:
            self.ask_to_stop()

    async def _watch(self) -> None:
        failures, loop = 0, asyncio.get_running_loop()
        started_at = loop.time()
        while not self._is_stopping:
            code = self._child.exit_code
            if code is None:
                await asyncio.sleep(0.2)
                continue
            if code == EXIT_UNUSABLE:
                raise ChildError(f"{self._name}: its settings cannot be used")
            failures = 0 if loop.time() - started_at > STABLE_AFTER_S else failures
            delay_s = BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)]
            self._ended = Stopwatch()
            logger.error("%s ended with code %s; starting it again in %.0f s", self._name, code, delay_s)
            await asyncio.sleep(delay_s)
            failures, started_at = failures + 1, loop.time()
            if not self._is_stopping:
                self.num_restarts += 1
                self._child.stop()
                self.started_s = time.monotonic()
                self._child = self._start()

    def send(self, payload: bytes) -> None:
        """Writes to the standard input of the child that runs now."""
        self._child.send(payload)

    def ask_to_stop(self) -> None:
        """Tells the child to end, and starts no other."""
        self._is_stopping = True
        self._child.ask_to_stop()

    async def stop(self) -> None:
        """Ends the child; returns when it is gone."""
        self.ask_to_stop()
        await asyncio.to_thread(self._child.stop)
