"""The door for pixels: any depth and number of channels, any orientation."""

import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vision.errors import FrameRejected
from vision.pixels import apply_display_matrix, rotate_clockwise, shrink, to_bgr8


@pytest.mark.parametrize(
    ("pixels", "colour"),
    [
        (np.full((4, 6), 90, np.uint8), [90, 90, 90]),
        (np.full((4, 6, 1), 90, np.uint8), [90, 90, 90]),
        (np.full((4, 6), 90 * 257, np.uint16), [90, 90, 90]),
        (np.full((4, 6, 3), [256 * 1, 256 * 2, 256 * 3], np.uint16), [1, 2, 3]),
        (np.full((4, 6, 3), [1, 2, 3], np.uint8), [1, 2, 3]),
        (np.full((4, 6, 4), [1, 2, 3, 255], np.uint8), [1, 2, 3]),
        (np.full((4, 6, 4), [1, 2, 3, 0], np.uint8), [255, 255, 255]),
        (np.full((4, 6, 4), [0, 0, 0, 51], np.uint8), [204, 204, 204]),
        (np.full((4, 6, 2), [10, 0], np.uint8), [255, 255, 255]),
        (np.full((4, 6), 0.5, np.float32), [128, 128, 128]),
        (np.full((4, 6), np.nan, np.float32), [0, 0, 0]),
        (np.full((4, 6), 7.5, np.float64), [255, 255, 255]),
        (np.ones((4, 6), np.bool_), [255, 255, 255]),
    ],
)
def test_every_picture_becomes_8_bit_bgr(pixels: NDArray[Any], colour: list[int]) -> None:
    """V14: 1-channel, 16-bit and the rest."""
    image = to_bgr8(pixels)
    assert image.dtype == np.uint8
    assert image.shape == (4, 6, 3)
    assert image.flags.c_contiguous
    assert image[2, 3].tolist() == colour


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((0, 6, 3), np.uint8),
        np.zeros((4, 6, 5), np.uint8),
        np.zeros((1, 4, 6, 3), np.uint8),
        np.zeros(6, np.uint8),
        np.zeros((4, 6), np.int64),
        np.zeros((4, 6), np.complex64),
    ],
)
def test_what_is_no_picture_is_refused(pixels: NDArray[Any]) -> None:
    with pytest.raises(FrameRejected, match="not a picture"):
        to_bgr8(pixels)


def test_a_good_picture_is_not_copied() -> None:
    image = np.zeros((4, 6, 3), np.uint8)
    assert np.shares_memory(to_bgr8(image), image)


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
@pytest.mark.parametrize("is_mirrored", [False, True])
def test_display_matrices_of_all_eight_positions(turns: int, is_mirrored: bool) -> None:
    """V10: a matrix is the way from the source to the screen."""
    upright = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    # the matrix of a quarter turn clockwise, after mirroring left to right
    across, down = np.array([1, 0]), np.array([0, 1])
    if is_mirrored:
        across = -across
    for _ in range(turns):
        across, down = (np.array([-v[1], v[0]]) for v in (across, down))
    shown = np.rot90(upright[:, ::-1] if is_mirrored else upright, -turns)
    numbers = [*(across * 65536), 0, *(down * 65536), 0, 0, 0, 1 << 30]
    assert np.array_equal(apply_display_matrix(upright, struct.pack("=9i", *numbers)), shown)


def test_turning_by_degrees() -> None:
    image = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    assert np.array_equal(rotate_clockwise(image, 90)[0, 0], image[3, 0])
    assert np.array_equal(rotate_clockwise(image, -90)[0, 0], image[0, 5])
    assert rotate_clockwise(image, 0) is image
    assert rotate_clockwise(image, 360) is image


@pytest.mark.parametrize(
    ("size", "longest", "expected"),
    [
        ((640, 360), 320, (320, 180)),
        ((360, 640), 320, (180, 320)),
        ((200, 100), 320, (200, 100)),
        ((5000, 3), 500, (500, 1)),
    ],
)
def test_pictures_are_made_smaller_never_larger(size, longest, expected):
    """V12: any shape keeps its own, within a pixel."""
    width, height = size

    assert shrink(np.zeros((height, width, 3), np.uint8), longest).shape == (*expected[::-1], 3)
