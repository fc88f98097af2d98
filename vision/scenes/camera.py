"""What a camera adds to a picture: brightness, a little blur and noise."""

from dataclasses import dataclass
from functools import cache

import cv2
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from vision.scenes.canvas import Image

_TILE = 512


@dataclass(frozen=True, slots=True)
class CameraLook:
    """A camera's habits.

    gain: brightness factor. blur: sigma in pixels of a 448 wide picture, 0 for none.
    noise: sigma in levels, 0-9.
    """

    gain: float = 1.0
    blur: float = 0.0
    noise: int = 0


def sample_camera(rng: Generator) -> CameraLook:
    """A camera between clean and cheap."""
    blur = float(rng.uniform(0.35, 0.8)) if rng.random() < 0.5 else 0.0
    return CameraLook(float(rng.uniform(0.88, 1.1)), blur, int(rng.integers(0, 8)))


def expose(image: Image, camera: CameraLook, rng: Generator) -> Image:
    """The picture as the camera delivers it: uint8 [H, W, 3], a new array."""
    if camera.blur:
        sigma = camera.blur * image.shape[1] / 448
        image = cv2.GaussianBlur(image, (0, 0), sigma)
    image = cv2.convertScaleAbs(image, alpha=camera.gain)
    return _add_noise(image, camera.noise, rng) if camera.noise else image


def _add_noise(image: Image, sigma: int, rng: Generator) -> Image:
    height, width = image.shape[:2]
    tile = _noise_tile(sigma)
    y, x = (int(v) for v in rng.integers(0, _TILE, 2))
    # why: a rolled tile costs a tenth of fresh normal numbers
    rows, columns = np.arange(y, y + height) % _TILE, np.arange(x, x + width) % _TILE
    grain = tile.take(rows, axis=0).take(columns, axis=1)
    noisy: Image = cv2.add(image, grain, dtype=cv2.CV_8U)
    return noisy


@cache
def _noise_tile(sigma: int) -> NDArray[np.int8]:
    numbers = np.random.default_rng(sigma).normal(0, sigma, (_TILE, _TILE, 3))
    return np.clip(numbers.round(), -127, 127).astype(np.int8)
