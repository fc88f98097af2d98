"""First code of the engine's process: tie it to its parent, then load what is heavy.

``python -m vlm_engine.process PARENT_PID``, with `wire.Start` on standard input.
"""

import atexit
import ctypes
import gc
import logging
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel (Linux) end this process when its parent dies; exit if that has happened.

    An appliance that is killed hard must not leave a model in memory, not even while it loads.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    # why: the interpreter would look for garbage in all of torch when it ends, which takes seconds
    atexit.register(gc.freeze)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    from vlm_engine.server import main

    main()
