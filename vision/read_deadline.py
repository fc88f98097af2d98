"""How long a read of FFmpeg's may take, without Python being asked at each of its system calls."""

import ctypes
import struct
import threading
import time

from av.container import InputContainer

LOOK_EVERY_S = 0.25

_NEVER, _AT_ONCE = -1.0, 0.0


class ReadDeadline:
    """Ends a read that takes longer than it may, or that nobody waits for any more; it raises ``ExitError``.

    why: PyAV's own deadline takes the interpreter's lock and asks Python's clock at each of the thousand
    system calls that one picture takes over RTSP, from all cameras at once; while its limit is negative it
    asks nothing. So the limit is negative here while a read has time, and zero from when it has none.

    invariant: the limit is written only where exactly one number in the open container is the one that it was
    opened with, and from `begin` to `end`; where there is none, PyAV's own deadline holds.

    Args:
        container: open, with a ``read_timeout``; it must outlive this.
    """

    def __init__(self, container: InputContainer) -> None:
        self._container = container
        self._limit_s = float(container.read_timeout or 0.0)
        self._limit: ctypes.c_double | None = None
        self._due_s = float("inf")
        self._lock = threading.Lock()
        _watch.add(self)

    def begin(self) -> None:
        """A read begins."""
        with self._lock:
            self._due_s = time.monotonic() + self._limit_s
            self._write(_NEVER)

    def end(self) -> None:
        """The read is over; the next may begin at any time."""
        with self._lock:
            self._due_s = float("inf")
            # why: PyAV puts its limit there as late as in the first read
            self._limit = self._limit or _find(self._container, self._limit_s)

    def look(self) -> None:
        """End the read if its time is over. Any thread."""
        with self._lock:
            if time.monotonic() > self._due_s:
                self._write(_AT_ONCE)

    def expire(self) -> None:
        """End the read that goes on now, if one does. Any thread."""
        with self._lock:
            if self._due_s < float("inf"):
                self._write(_AT_ONCE)

    def close(self) -> None:
        """Write nothing any more; to be called before the container is closed."""
        with self._lock:
            self._limit, self._due_s = None, float("inf")
        _watch.remove(self)

    def _write(self, limit_s: float) -> None:
        if self._limit is not None:
            self._limit.value = limit_s


def _find(container: InputContainer, limit_s: float) -> ctypes.c_double | None:
    start, wanted = id(container), struct.pack("d", limit_s)
    size = type(container).__basicsize__
    held = ctypes.string_at(start, size)
    places = [at for at in range(0, size - 7, 8) if held[at : at + 8] == wanted]
    return ctypes.c_double.from_address(start + places[0]) if len(places) == 1 and limit_s > 0 else None


class _Watch:
    """One thread that looks after all deadlines, as long as there are some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deadlines: set[ReadDeadline] = set()
        self._is_running = False

    def add(self, deadline: ReadDeadline) -> None:
        with self._lock:
            self._deadlines.add(deadline)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="read-deadlines", daemon=True).start()

    def remove(self, deadline: ReadDeadline) -> None:
        with self._lock:
            self._deadlines.discard(deadline)

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_EVERY_S)
            with self._lock:
                self._is_running = bool(self._deadlines)
                if not self._is_running:
                    return
                deadlines = list(self._deadlines)
            for deadline in deadlines:
                deadline.look()


_watch = _Watch()
