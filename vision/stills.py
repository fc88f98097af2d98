"""Pictures from files: one, or a folder of them."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image as Pillow
from PIL import ImageOps

from vision.errors import SourceError, SourceNotFound, SourceUnreadable, SourceUnsupported
from vision.pixels import to_bgr8
from vision.types import Frame, Image

IMAGE_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".pgm", ".ppm", ".tif", ".tiff", ".webp"})
"""Lower-case endings of files that are read as pictures; any other file is read as a video."""

MAX_PIXELS = 100_000_000
"""Largest picture that is decoded: 100 megapixels."""


class Stills:
    """Separate pictures, in the order given; a `FrameSource` that is no video.

    ``time_s`` of a picture is its position, one second each. A file that cannot be read, or is too large, is
    skipped and counted in ``num_lost``; when none can be read, that is an error.
    """

    is_live = False
    is_video = False
    fps = None

    def __init__(self, paths: Sequence[Path], camera: str) -> None:
        self.name = camera
        self.paths = tuple(paths)
        self.num_lost = 0
        self._is_closed = False

    @classmethod
    def in_folder(cls, folder: Path, camera: str) -> "Stills":
        """Take the pictures of a folder by name, without those of folders in it.

        Raises:
            SourceNotFound: there are none.
            SourceUnreadable: the folder may not be listed.
        """
        try:
            paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
        except OSError as error:
            raise SourceUnreadable(f"folder {folder} cannot be listed: {error.strerror}") from error
        if not paths:
            endings = ", ".join(sorted(IMAGE_SUFFIXES))
            raise SourceNotFound(f"no pictures in folder {folder}: files ending in {endings} are looked for")
        return cls(paths, camera)

    @property
    def num_frames(self) -> int:
        """Number of files."""
        return len(self.paths)

    @property
    def losses(self) -> Mapping[str, int]:
        """Frames of the current iteration that could not be handed on."""
        return {"damaged": self.num_lost}

    def __iter__(self) -> Iterator[Frame]:
        self.num_lost = 0
        for index, path in enumerate(self.paths):
            if self._is_closed:
                return
            try:
                image = read_image(path)
            except SourceError:
                self.num_lost += 1
                if self.num_lost == len(self.paths):
                    raise
                continue
            yield Frame(self.name, index, float(index), time.time(), image)

    def close(self) -> None:
        """End a running iteration at its next picture."""
        self._is_closed = True


def read_image(path: str | os.PathLike[str]) -> Image:
    """Read a picture file of any mode and depth as upright ``[H, W, 3]`` uint8 BGR.

    Raises:
        SourceUnreadable: the file is no picture, is damaged, or cannot be opened.
        SourceUnsupported: it has more than `MAX_PIXELS` pixels.
    """
    try:
        with Pillow.open(path) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise SourceUnsupported(
                    f"{path} has {picture.width}×{picture.height} pixels; the limit is {MAX_PIXELS} in all"
                )
            return _to_bgr(ImageOps.exif_transpose(picture))
    except SourceUnsupported:
        raise
    # why: a Pillow plugin raises whatever its parser trips over (struct.error, KeyError, zlib.error, …).
    except Exception as error:
        raise SourceUnreadable(f"{path} cannot be read as a picture: {error}") from error


def _to_bgr(picture: Pillow.Image) -> Image:
    if picture.mode.startswith("I"):
        return to_bgr8(np.asarray(picture).clip(0, 65535).astype(np.uint16))
    if picture.mode == "F":
        return to_bgr8(np.asarray(picture))
    if picture.has_transparency_data:
        rgba = np.asarray(picture.convert("RGBA"))
        return to_bgr8(rgba[:, :, [2, 1, 0, 3]])
    return to_bgr8(np.asarray(picture.convert("RGB"))[:, :, ::-1])
