"""Where `replay` writes its descriptions: JSON lines for machines, readable ones for a terminal."""

import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from appliance.jobs import Description, encode_description
from appliance.settings import SettingsError


class LinePrinter(Protocol):
    """What puts a line on the terminal without tearing the progress bar."""

    def print(self, line: str) -> None:
        """Prints one line for a person."""


class DescriptionWriter:
    """Writes each description as it comes: JSON to `path`, or to standard output when that is no terminal.

    `-` is standard output in any case. Raises `SettingsError` when the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        is_terminal = sys.stdout.isatty()
        self._is_readable = is_terminal and str(path) != "-"
        self._file: IO[bytes] | None = None
        self._is_ours = path is not None and str(path) != "-"
        if path is not None and self._is_ours:
            self._file = _open(path)
        elif not self._is_readable:
            self._file = sys.stdout.buffer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None and self._is_ours:
            self._file.close()

    def write(self, description: Description, printer: LinePrinter) -> None:
        """Writes one description, and flushes it."""
        if self._file is not None:
            self._file.write(encode_description(description) + b"\n")
            self._file.flush()
        if self._is_readable:
            printer.print(readable_line(description))


def readable_line(description: Description) -> str:
    """A description in one line: where, when, what made it worth one, and what was said."""
    minutes, seconds = divmod(description.time_s, 60)
    what = description.text or f"(no description: {description.error})"
    return (
        f"{description.camera} {minutes:.0f}:{seconds:04.1f} "
        f"{description.label} #{description.track_id}: {' '.join(what.split())}"
    )


def _open(path: Path) -> IO[bytes]:
    with suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return path.open("wb")
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror}: choose another --output") from None
