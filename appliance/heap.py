"""How memory is kept in processes of many threads, and left at the end."""

import atexit
import ctypes
import gc
from contextlib import suppress

_M_ARENA_MAX = -8
_NUM_ARENAS = 2


def leave_garbage() -> None:
    """Have the interpreter not look for garbage when it ends.

    why: it would look at all that torch and transformers brought along, which takes seconds.
    """
    atexit.register(gc.freeze)


def limit_arenas() -> None:
    """Let all threads share two of the allocator's arenas; to be called before they start. Linux only.

    why: a thread has an arena of its own by default. A camera's thread allocates pictures that the detector's
    thread frees, so that each camera keeps what it ever held at once, scattered: eight cameras that came back
    again and again took 10 MB a minute more.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _NUM_ARENAS)
