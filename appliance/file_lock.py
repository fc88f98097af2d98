"""One process at a time for a file: a lock beside it that ends with the process, however it ends."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MOST_READ = 200


class FileInUseError(Exception):
    """The file cannot be had for oneself; the message names it and, where known, who has it."""


@contextmanager
def sole_use(path: Path) -> Iterator[None]:
    """Holds `path` until the end of the block, by a lock on `<path>.lock`; raises `FileInUseError`.

    The lock file stays and says who held it last, but only a living process locks: after a kill nothing has
    to be cleaned up. Other names of the same file (links to it or to its folder) count as the same. On a
    network file system it depends on that whether other machines see the lock.
    """
    lock = path.resolve()
    lock = lock.with_name(f"{lock.name}.lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise FileInUseError(f"{lock}: cannot be made: {error.strerror}") from None
    try:
        _lock(descriptor, path, lock)
        # why: on a full disk nobody is named, and who locks still has the file.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        # invariant: the file is never removed: who waits to open it must meet the one that is locked.
        os.close(descriptor)


def _lock(descriptor: int, path: Path, lock: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, _MOST_READ, 0).decode(errors="replace").strip()
        raise FileInUseError(
            f"{path} is in use by {holder or 'another process'}; every appliance needs its own"
        ) from None
    except OSError as error:
        raise FileInUseError(
            f"{lock}: its file system has no locks ({error.strerror}): choose a local disk"
        ) from None
