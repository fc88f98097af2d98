"""One kind of picture at the door: upright 8-bit BGR, whatever came in."""

import struct
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from vision.errors import FrameRejected
from vision.types import Image

_DEPTHS = "uint8, uint16, float (0 to 1) or bool"
_PAPER = 255
"""What shows through transparent pixels: white, as in a browser."""


def to_bgr8(pixels: NDArray[Any]) -> Image:
    """Return ``[H, W, 3]`` uint8 BGR, contiguous, from a grey, BGR or BGRA picture of any depth.

    Args:
        pixels: ``[H, W]``, ``[H, W, 1]``, ``[H, W, 2]`` (grey, alpha), ``[H, W, 3]`` (BGR) or
            ``[H, W, 4]`` (BGRA); uint8, uint16 (full range), bool, or float from 0 to 1. Transparent
            pixels turn white.

    Raises:
        FrameRejected: the array has another shape or type, or no pixels.
    """
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] not in _TO_BGR or 0 in pixels.shape:
        raise FrameRejected(
            f"not a picture: an array of shape {pixels.shape}; [H, W] or [H, W, 1 to 4] is needed"
        )
    return np.ascontiguousarray(_TO_BGR[pixels.shape[2]](_to_8_bit(pixels)))


def _to_8_bit(pixels: NDArray[Any]) -> Image:
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.uint16:
        return np.asarray(pixels >> 8, np.uint8)
    if pixels.dtype == np.bool_:
        return pixels.astype(np.uint8) * 255
    if np.issubdtype(pixels.dtype, np.floating):
        return np.asarray(np.nan_to_num(pixels).clip(0, 1) * 255 + 0.5, np.uint8)
    raise FrameRejected(f"not a picture: pixels of type {pixels.dtype}; {_DEPTHS} are known")


def _on_paper(pixels: Image) -> Image:
    colour, alpha = pixels[:, :, :-1].astype(np.uint16), pixels[:, :, -1:].astype(np.uint16)
    return ((colour * alpha + _PAPER * (255 - alpha) + 127) // 255).astype(np.uint8)


def _from_grey(pixels: Image) -> Image:
    return np.repeat(pixels, 3, axis=2)


_TO_BGR: dict[int, Callable[[Image], Image]] = {
    1: _from_grey,
    2: lambda pixels: _from_grey(_on_paper(pixels)),
    3: lambda pixels: pixels,
    4: _on_paper,
}


def apply_display_matrix(image: Image, matrix: bytes) -> Image:
    """Turn and mirror a decoded picture as its container asks.

    Args:
        image: ``[H, W, 3]``.
        matrix: FFmpeg's display matrix, nine native-endian int32 ``(a b u c d v x y w)``: a source point
            (x right, y down) is shown at ``(a·x + c·y, b·x + d·y)``. Angles are rounded to quarter turns.
    """
    a, b, _, c, d = struct.unpack_from("=5i", matrix)
    is_transposed = abs(c) > abs(a)
    if is_transposed:
        image = image.transpose(1, 0, 2)
    to_x, to_y = (c, b) if is_transposed else (a, d)
    return np.ascontiguousarray(image[:: -1 if to_y < 0 else 1, :: -1 if to_x < 0 else 1])


def rotate_clockwise(image: Image, degrees: float) -> Image:
    """Turn a picture ``[H, W, 3]`` by the nearest quarter turns."""
    turns = round(degrees / 90) % 4
    return np.ascontiguousarray(np.rot90(image, -turns)) if turns else image


def shrink(image: Image, longest_side: int) -> Image:
    """Return a picture with its longer side at most ``longest_side`` pixels; it is never enlarged."""
    return scaled(image, longest_side / max(image.shape[:2]))


def scaled(image: Image, factor: float) -> Image:
    """Return a picture ``[H, W, 3]`` with its sides times ``factor``, as it is from 1 on."""
    if factor >= 1:
        return image
    height, width = image.shape[:2]
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), np.uint8)
