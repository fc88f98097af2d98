"""Where frames come from: one small protocol and `open_source`, which knows the kinds."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

from vision.errors import SourceNotFound, SourceUnsupported
from vision.types import Frame


@runtime_checkable
class FrameSource(Protocol):
    """A camera, a recording or a set of pictures.

    Iterating gives its frames in order, each time from the start. A recording gives every frame that can be
    decoded; a live source gives the latest.

    Attributes:
        name: the camera's name, as in `Frame.camera`.
        is_live: frames are lost when the reader is late.
        is_video: consecutive frames belong together (False: separate pictures, not to be tracked).
        fps: nominal frames a second, None where there is no such thing.
        num_frames: frames in all if known, as the file claims it; None if endless or unknown.
        num_lost: frames of the current iteration that could not be handed on: damaged, or too late.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def is_live(self) -> bool: ...  # noqa: D102
    @property
    def is_video(self) -> bool: ...  # noqa: D102
    @property
    def fps(self) -> float | None: ...  # noqa: D102
    @property
    def num_frames(self) -> int | None: ...  # noqa: D102
    @property
    def num_lost(self) -> int: ...  # noqa: D102

    def __iter__(self) -> Iterator[Frame]: ...

    def close(self) -> None:
        """End a running iteration at its next frame and free what the source holds. May be called twice."""
        ...


def open_source(uri: str | Path, *, camera: str, realtime: bool = False) -> FrameSource:
    """Open a video file, a picture, a folder of pictures or a synthetic camera.

    Args:
        uri: a path, ``file://…``, or ``synthetic://PLACE?seed=7&fps=5`` (see `vision.synthetic`).
        camera: the name that its frames carry.
        realtime: hand frames on at the pace of their time stamps, not as fast as they are read.

    Raises:
        SourceNotFound: nothing there, or a folder without pictures.
        SourceUnreadable: a file that is damaged, empty or not permitted.
        SourceUnsupported: an unknown scheme or option, or a file without a video stream.
    """
    source = _open(str(uri), camera)
    return PacedSource(source) if realtime and not source.is_live else source


def _open(uri: str, camera: str) -> FrameSource:
    scheme, has_scheme, _ = uri.partition("://")
    if not has_scheme:
        return _open_path(Path(uri).expanduser(), camera)
    if scheme == "file":
        return _open_path(Path(unquote(urlsplit(uri).path)), camera)
    if scheme == "synthetic":
        from vision.synthetic import SyntheticSource

        return SyntheticSource.from_uri(uri, camera)
    # why: only the scheme is named, for the rest may hold a password
    raise SourceUnsupported(
        f"camera {camera!r}: sources of kind {scheme}:// are not supported; "
        "give a video file, a picture, a folder of pictures or synthetic://street"
    )


def _open_path(path: Path, camera: str) -> FrameSource:
    from vision.stills import IMAGE_SUFFIXES, Stills
    from vision.video_file import VideoFile

    if path.is_dir():
        return Stills.in_folder(path, camera)
    if not path.exists():
        raise SourceNotFound(f"no file or folder {path}: check the path of camera {camera!r}")
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return Stills((path,), camera)
    return VideoFile(path, camera)


class PacedSource:
    """Another source, slowed down to the pace of its time stamps.

    No frame is left out when the reader is late; ``captured_at`` is the moment of handing on.
    """

    def __init__(
        self,
        source: FrameSource,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._source = source
        self._clock = clock
        self._sleep = sleep
        self.name = source.name
        self.is_live = source.is_live
        self.is_video = source.is_video
        self.fps = source.fps
        self.num_frames = source.num_frames

    @property
    def num_lost(self) -> int:
        """Frames that the source behind could not hand on."""
        return self._source.num_lost

    def __iter__(self) -> Iterator[Frame]:
        start: float | None = None
        for frame in self._source:
            now = self._clock()
            start = now - frame.time_s if start is None else start
            if (wait := start + frame.time_s - now) > 0:
                self._sleep(wait)
            yield replace(frame, captured_at=time.time())

    def close(self) -> None:
        """Close the source behind."""
        self._source.close()
