"""How memory is left at the end."""

import atexit
import gc


def leave_garbage() -> None:
    """Have the interpreter not look for garbage when it ends.

    why: it would look at all that torch and transformers brought along, which takes seconds.
    """
    atexit.register(gc.freeze)
