"""Recorded video by PyAV: every frame that decodes, upright, with the times of its time stamps."""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
import av.error
from av.container import InputContainer
from av.sidedata.sidedata import SideDataContainer
from av.sidedata.sidedata import Type as SideDataType
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from vision.errors import SourceUnreadable, SourceUnsupported
from vision.pixels import apply_display_matrix, rotate_clockwise, to_bgr8
from vision.readable import readable
from vision.types import Frame, Image

logger = logging.getLogger(__name__)


def _other_kind(cls: type[SideDataType], value: object) -> SideDataType:
    kind: Any = object.__new__(cls)
    kind._name_, kind._value_ = f"OTHER_{value}", value
    return cast(SideDataType, kind)


# why: FFmpeg tells more of a picture (EXIF, stereo views) than PyAV's list has, which then raises,
# and nothing is told of the picture's turn either
SideDataType._missing_ = classmethod(_other_kind)  # type: ignore[assignment,method-assign]

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
        self.num_missing = 0
        self._is_closed = False
        self._is_told = False
        with self._open() as container:
            stream = self._video_stream(container)
            self._length = _Length.of(container, stream)
            rate = stream.average_rate or stream.guessed_rate
            self.fps = float(rate) if rate else None
            self.num_frames = stream.frames or _frames_by_duration(stream, rate)

    @property
    def losses(self) -> Mapping[str, int]:
        """Frames of the current iteration that could not be handed on; when it is over, also the missing."""
        return {"damaged": self.num_lost, "missing": self.num_missing}

    def __iter__(self) -> Iterator[Frame]:
        """Decode from the start.

        Raises:
            SourceUnreadable: not one frame could be decoded.
            SourceUnsupported: they have pixels of a kind that cannot be converted.
        """
        num_read, end_s, self.num_missing = 0, 0.0, 0
        frame_s = 1 / (self.fps or _DEFAULT_FPS)
        for picture, time_s, stream in self.pictures():
            image = upright(picture, stream, self.path)
            yield Frame(self.name, num_read + self.num_lost, time_s, time.time(), image)
            num_read += 1
            end_s = time_s + max(frame_s, _duration_s(picture))
        if not num_read:
            raise SourceUnreadable(f"{self.path}: not one frame of the video could be decoded")
        if not self._is_closed:
            self._look_for_missing(num_read, end_s, frame_s)

    def _look_for_missing(self, num_read: int, end_s: float, frame_s: float) -> None:
        self.num_missing = self._length.num_missing(num_read + self.num_lost, end_s, frame_s)
        if self.num_missing and not self._is_told:
            self._is_told = True
            logger.warning(
                "%s has %d frames of %s%d that its header tells of: it was cut off or is damaged",
                readable(str(self.path)),
                num_read,
                "" if self._length.num_frames else "about ",
                num_read + self.num_lost + self.num_missing,
            )

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
        # why: a picture of its cover may be listed as a video before it
        best = container.streams.best("video")
        stream = best if isinstance(best, VideoStream) else container.streams.video[0]
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


@dataclass(frozen=True, slots=True)
class _Length:
    """How long a header says that a recording is; None where it says nothing, or only guesses."""

    num_frames: int | None
    seconds: float | None

    @classmethod
    def of(cls, container: InputContainer, stream: VideoStream) -> "_Length":
        kind = container.format.name
        if "mov" in kind and stream.duration is not None and stream.time_base is not None:
            return cls(stream.frames or None, float(stream.duration * stream.time_base))
        if kind == "avi" and stream.frames and stream.average_rate:
            # why: its count has ticks without a frame in it.
            return cls(None, float(stream.frames / stream.average_rate))
        if kind not in ("matroska,webm", "flv"):
            return cls(None, None)
        seconds = _clock_s(stream.metadata.get("DURATION", ""))
        # why: of several streams another may be the longer one.
        if seconds is None and len(container.streams) == 1 and container.duration is not None:
            seconds = container.duration / av.time_base
        return cls(None, seconds)

    def num_missing(self, num_frames: int, end_s: float, frame_s: float) -> int:
        """How many frames are missing where there were so many until then; 0 for what may be inexact.

        A header counts frames that an edit list leaves out, and does not always know how long the last is.
        """
        if self.seconds is None:
            return 0
        short_s = self.seconds - end_s
        if self.num_frames is None:
            return round(short_s * num_frames / end_s) if short_s > max(1.0, self.seconds / 20) else 0
        missing = self.num_frames - num_frames
        return missing if missing > max(2, self.num_frames / 100) and short_s > 2 * frame_s else 0


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


def upright(picture: VideoFrame, stream: VideoStream, source: object = "the video") -> Image:
    """Return a decoded picture as ``[H, W, 3]`` uint8 BGR, turned as its stream asks.

    Raises:
        SourceUnsupported: its pixels are of a kind that FFmpeg cannot convert; the message names `source`.
    """
    image = _bgr8(picture)
    if image is None:
        raise SourceUnsupported(
            f"{source}: its pixels, {picture.format.name}, cannot be converted; make it yuv420p, for example"
        )
    # why: `picture.side_data` would hold the picture, and be held by it, until the garbage collector comes
    side_data: SideDataContainer = cast(Any, SideDataContainer)(picture)
    matrix = side_data.get(SideDataType.DISPLAYMATRIX)
    if matrix is not None:
        return apply_display_matrix(image, bytes(matrix))
    # why: old writers have only this tag; readers of today make a matrix of it, so it counts only without one
    tag = stream.metadata.get("rotate", "")
    return rotate_clockwise(image, float(tag)) if tag.removeprefix("-").isdecimal() else image


def _bgr8(picture: VideoFrame) -> Image | None:
    # why: FFmpeg ends the whole process over these
    if picture.format.name.startswith("yaf32"):
        return None
    try:
        # why: by default each picture has a team of threads for this, which lives as long as the picture
        return to_bgr8(picture.to_ndarray(format="bgr24", threads=1))
    except av.error.FFmpegError:
        return None


def _clock_s(text: str) -> float | None:
    """Seconds of a `HH:MM:SS.fraction`, None for anything else."""
    try:
        hours, minutes, seconds = text.split(":")
        return 3600 * int(hours) + 60 * int(minutes) + float(seconds)
    except ValueError:
        return None


def _duration_s(picture: VideoFrame) -> float:
    return float(picture.duration * picture.time_base) if picture.duration and picture.time_base else 0.0


def _frames_by_duration(stream: VideoStream, rate: Fraction | None) -> int | None:
    if stream.duration is None or stream.time_base is None or not rate:
        return None
    return round(stream.duration * stream.time_base * rate)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
