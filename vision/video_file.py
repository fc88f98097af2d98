"""Recorded video by PyAV: every frame that decodes, upright, with the times of its time stamps."""

import time
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import av.error
from av.container import InputContainer
from av.sidedata.sidedata import SideDataContainer
from av.sidedata.sidedata import Type as SideDataType
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from vision.errors import SourceUnreadable, SourceUnsupported
from vision.pixels import apply_display_matrix, rotate_clockwise, to_bgr8
from vision.types import Frame, Image

_OPTIONS = {"protocol_whitelist": "file"}
_DEFAULT_FPS = 25.0


class VideoFile:
    """A recording; a `FrameSource` that waits for its reader and loses nothing that can be decoded.

    Args:
        path: a file of any kind that FFmpeg reads.
        camera: the name that its frames carry.

    Raises:
        SourceUnreadable: the file is damaged, empty or may not be read.
        SourceUnsupported: it has no video stream, or no decoder for it.
    """

    is_live = False
    is_video = True

    def __init__(self, path: Path, camera: str) -> None:
        self.name = camera
        self.path = path
        self.num_lost = 0
        self._is_closed = False
        with self._open() as container:
            stream = self._video_stream(container)
            rate = stream.average_rate or stream.guessed_rate
            self.fps = float(rate) if rate else None
            self.num_frames = stream.frames or _frames_by_duration(stream, rate)

    @property
    def losses(self) -> Mapping[str, int]:
        """Frames of the current iteration that could not be handed on."""
        return {"damaged": self.num_lost}

    def __iter__(self) -> Iterator[Frame]:
        """Decode from the start.

        Raises:
            SourceUnreadable: not one frame could be decoded.
        """
        num_read = 0
        for picture, time_s, stream in self.pictures():
            yield Frame(self.name, num_read + self.num_lost, time_s, time.time(), upright(picture, stream))
            num_read += 1
        if not num_read:
            raise SourceUnreadable(f"{self.path}: not one frame of the video could be decoded")

    def pictures(self) -> Iterator[tuple[VideoFrame, float, VideoStream]]:
        """Decoded pictures as they lie, their times in seconds from the start, and their stream."""
        self.num_lost = 0
        with self._open() as container:
            stream = self._video_stream(container)
            self._begin(stream)
            times = _Times(stream, 1 / (self.fps or _DEFAULT_FPS))
            for picture in self._pictures(container, stream):
                if self._is_closed:
                    return
                yield picture, times.next(picture), stream

    def close(self) -> None:
        """End a running iteration at its next frame."""
        self._is_closed = True

    def _open(self) -> InputContainer:
        try:
            return self._container()
        except (av.error.FFmpegError, OSError, ValueError) as error:
            raise SourceUnreadable(f"{self.path} cannot be read as a video: {_reason(error)}") from error

    def _container(self) -> InputContainer:
        # why: FFmpeg takes what stands before a colon in a name for a protocol, but not behind a slash.
        return av.open(str(self.path.absolute()), options=_OPTIONS, metadata_errors="replace")

    def _video_stream(self, container: InputContainer) -> VideoStream:
        if not container.streams.video:
            raise SourceUnsupported(f"{self.path} has no video stream; give a file with one")
        stream = container.streams.video[0]
        # why: a stream whose codec this build of FFmpeg does not have comes without a codec context
        if stream.codec_context is None:
            raise SourceUnsupported(
                f"{self.path}: no decoder for its video; convert it to H.264, for example"
            )
        return stream

    def _begin(self, stream: VideoStream) -> None:
        """Called before the first packet of an iteration."""
        stream.thread_type = "AUTO"

    def _go_on(self) -> None:
        """Called before each packet; what it raises ends the iteration."""

    def _pictures(self, container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
        packets = container.demux(stream)
        while True:
            self._go_on()
            try:
                packet = next(packets, None)
                pictures = packet.decode() if packet is not None else []
            except av.error.EOFError:
                return
            except av.error.InvalidDataError:
                # why: the decoder takes up again at the next packet that it understands
                self.num_lost += 1
                continue
            except av.error.FFmpegError as error:
                raise SourceUnreadable(f"{self.path} broke off while reading: {_reason(error)}") from error
            if packet is None:
                return
            for picture in pictures:
                if picture.is_corrupt:
                    self.num_lost += 1
                else:
                    yield picture


class _Times:
    """Seconds since the start of the recording, which never go back."""

    def __init__(self, stream: VideoStream, frame_s: float) -> None:
        self._frame_s = frame_s
        self._last: float | None = None
        known = stream.start_time is not None and stream.time_base is not None
        self._origin = float(stream.start_time * stream.time_base) if known else None  # type: ignore[operator]

    def next(self, picture: VideoFrame) -> float:
        """Return the time of the next frame in order of display."""
        follows = 0.0 if self._last is None else self._last + self._frame_s
        if picture.time is None:
            time_s = follows
        else:
            origin = picture.time if self._origin is None else self._origin
            self._origin = origin
            time_s = picture.time - origin
            # why: joined files start their time stamps again; the recording goes on
            if self._last is not None and time_s < self._last:
                self._origin -= follows - time_s
                time_s = follows
        self._last = max(time_s, 0.0)
        return self._last


def upright(picture: VideoFrame, stream: VideoStream) -> Image:
    """Return a decoded picture as ``[H, W, 3]`` uint8 BGR, turned as its stream asks."""
    # why: by default each picture has a team of threads for this, which lives as long as the picture
    image = to_bgr8(picture.to_ndarray(format="bgr24", threads=1))
    matrix = cast(SideDataContainer, picture.side_data).get(SideDataType.DISPLAYMATRIX)
    if matrix is not None:
        return apply_display_matrix(image, bytes(matrix))
    # why: old writers have only this tag; readers of today make a matrix of it, so it counts only without one
    tag = stream.metadata.get("rotate", "")
    return rotate_clockwise(image, float(tag)) if tag.lstrip("-").isdigit() else image


def _frames_by_duration(stream: VideoStream, rate: Fraction | None) -> int | None:
    if stream.duration is None or stream.time_base is None or not rate:
        return None
    return round(stream.duration * stream.time_base * rate)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
