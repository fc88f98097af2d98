"""Where frames come from: one small protocol and `open_source`, which knows the kinds."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import unquote

from vision.errors import SourceNotFound, SourceUnsupported
from vision.options import SourceOptions
from vision.shape import FrameShape
from vision.types import Frame
from vision.urls import split_uri

MAX_HOLE_S = 60.0
"""So long at most a recording that is played at its pace waits for a frame: joined ones have long holes."""


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
        losses: frames of the current iteration that could not be handed on, by reason: damaged, late, missing
            (of a recording that ends before its header says).
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
    def losses(self) -> Mapping[str, int]: ...  # noqa: D102

    def __iter__(self) -> Iterator[Frame]: ...

    def close(self) -> None:
        """End a running iteration at its next frame and free what the source holds. May be called twice."""
        ...


def open_source(
    uri: str | Path, *, camera: str, realtime: bool = False, options: SourceOptions | None = None
) -> FrameSource:
    """Open a video file, a picture, a folder of pictures, a synthetic camera or a live stream.

    Args:
        uri: a path, ``file://…``, ``synthetic://PLACE?seed=7&fps=5`` (see `vision.synthetic`), or a live
            stream (see `vision.stream_addresses`), which is connected to only when it is iterated.
        camera: the name that its frames carry.
        realtime: hand frames on at the pace of their time stamps, not as fast as they are read.
        options: more of the kind; None for none of them.

    Raises:
        SourceNotFound: nothing there, or a folder without pictures.
        SourceUnreadable: a file that is damaged, empty or not permitted.
        SourceUnsupported: an unknown scheme or option, or a file without a video stream.
    """
    options = options or SourceOptions()
    source = _open(str(uri), camera, options)
    if not source.is_live:
        source = LoopedSource(source) if options.loop else source
        source = PacedSource(source) if realtime else source
    shape = FrameShape(options.rotate, options.max_width, options.max_height, options.masks)
    return source if shape.is_plain else ShapedSource(source, shape)


def _open(uri: str, camera: str, options: SourceOptions) -> FrameSource:
    from vision.stream_addresses import stream_address

    if address := stream_address(uri, options.stream):
        from vision.streams import LiveStream

        return LiveStream(address, camera, options.stream)
    scheme, has_scheme, _ = uri.partition("://")
    if not has_scheme:
        return _open_path(Path(uri).expanduser(), camera)
    if scheme == "file":
        return _open_path(Path(unquote(split_uri(uri).path)), camera)
    if scheme == "synthetic":
        from vision.synthetic import SyntheticSource

        return SyntheticSource.from_uri(uri, camera)
    # why: only the scheme is named, for the rest may hold a password
    raise SourceUnsupported(
        f"sources of kind {scheme}:// are not supported; "
        "give rtsp://, http(s)://, rtmp://, a video file, a picture, a folder of pictures, /dev/video0 "
        "or synthetic://street"
    )


def _open_path(path: Path, camera: str) -> FrameSource:
    from vision.stills import IMAGE_SUFFIXES, Stills
    from vision.video_file import VideoFile

    if path.is_dir():
        return Stills.in_folder(path, camera)
    if not path.exists():
        raise SourceNotFound(f"no file or folder {path}: check the path")
    if not path.is_file():
        # why: a pipe or a device may hold whoever opens it for ever, and gives its frames to one reader once
        raise SourceUnsupported(f"{path} is a pipe, socket or device: give a file, a folder or a stream")
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return Stills((path,), camera)
    return VideoFile(path, camera)


class _Wrapper:
    """Another source, its frames changed on the way."""

    def __init__(self, source: FrameSource) -> None:
        self._source = source
        self.name = source.name
        self.is_live = source.is_live
        self.is_video = source.is_video

    @property
    def fps(self) -> float | None:
        """Frames a second of the source behind."""
        return self._source.fps

    @property
    def num_frames(self) -> int | None:
        """Frames of the source behind."""
        return self._source.num_frames

    @property
    def losses(self) -> Mapping[str, int]:
        """Frames that the source behind could not hand on, by reason."""
        return self._source.losses

    def close(self) -> None:
        """Close the source behind."""
        self._source.close()


class PacedSource(_Wrapper):
    """Another source, slowed down to the pace of its time stamps.

    No frame is left out when the reader is late; ``captured_at`` is the moment of handing on. A hole in the
    time stamps is waited for no longer than `MAX_HOLE_S`.
    """

    def __init__(
        self,
        source: FrameSource,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(source)
        self._clock = clock
        self._closed = threading.Event()
        self._sleep = sleep or self._closed.wait

    def __iter__(self) -> Iterator[Frame]:
        start: float | None = None
        for frame in self._source:
            now = self._clock()
            start = now - frame.time_s if start is None else start
            wait = start + frame.time_s - now
            if wait > MAX_HOLE_S:
                start, wait = start - wait + MAX_HOLE_S, MAX_HOLE_S
            if wait > 0:
                self._sleep(wait)
            if self._closed.is_set():
                return
            yield replace(frame, captured_at=time.time())

    def close(self) -> None:
        """End a running iteration at once."""
        self._closed.set()
        super().close()


class LoopedSource(_Wrapper):
    """A recording without end: after its last frame comes its first, numbers and times go on."""

    num_frames = None

    def __init__(self, source: FrameSource) -> None:
        super().__init__(source)
        self._losses: Counter[str] = Counter()
        self._is_closed = False

    @property
    def losses(self) -> Mapping[str, int]:
        """Frames that could not be handed on, of all rounds before this one."""
        return dict(self._losses)

    def __iter__(self) -> Iterator[Frame]:
        self._losses = Counter()
        num_frames, start_s, frame_s = 0, 0.0, 1 / (self.fps or 1.0)
        while not self._is_closed:
            index, time_s = -1, -frame_s
            for frame in self._source:
                index, time_s = frame.index, frame.time_s
                yield replace(frame, index=num_frames + index, time_s=start_s + time_s)
            if index < 0:
                return
            num_frames += index + 1
            start_s += time_s + frame_s
            self._losses.update(self._source.losses)

    def close(self) -> None:
        """End a running iteration at its next frame."""
        self._is_closed = True
        super().close()


class ShapedSource(_Wrapper):
    """Another source with its frames turned, made smaller and painted over.

    # invariant: a frame with masks leaves here painted over, or not at all.
    """

    def __init__(self, source: FrameSource, shape: FrameShape) -> None:
        super().__init__(source)
        self._shape = shape

    def __iter__(self) -> Iterator[Frame]:
        for frame in self._source:
            yield replace(frame, image=self._shape.apply(frame.image))
