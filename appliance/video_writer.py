"""An MP4 file from pictures with times, H.264 where this PyAV has an encoder for it."""

from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Self

import av
import av.error
import numpy as np

from vision.types import Image

TIME_BASE = Fraction(1, 90_000)
CODECS = ("libx264", "h264", "mpeg4")
NOMINAL_FPS = 25
MANY_PIXELS = 1920 * 1200


class VideoWriter:
    """Writes BGR pictures at their own times (variable frame rate).

    The first one's size is the video's, `room` pixels higher, with even sides as the codecs want them; a
    picture of another size is cut, or padded in dark grey.
    """

    def __init__(self, path: Path, *, room: int = 0) -> None:
        self._room = room
        # why: FFmpeg takes what stands before a colon in a name for a protocol, but not behind a slash.
        self._container = av.open(str(path.absolute()), "w", options={"movflags": "faststart"})
        self._stream: av.VideoStream | None = None
        self._last_pts = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None and error is None:
            self._container.mux(self._stream.encode(None))
        self._container.close()

    def write(self, image: Image, time_s: float) -> None:
        """Adds one picture `[H, W, 3]` that is shown from `time_s` on."""
        if self._stream is None:
            self._stream = self._new_stream(image)
        frame = av.VideoFrame.from_ndarray(_fitted(image, self._stream.width, self._stream.height), "bgr24")
        # invariant: times rise; a recording whose clock steps back is written on at one tick a frame.
        self._last_pts = max(round(time_s / TIME_BASE), self._last_pts + 1)
        frame.pts, frame.time_base = self._last_pts, TIME_BASE
        self._container.mux(self._stream.encode(frame))

    def _new_stream(self, image: Image) -> av.VideoStream:
        height, width = image.shape[0] + self._room, image.shape[1]
        codec = _best_codec()
        options = _quick(width * height) if codec == "libx264" else {}
        stream = self._container.add_stream(codec, rate=NOMINAL_FPS, options=options)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = max(2, width - width % 2), max(2, height - height % 2)
        stream.pix_fmt = "yuv420p"
        stream.time_base = stream.codec_context.time_base = TIME_BASE
        return stream


def _quick(num_pixels: int) -> dict[str, str]:
    """Options of x264 that take a part of its usual time with no more loss; files may be larger."""
    # why: the quickest preset loses more at the same factor; a lower one makes up for it in bytes
    return {"preset": "ultrafast", "crf": "20"} if num_pixels > MANY_PIXELS else {"preset": "veryfast"}


def _best_codec() -> str:
    return next(name for name in CODECS if _is_encoder(name))


def _is_encoder(name: str) -> bool:
    try:
        av.codec.Codec(name, "w")
    except av.error.FFmpegError:
        return False
    return True


def _fitted(image: Image, width: int, height: int) -> Image:
    if image.shape[:2] == (height, width):
        return image
    canvas = np.full((height, width, 3), 32, np.uint8)
    part = image[:height, :width]
    canvas[: part.shape[0], : part.shape[1]] = part
    return canvas
