"""A short recording that came as bytes: some of its frames, evenly spread in time."""

import io
import math
import time
from dataclasses import dataclass
from pathlib import Path

import av
import cv2
from av.container import InputContainer
from av.video.stream import VideoStream

from vision.errors import SourceUnreadable, SourceUnsupported
from vision.types import Image
from vision.video_file import VideoFile, upright

DEFAULT_FPS = 2.0
_ALMOST = 1e-3


@dataclass(frozen=True, slots=True)
class ClipLimits:
    """How much of a clip is read.

    Args:
        max_frames: Frames that are kept.
        max_read: Frames that are decoded for them.
        max_frame_pixels: Of a frame as it was recorded.
        max_read_pixels: Of all frames that are decoded, as they were recorded.
        max_read_s: Seconds of computing that reading may take.
        max_kept_pixels: Of a frame that is kept; a larger one is made smaller.
    """

    max_frames: int = 64
    max_read: int = 1800
    max_frame_pixels: int = 36_000_000
    max_read_pixels: int = 6_000_000_000
    max_read_s: float = 30.0
    max_kept_pixels: int = 768 * 1024


class VideoClip(VideoFile):
    """A recording in memory; whatever its bytes say, nothing else is opened.

    Args:
        data: The bytes of a file.
        container: What kind of file it is, as FFmpeg calls it: ``mp4``, ``matroska``, …

    Raises:
        SourceUnreadable: it is damaged or of another kind.
        SourceUnsupported: it has no video stream, or no decoder for it.
    """

    def __init__(self, data: bytes, container: str) -> None:
        self._data = data
        self._kind = container
        self._limits = ClipLimits()
        self._end_s = math.inf
        super().__init__(Path("the clip"), "")

    def _container(self) -> InputContainer:
        # why: bytes that look like a list of other addresses must not make the reader open these
        options = {"protocol_whitelist": ""}
        data = io.BytesIO(self._data)
        return av.open(data, "r", format=self._kind, options=options, metadata_errors="replace")

    def _begin(self, stream: VideoStream) -> None:
        # why: clips come from anybody, and one of them must not take the cores of all others
        stream.codec_context.thread_count = 1
        self._check_size(stream.codec_context.width, stream.codec_context.height)

    def _go_on(self) -> None:
        if time.thread_time() > self._end_s:
            raise SourceUnsupported(
                f"the clip takes more than {self._limits.max_read_s:g} s to read; cut it, or make it smaller"
            )

    def _check_size(self, width: int, height: int) -> None:
        if width * height > self._limits.max_frame_pixels:
            limit = self._limits.max_frame_pixels
            raise SourceUnsupported(f"the clip is {width}x{height}, more than {limit} pixels")

    def sampled(self, fps: float | None, limits: ClipLimits) -> tuple[list[Image], float]:
        """Frames ``[H, W, 3]`` uint8 BGR, upright, and how many of them make a second.

        Without `fps` there are two a second, fewer if that would be more than the limit.

        Raises:
            SourceUnreadable: not one frame could be decoded.
            SourceUnsupported: a limit is exceeded, or there are fewer than two frames.
        """
        self._limits, self._end_s = limits, time.thread_time() + limits.max_read_s
        frames, num_pixels = _EvenFrames(fps, limits), 0
        for number, (picture, time_s, stream) in enumerate(self.pictures(), 1):
            if number > limits.max_read:
                raise SourceUnsupported(f"the clip has more than {limits.max_read} frames; cut it")
            self._check_size(picture.width, picture.height)
            num_pixels += picture.width * picture.height
            if num_pixels > limits.max_read_pixels:
                raise SourceUnsupported(
                    f"all frames of the clip have more than {limits.max_read_pixels} pixels together; "
                    "cut it, or make it smaller"
                )
            if frames.wants(time_s):
                frames.add(time_s, _shrunk(upright(picture, stream), limits.max_kept_pixels))
        return frames.result()


class _EvenFrames:
    """Keeps frames that are a step apart; too many make the step twice as long."""

    def __init__(self, fps: float | None, limits: ClipLimits) -> None:
        self._step_s = 1 / (fps or DEFAULT_FPS)
        self._is_asked = fps is not None
        self._max_frames = limits.max_frames
        self._due_s = -math.inf
        self._kept: list[tuple[float, Image]] = []

    def wants(self, time_s: float) -> bool:
        """Whether a frame of this time is kept; times do not go back."""
        return time_s >= self._due_s

    def add(self, time_s: float, image: Image) -> None:
        """Keep a frame that is wanted."""
        self._kept.append((time_s, image))
        if len(self._kept) > self._max_frames:
            if self._is_asked:
                raise SourceUnsupported(
                    f"the clip has more than {self._max_frames} frames at {1 / self._step_s:g} a second; "
                    "ask for fewer (fps), or cut it"
                )
            self._kept = self._kept[::2]
            self._step_s *= 2
        first_s, last_s = self._kept[0][0], self._kept[-1][0]
        num_steps = math.floor((last_s - first_s) / self._step_s + _ALMOST) + 1
        self._due_s = first_s + (num_steps - _ALMOST) * self._step_s

    def result(self) -> tuple[list[Image], float]:
        """The frames and their rate."""
        if not self._kept:
            raise SourceUnreadable("the clip: not one frame of the video could be decoded")
        length_s = self._kept[-1][0] - self._kept[0][0]
        if len(self._kept) < 2 or length_s <= 0:
            raise SourceUnsupported(
                f"the clip has one frame only at {1 / self._step_s:g} a second; "
                "ask for more (fps), or send it as an image"
            )
        return [image for _, image in self._kept], (len(self._kept) - 1) / length_s


def _shrunk(image: Image, max_pixels: int) -> Image:
    height, width = image.shape[:2]
    scale = math.sqrt(max_pixels / (height * width))
    if scale >= 1:
        return image
    size = (max(1, int(width * scale)), max(1, int(height * scale)))
    small: Image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    return small
