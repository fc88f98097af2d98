"""Where `replay` writes its descriptions: JSON lines for machines, readable ones for a terminal."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from appliance.jobs import Description, encode_description
from appliance.read_files import ReadFiles
from appliance.settings import SettingsError


class LinePrinter(Protocol):
    """What puts a line on the terminal without tearing the progress bar."""

    def print(self, line: str) -> None:
        """Prints one line for a person."""


class DescriptionWriter:
    """Writes each description as it comes: JSON to `path`, or to standard output when that is no terminal.

    `-` is standard output in any case. Raises `SettingsError` when the file cannot be written, at once or
    later, or is one of those that are `read`.
    """

    def __init__(self, path: Path | None, read: ReadFiles | None = None) -> None:
        is_terminal = sys.stdout.isatty()
        self._is_readable = is_terminal and str(path) != "-"
        self._file: IO[bytes] | None = None
        self._is_ours = path is not None and str(path) != "-"
        if path is not None and self._is_ours:
            if read and read.has(path):
                raise SettingsError(f"{path}: is what this run reads: choose another --output")
            self._file = _open(path)
        elif not self._is_readable:
            self._file = sys.stdout.buffer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None and self._is_ours:
            # why: what could not be written is tried once more here, and has been told.
            with suppress(OSError):
                self._file.close()

    def write(self, description: Description, printer: LinePrinter) -> None:
        """Writes one description, and flushes it."""
        try:
            if self._file is not None:
                self._file.write(encode_description(description) + b"\n")
                self._file.flush()
            if self._is_readable:
                printer.print(readable_line(description))
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> SettingsError:
        if self._is_ours and self._file is not None:
            return SettingsError(f"{self._file.name}: cannot be written: {error.strerror}")
        # why: Python would try to write the rest at its end, and say so in words of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return SettingsError(f"standard output cannot be written: {error.strerror}")


def readable_line(description: Description) -> str:
    """A description in one line: where, when, what made it worth one, and what was said."""
    minutes, seconds = divmod(description.time_s, 60)
    what = description.text or f"(no description: {description.error})"
    return (
        f"{description.camera} {minutes:.0f}:{seconds:04.1f} "
        f"{description.label} #{description.track_id}: {' '.join(what.split())}"
    )


def counted(number: int, noun: str) -> str:
    """A number and what it counts, in the singular for one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _open(path: Path) -> IO[bytes]:
    with suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return path.open("wb")
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror}: choose another --output") from None
