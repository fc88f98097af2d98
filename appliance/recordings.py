"""What `replay` is asked to play: the command line's paths and addresses as a checked list."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from vision.errors import SourceError, SourceNotFound, SourceUnreadable, SourceUnsupported
from vision.options import SourceOptions
from vision.sources import FrameSource, open_source
from vision.stills import IMAGE_SUFFIXES
from vision.urls import is_stream, shown_address

VIDEO_SUFFIXES = frozenset(
    {".3gp", ".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ts", ".webm", ".wmv"}
)


@dataclass(frozen=True, slots=True)
class Recording:
    """One source to play: `uri` as `vision.open_source` takes it, under a name of its own.

    `num_frames` is what the file claims, None when it is unknown. Whoever opens it gets its frames
    as `options` say, painted over where they are masked.
    """

    name: str
    uri: str
    is_video: bool
    num_frames: int | None
    options: SourceOptions = field(default_factory=SourceOptions)

    def open(self, *, realtime: bool = False) -> FrameSource:
        """Its frames; raises a `vision.errors.SourceError`."""
        return open_source(
            self.uri, camera=self.name, realtime=realtime and self.is_video, options=self.options
        )


def find_recordings(sources: Sequence[str]) -> list[Recording]:
    """Every video and picture that the `sources` mean, each opened once to see that it can be.

    Raises a `vision.errors.SourceError` with a line for each that cannot, or that is live or has no end.
    """
    found: list[Recording] = []
    errors: list[SourceError] = []
    for source in sources:
        try:
            uris = _expand(source)
        except SourceError as error:
            errors.append(error)
            continue
        for uri in uris:
            try:
                found.append(_recording(uri, {recording.name for recording in found}))
            except SourceError as error:
                errors.append(error)
    if errors:
        raise type(errors[0])("\n".join(dict.fromkeys(map(str, errors))))
    return found


def _recording(uri: str, used: set[str]) -> Recording:
    if is_stream(uri):
        raise SourceUnsupported(
            f"{shown_address(uri)} is a live stream, and replay plays recordings: "
            "name it under cameras: for serve"
        )
    name = _unused_name(_plain_name(uri), used)
    source = open_source(uri, camera=name)
    try:
        _check_length(uri, source)
        return Recording(name, uri, source.is_video, source.num_frames)
    finally:
        source.close()


def _check_length(uri: str, source: FrameSource) -> None:
    if not uri.startswith("synthetic:"):
        return
    if source.is_live:
        raise SourceUnsupported(f"{uri} leaves out frames as a live camera does: leave out live=1 in replay")
    if source.num_frames is None:
        example = f"{uri}{'&' if '?' in uri else '?'}frames=100"
        raise SourceUnsupported(f"{uri} has no end: say how many frames are played, as in {example}")


def _expand(source: str) -> list[str]:
    folder = Path(source).expanduser()
    if "://" in source or not folder.is_dir():
        return [source]
    wanted = VIDEO_SUFFIXES | IMAGE_SUFFIXES
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() in wanted and path.is_file())
    except OSError as error:
        raise SourceUnreadable(f"folder {folder} cannot be read: {error.strerror}") from error
    if not files:
        raise SourceNotFound(f"folder {folder} holds no video and no picture")
    return [str(file) for file in files]


def _plain_name(uri: str) -> str:
    # why: of an address only the host, for the rest may hold a password.
    parts = urlsplit(uri)
    name = parts.hostname if "://" in uri and parts.scheme != "file" else Path(uri).stem
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name or "").strip("-") or "source"


def _unused_name(name: str, used: set[str]) -> str:
    number = 2
    unused = name
    while unused in used:
        unused, number = f"{name}-{number}", number + 1
    return unused
