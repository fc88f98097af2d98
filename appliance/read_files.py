"""The files that a run reads: nothing that it writes may take the place of one, whatever path leads there."""

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

Identity = tuple[int, int]


class ReadFiles:
    """Files known by what they are rather than by name: links and other paths lead to the same one.

    `sources` are paths, folders (all that lies in them) or `file://` addresses; what is no file is left out.
    """

    def __init__(self, sources: Iterable[str | Path] = ()) -> None:
        paths = (path for source in sources for path in _local(str(source)))
        self._identities = {found for path in paths if (found := _identity(path))}

    def has(self, path: Path) -> bool:
        """Whether writing to `path` would write over one of them."""
        return _identity(path) in self._identities

    def spare(self, path: Path) -> Path:
        """`path`, or one with a number behind its name when one of them is there."""
        names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
        return next(one for one in itertools.chain([path], names) if not self.has(one))


def _local(source: str) -> Iterator[Path]:
    if source.startswith("file://"):
        source = unquote(urlsplit(source).path)
    path = Path(source).expanduser()
    yield path
    if path.is_dir():
        yield from path.iterdir()


def _identity(path: Path) -> Identity | None:
    with suppress(OSError, ValueError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return None
