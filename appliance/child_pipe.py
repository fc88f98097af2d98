"""The standard input of a child, written to by somebody who never waits for the child to read."""

import os
import select
import threading
from typing import IO

_LOOK_AGAIN_MS = 100


class ChildPipe:
    """Lines for a child: one that finds no room waits in a thread, and a newer one takes its place.

    # invariant: a line that was begun is written to its end, so the child reads whole lines only.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._pipe = pipe
        self._lock = threading.Lock()
        self._rest: bytes | memoryview = b""
        self._next = b""
        self._is_closing = self._is_given_up = False
        self._thread: threading.Thread | None = None

    def send(self, line: bytes) -> None:
        """Hand a line on; what a dead child does not read is lost."""
        with self._lock:
            if self._rest:
                self._next = line
                return
            self._rest = self._unwritten(line)
            if self._rest:
                self._thread = threading.Thread(target=self._drain, name="child-pipe", daemon=True)
                self._thread.start()

    def close(self, *, is_given_up: bool = False) -> None:
        """End the child's input after what was sent; at once when the child `is_given_up`."""
        with self._lock:
            self._is_closing, self._is_given_up = True, is_given_up
            if not self._rest:
                self._pipe.close()
        if is_given_up and self._thread is not None:
            self._thread.join()

    def _drain(self) -> None:
        poll = select.poll()
        poll.register(self._pipe.fileno(), select.POLLOUT)
        while True:
            poll.poll(_LOOK_AGAIN_MS)
            with self._lock:
                self._rest = b"" if self._is_given_up else self._unwritten(self._rest)
                if not self._rest and not self._is_given_up:
                    self._rest, self._next = self._unwritten(self._next), b""
                if not self._rest:
                    if self._is_closing:
                        self._pipe.close()
                    return

    def _unwritten(self, data: bytes | memoryview) -> memoryview:
        """What found no room; nothing when the child is gone."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._pipe.fileno(), rest) :]
        except BlockingIOError:
            return rest
        except BrokenPipeError:
            return memoryview(b"")
        return rest
