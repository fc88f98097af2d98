"""A disk of a test's own that is full when the test wants it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_BLOCK = 4096


class Disk:
    """A small file system at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, but: int = 0) -> None:
        """Leave so many blocks of 4 KiB."""
        with self._filler.open("ab", buffering=0) as file:
            while (room := os.statvfs(self.folder).f_bavail) > but:
                file.write(bytes((room - but) * _BLOCK))

    def make_room(self) -> None:
        """As it was before `fill`."""
        self._filler.unlink()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Disk]:
    """A disk of that size (as `mount` takes it); skips the test where none can be mounted."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(["mount", *options], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip("who runs this may not mount a disk of its own")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
