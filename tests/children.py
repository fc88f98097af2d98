"""Child processes of tests: that they hear Ctrl-C, and that none is left."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver as servers
from multiprocessing import resource_tracker as trackers
from multiprocessing.context import ForkServerContext

HEAR_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""What a child that is sent SIGINT begins with: what was started in the background ignores it, and so does
every child, unless it is told otherwise."""


@contextmanager
def forkserver(*modules: str) -> Iterator[ForkServerContext]:
    """Forks children that have `modules` imported; they, the server and its tracker end with the context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    try:
        yield context
    finally:
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        servers._forkserver._stop()  # type: ignore[attr-defined]
        trackers._resource_tracker._stop()  # type: ignore[attr-defined]
