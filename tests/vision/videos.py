"""Small videos with a known content, made where they are needed."""

import io
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image as Pillow

from vision.types import Image


def corner(width: int, height: int, shade: int = 255) -> Image:
    """A dark picture whose upper left quarter is light: shows turns and mirroring."""
    image = np.full((height, width, 3), 16, np.uint8)
    image[: height // 2, : width // 2] = shade
    return image


def turned_jpeg(image: Image, orientation: int) -> bytes:
    """A JPEG that asks to be turned, by EXIF's orientation from 1 to 8, before it is looked at."""
    exif, buffer = Pillow.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Pillow.fromarray(np.ascontiguousarray(image[:, :, ::-1])).save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


def write_video(
    path: Path,
    images: Iterable[Image],
    *,
    times_s: Sequence[float] | None = None,
    fps: int = 10,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    matrix: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
) -> Path:
    """Encode pictures of one size; `times_s` in place of `fps` gives each frame its own time stamp."""
    pictures = list(images)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps, options=options or {})
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = pix_fmt
        if matrix is not None:
            stream.set_display_matrix(matrix)
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for index, image in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="bgr24").reformat(
                format=pix_fmt
            )
            frame.time_base = Fraction(1, 1000)
            frame.pts = round(1000 * (times_s[index] if times_s else index / fps))
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path
