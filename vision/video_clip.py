"""A short recording that came as bytes: some of its frames, evenly spread in time."""

import io
import math
from dataclasses import dataclass
from pathlib import Path

import av
import cv2
from av.container import InputContainer

from vision.errors import SourceUnreadable, SourceUnsupported
from vision.types import Image
from vision.video_file import VideoFile, upright

CONTAINERS = ("avi", "matroska", "mov", "mp4", "mpeg", "mpegts", "webm")
DEFAULT_FPS = 2.0
_ALMOST = 1e-3


@dataclass(frozen=True, slots=True)
class ClipLimits:
    """How much of a clip is read.

    Args:
        max_frames: Frames that are kept.
        max_read: Frames that are decoded for them.
        max_frame_pixels: Of a frame as it was recorded.
        max_kept_pixels: Of a frame that is kept; a larger one is made smaller.
    """

    max_frames: int = 64
    max_read: int = 1800
    max_frame_pixels: int = 50_000_000
    max_kept_pixels: int = 768 * 1024


class VideoClip(VideoFile):
    """A recording in memory; whatever its bytes say, nothing else is opened.

    Args:
        data: The bytes of a file.
        container: What kind of file it is, one of `CONTAINERS`.

    Raises:
        SourceUnreadable: it is damaged or of another kind.
        SourceUnsupported: it has no video stream, or no decoder for it.
    """

    def __init__(self, data: bytes, container: str) -> None:
        self._data = data
        self._kind = container
        super().__init__(Path("the clip"), "")

    def _container(self) -> InputContainer:
        # why: bytes that look like a list of other addresses must not make the reader open these
        options = {"protocol_whitelist": ""}
        data = io.BytesIO(self._data)
        return av.open(data, "r", format=self._kind, options=options, metadata_errors="replace")

    def sampled(self, fps: float | None, limits: ClipLimits) -> tuple[list[Image], float]:
        """Frames ``[H, W, 3]`` uint8 BGR, upright, and how many of them make a second.

        Without `fps` there are two a second, fewer if that would be more than the limit.

        Raises:
            SourceUnreadable: not one frame could be decoded.
            SourceUnsupported: a limit is exceeded, or there are fewer than two frames.
        """
        frames = _EvenFrames(fps, limits)
        for number, (picture, time_s, stream) in enumerate(self.pictures(), 1):
            if number > limits.max_read:
                raise SourceUnsupported(f"the clip has more than {limits.max_read} frames; cut it")
            if picture.width * picture.height > limits.max_frame_pixels:
                size = f"{picture.width}x{picture.height}"
                raise SourceUnsupported(f"the clip is {size}, more than {limits.max_frame_pixels} pixels")
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
