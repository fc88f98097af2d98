"""Drawing what was found into a copy of the frame, and JPEG."""

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont

from vision.types import Detections, Frame, Image

_COLOURS = (
    (40, 110, 255),
    (60, 180, 75),
    (255, 130, 20),
    (180, 60, 220),
    (0, 190, 230),
    (200, 190, 40),
    (90, 90, 240),
    (150, 200, 60),
)
"""BGR; a track or class keeps its own."""

_PAPER = (32, 32, 32)
_INK = (255, 255, 255)
_MAX_LINES = 6


def draw(frame: Frame, detections: Detections, text: str | None = None) -> Image:
    """Return a copy of the frame with boxes, labels and, below the picture, a text.

    Args:
        frame: what to draw on; it stays as it is.
        detections: its detections; a box carries ``label score`` and, when tracked, ``#track``.
        text: a caption of any length, wrapped into a bar of up to six lines under the picture.

    Returns:
        ``[H + bar, W, 3]`` uint8 BGR; the bar is there only with a text.
    """
    image = frame.image.copy()
    size = _text_size(frame)
    width = max(1, round(min(frame.height, frame.width) / 240))
    for row, (box, name) in enumerate(zip(detections.boxes, _captions(detections), strict=True)):
        colour = _colour(detections, row)
        x1, y1, x2, y2 = (round(float(v)) for v in box)
        cv2.rectangle(image, (x1, y1), (x2, y2), colour, width)
        patch = _label(name, size, colour)
        _paste(image, patch, x1, y1 - patch.shape[0])
    return np.vstack([image, caption_bar(text, frame.width, size)]) if text else image


@lru_cache(maxsize=4)
def caption_bar(text: str, width: int, size: int) -> Image:
    """Return ``[h, width, 3]``, read only: light text of ``size`` pixels on dark, wrapped, ``…`` if cut."""
    font, pad = _font(size), size // 2
    lines = _wrap(text, font, max(width - 2 * pad, size))
    height = len(lines) * (size + size // 3) + pad
    picture = Pillow.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(picture)
    for row, line in enumerate(lines):
        pen.text((pad, pad // 2 + row * (size + size // 3)), line, _INK, font)
    return np.asarray(picture, np.uint8)[:, :, ::-1]


def encode_jpeg(image: Image, quality: int = 90) -> bytes:
    """Return a picture ``[H, W, 3]`` BGR as JPEG.

    Args:
        image: the picture.
        quality: 1 to 100.

    Raises:
        ValueError: the quality is out of range, or the picture has no pixels or too many for JPEG.
    """
    if not 1 <= quality <= 100:
        raise ValueError(f"JPEG quality is 1 to 100, not {quality}")
    if 0 in image.shape or max(image.shape) > 65_500:
        raise ValueError(f"a picture of shape {image.shape} cannot be a JPEG")
    is_done, data = cv2.imencode(".jpg", np.ascontiguousarray(image), [cv2.IMWRITE_JPEG_QUALITY, quality])
    assert is_done
    return bytes(data)


def _captions(detections: Detections) -> list[str]:
    ids = [""] * len(detections)
    if detections.track_ids is not None:
        ids = [f" #{i}" for i in detections.track_ids.tolist()]
    pairs = zip(detections.labels, ids, detections.scores.tolist(), strict=True)
    return [f"{label}{track} {score:.2f}" for label, track, score in pairs]


def _colour(detections: Detections, row: int) -> tuple[int, int, int]:
    keys = detections.class_ids if detections.track_ids is None else detections.track_ids
    return _COLOURS[int(keys[row]) % len(_COLOURS)]


def _text_size(frame: Frame) -> int:
    return max(11, round(min(frame.height, frame.width) / 32))


@lru_cache(maxsize=256)
def _label(text: str, size: int, colour: tuple[int, int, int]) -> Image:
    font = _font(size)
    width = round(font.getlength(text)) + size // 2
    picture = Pillow.new("RGB", (width, size + size // 3), colour[::-1])
    ImageDraw.Draw(picture).text((size // 4, 0), text, _INK, font)
    return np.ascontiguousarray(np.asarray(picture, np.uint8)[:, :, ::-1])


@lru_cache(maxsize=8)
def _font(size: int) -> ImageFont.FreeTypeFont:
    # why: Pillow's own font has ASCII only; matplotlib, which ultralytics needs, brings one with more letters
    package = find_spec("matplotlib")
    places = (package.submodule_search_locations if package else None) or ()
    for place in places:
        path = Path(place) / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
        if path.is_file():
            return ImageFont.truetype(str(path), size)
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


def _paste(image: Image, patch: Image, x: int, y: int) -> None:
    """Copy a patch into a picture, moved inside where it would stick out."""
    height, width = image.shape[:2]
    patch = patch[:height, :width]
    x = min(max(x, 0), width - patch.shape[1])
    y = min(max(y, 0), height - patch.shape[0])
    image[y : y + patch.shape[0], x : x + patch.shape[1]] = patch


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.extend(_split(word, font, width))
    if len(lines) > _MAX_LINES:
        lines = [*lines[: _MAX_LINES - 1], lines[_MAX_LINES - 1] + "…"]
    return lines or [""]


def _split(word: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Cut a word that is wider than a line."""
    pieces = [""]
    for letter in word:
        if font.getlength(pieces[-1] + letter) > width and pieces[-1]:
            pieces.append("")
        pieces[-1] += letter
    return pieces
