"""How glibc's allocator keeps memory in processes of many threads."""

import ctypes
from contextlib import suppress

_M_ARENA_MAX = -8
_NUM_ARENAS = 2


def limit_arenas() -> None:
    """Let all threads share two of the allocator's arenas; to be called before they start. Linux only.

    why: a thread has an arena of its own by default. A camera's thread allocates pictures that the detector's
    thread frees, so that each camera keeps what it ever held at once, scattered: eight cameras that came back
    again and again took 10 MB a minute more.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _NUM_ARENAS)
