"""The image door: the one way by which bytes from outside become pixels.

The API and the queue's jobs share it, so that a picture is refused or accepted for the same reason in both.
What comes out is an upright 8-bit RGB `PIL.Image.Image` without metadata; whatever cannot become one raises
`ImageError` with a sentence for the person who sent it.
"""

from __future__ import annotations

import binascii
import io
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

# why: Pillow's own limit warns on standard error, or raises with advice about Python settings;
# `_check_header` is stricter, runs before any pixel is decoded and tells the sender what to change.
Image.MAX_IMAGE_PIXELS = None

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_READABLE = "JPEG, PNG, WebP, GIF, BMP or TIFF"
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(ValueError):
    """What was offered as an image is not one, or is one that we do not take; says which and why."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What the door lets through.

    `max_bytes` is the encoded size, `max_pixels` width times height before any scaling; what has more than
    `max_kept_pixels` is made smaller, to no fewer than any vision tower reads of it. An image
    whose sides differ by `max_aspect` times or more is refused. One whose shorter side is under
    `min_side` pixels is enlarged to it, aspect kept, since the vision towers need at least one patch
    of 28 or 32 pixels.
    """

    max_bytes: int = 20 * 2**20
    max_pixels: int = 50_000_000
    max_kept_pixels: int = 16_777_216
    max_aspect: float = 200.0
    min_side: int = 32


DEFAULT_LIMITS = ImageLimits()


def image_from_bytes(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> Image.Image:
    """Decode an encoded image: upright RGB, alpha over white, the first frame of an animation.

    Raises `ImageError` for empty, oversized, truncated, unknown or extreme input. Size and shape are
    judged from the header, before pixels are decoded.
    """
    with _opened(data, limits) as image:
        _draft(image, limits.max_kept_pixels)
        _decode(image)
        orientation = _orientation(image)
        pixels = _shrunk(_flattened(image), limits.max_kept_pixels)
    pixels.info = {}  # why: comments, EXIF and colour profiles of the sender go no further
    if orientation in _UPRIGHT:
        pixels = pixels.transpose(_UPRIGHT[orientation])
    return _enlarged(pixels, limits.min_side)


def image_size(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> tuple[int, int]:
    """Width and height by the header alone, as the image lies; raises `ImageError` as `image_from_bytes`."""
    with _opened(data, limits) as image:
        return image.size


def bytes_from_data_uri(uri: str, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
    """The encoded image in `data:image/…;base64,…` (RFC 2397, scheme and parameters in any case).

    Raises `ImageError`, also for a payload that is not base64.
    """
    media_type, payload = split_data_uri(uri, "an image", "data:image/jpeg;base64,…")
    if not media_type.startswith("image/"):
        raise ImageError(f"the media type of the data: URI is {media_type or 'missing'!r}, image/… is needed")
    return from_base64(payload, limits.max_bytes, "image")


def split_data_uri(uri: str, what: str, example: str) -> tuple[str, str]:
    """Media type, in lower case, and base64 payload of a data: URI.

    Raises `ImageError` that says what is wanted instead.
    """
    header, comma, payload = uri.partition(",")
    scheme, _, rest = header.partition(":")
    media_type, *parameters = [part.strip().lower() for part in rest.split(";")]
    if scheme.lower() != "data" or not comma:
        raise ImageError(f"{what} has to be a data: URI such as {example}")
    if not parameters or parameters[-1] != "base64":
        raise ImageError(f"the data: URI has to be base64: {example}")
    return media_type, payload


def from_base64(payload: str, max_bytes: int, what: str) -> bytes:
    """The bytes of base64, padded or not; raises `ImageError` for anything else, white space too.

    Args:
        payload: The text.
        max_bytes: How many bytes are accepted.
        what: What it is, for the error.
    """
    if len(payload) > max_bytes * 4 // 3 + 4:
        raise ImageError(f"the {what} has more than the {max_bytes} bytes that are accepted")
    try:
        return binascii.a2b_base64(payload + "=" * (-len(payload) % 4), strict_mode=True)
    except ValueError as error:
        raise ImageError(
            f"the data: URI is not valid base64 ({error}); send it without line breaks and other white space"
        ) from error


def _opened(data: bytes, limits: ImageLimits) -> Image.Image:
    if not data:
        raise ImageError("the image is empty (0 bytes)")
    if len(data) > limits.max_bytes:
        raise ImageError(
            f"the image has {len(data)} bytes, more than the {limits.max_bytes} that are accepted"
        )
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    # why: a Pillow plugin raises whatever its parser trips over (struct.error, KeyError, zlib.error, …);
    # each of them means the same to the sender.
    except Exception as error:
        raise ImageError(f"these {len(data)} bytes are not a {_READABLE} image") from error
    _check_header(image.size, limits)
    return image


def _check_header(size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ImageError(f"the image has no pixels ({width}×{height})")
    if width * height > limits.max_pixels:
        raise ImageError(
            f"the image is {width}×{height}, more than {limits.max_pixels} pixels; scale it down first"
        )
    if max(size) >= limits.max_aspect * min(size):
        raise ImageError(
            f"the image is {width}×{height}; sides that differ {limits.max_aspect:g} times are not accepted"
        )


def _draft(image: Image.Image, max_pixels: int) -> None:
    """Have a JPEG decoded at a half, a quarter or an eighth, where that is still enough."""
    scale = math.sqrt(max_pixels / (image.width * image.height))
    if scale < 1:
        image.draft(None, (math.ceil(image.width * scale), math.ceil(image.height * scale)))


def _decode(image: Image.Image) -> None:
    try:
        image.load()
    except Exception as error:  # why: as in `_opened`
        raise ImageError(f"the {image.format} image is damaged or cut short: {error}") from error


def _orientation(image: Image.Image) -> int:
    # why: asked after decoding: Pillow turns a TIFF by itself, and a PNG may carry EXIF behind its pixels
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:
        # why: as in `_opened`; an image with unreadable metadata is still an image, taken as it lies
        return 1


def _flattened(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        image = _eight_bit(image)
    if image.mode in ("F", "LAB"):  # why: F has no defined brightness, and Pillow cannot convert LAB
        raise ImageError(f"the image has {image.mode} pixels; save it as 8-bit RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    white = Image.new("RGB", rgba.size, "white")
    white.paste(rgba, mask=rgba.getchannel("A"))
    return white


def _eight_bit(image: Image.Image) -> Image.Image:
    # why: 16-bit grey arrives as "I;16…" or "I"; `convert` clips it at 255: all but the darkest turns white
    samples = np.asarray(image).astype(np.int64).clip(0, 65535)
    return Image.fromarray((samples >> 8).astype(np.uint8))


def _shrunk(image: Image.Image, max_pixels: int) -> Image.Image:
    scale = math.sqrt(max_pixels / (image.width * image.height))
    if scale >= 1:
        return image
    size = (max(1, int(image.width * scale)), max(1, int(image.height * scale)))
    return image.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)


def _enlarged(image: Image.Image, min_side: int) -> Image.Image:
    shorter = min(image.size)
    if shorter >= min_side:
        return image
    width, height = (math.ceil(side * min_side / shorter) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)
