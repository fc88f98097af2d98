"""The places: what stands behind and under the objects, without anything a detector should find."""

from collections.abc import Callable, Sequence

import cv2
import numpy as np
from numpy.random import Generator

from vision.scenes.canvas import Canvas, Image
from vision.scenes.palette import BACKDROP_LIGHT, FULL, RGB, SKIES, Light
from vision.scenes.scene import Scene

_WALLS: tuple[RGB, ...] = (
    (214, 190, 160),
    (196, 168, 150),
    (178, 186, 190),
    (206, 200, 184),
    (172, 150, 140),
)
_ROOM_WALLS: tuple[RGB, ...] = ((226, 214, 190), (204, 216, 214), (222, 204, 200), (208, 212, 190))
_LEAVES: tuple[RGB, ...] = ((92, 142, 78), (112, 152, 82), (78, 128, 84))
_TRUNK: RGB = (112, 84, 62)
_GLASS: RGB = (150, 180, 194)
_LIT: RGB = (255, 214, 120)
_GRASS: RGB = (136, 172, 98)


def draw_backdrop(scene: Scene, rng: Generator) -> Image:
    """Paint the place of a scene, uint8 [H, W, 3] BGR; the same numbers from `rng` give the same place."""
    image = np.zeros((scene.height, scene.width, 3), np.uint8)
    box = (0.0, 0.0, float(scene.width), float(scene.height))
    canvas = Canvas(image, box, BACKDROP_LIGHT[scene.time_of_day])
    _PAINT[scene.place](canvas, scene.time_of_day, rng)
    return image


def _paint_sky(canvas: Canvas, time_of_day: str, rng: Generator, depth: float = 0.45) -> None:
    """A vertical gradient over the upper part, with a sun or a moon and clouds."""
    rows = max(2, round(depth * canvas.height))
    top, bottom = (np.array(Light().tint(c), np.float32) for c in SKIES[time_of_day])
    mix = np.linspace(0, 1, rows, dtype=np.float32)[:, None]
    canvas.image[:rows] = (top * (1 - mix) + bottom * mix)[:, None, :].astype(np.uint8)
    bright = Canvas(canvas.image, canvas.box, FULL)
    x = rng.uniform(0.08, 0.92)
    if time_of_day == "night":
        for star in rng.uniform(0, 1, (12, 2)):
            bright.disc(star[0], star[1] * depth * 0.5, 0.004, (210, 214, 230))
        bright.disc(x, 0.07, 0.032, (226, 228, 214))
        return
    bright.disc(
        x, *((0.07, 0.04, (255, 238, 150)) if time_of_day == "day" else (0.24, 0.06, (255, 206, 120)))
    )
    cloud: RGB = (244, 248, 252) if time_of_day == "day" else (224, 138, 120)
    for _ in range(int(rng.integers(0, 3))):
        cx, cy = rng.uniform(0, 1), rng.uniform(0.03, 0.13)
        for dx in (-0.05, 0.0, 0.05):
            bright.oval(cx + dx, cy - 0.015 * (dx == 0), 0.07, 0.025, cloud)


def _paint_window(canvas: Canvas, corners: Sequence[float], is_lit: bool) -> None:
    x1, y1, x2, y2 = corners
    if is_lit:
        canvas = Canvas(canvas.image, canvas.box, FULL)
    canvas.rect(x1, y1, x2, y2, _LIT if is_lit else _GLASS)


def _paint_houses(canvas: Canvas, time_of_day: str, rng: Generator, ground: float) -> None:
    chance_lit = {"day": 0.0, "dusk": 0.3, "night": 0.4}[time_of_day]
    left = -0.05
    while left < 1:
        width, top = rng.uniform(0.16, 0.28), rng.uniform(0.06, 0.22)
        canvas.rect(left, top, left + width, ground, _pick(rng, _WALLS))
        canvas.rect(left, top - 0.02, left + width, top + 0.01, (132, 104, 96))
        columns = 3 if width > 0.22 else 2
        for column in range(columns):
            x = left + width * (column + 0.5) / columns
            for y in np.arange(top + 0.05, ground - 0.10, 0.115):
                _paint_window(canvas, (x - 0.018, y, x + 0.018, y + 0.06), rng.random() < chance_lit)
        left += width + (rng.uniform(0.02, 0.08) if rng.random() < 0.4 else 0.0)


def _paint_tree(canvas: Canvas, x: float, ground: float, size: float, rng: Generator) -> None:
    leaves = _pick(rng, _LEAVES)
    canvas.limb(((x, ground), (x, ground - size * 0.5)), size * 0.10, _TRUNK)
    for dx, dy, radius in ((-0.10, 0.62, 0.24), (0.10, 0.60, 0.24), (0.0, 0.80, 0.27)):
        canvas.disc(x + dx * size, ground - dy * size, radius * size, leaves)


def _paint_lamp_post(canvas: Canvas, x: float, ground: float, is_lit: bool) -> None:
    canvas.limb(((x, ground), (x, ground - 0.36), (x + 0.03, ground - 0.38)), 0.012, (84, 88, 94))
    if is_lit:
        _glow(canvas.image, canvas.pixel((x + 0.03, ground - 0.37)), 0.17 * canvas.height)
        canvas = Canvas(canvas.image, canvas.box, FULL)
    canvas.oval(x + 0.03, ground - 0.375, 0.03, 0.015, _LIT if is_lit else (210, 210, 200))


def _glow(image: Image, center: tuple[float, float], radius: float) -> None:
    """Add warm light that falls off to nothing at `radius` pixels."""
    height, width = image.shape[:2]
    x1, y1 = max(0, int(center[0] - radius)), max(0, int(center[1] - radius))
    x2, y2 = min(width, int(center[0] + radius) + 1), min(height, int(center[1] + radius) + 1)
    if x1 >= x2 or y1 >= y2:
        return
    dx = (np.arange(x1, x2, dtype=np.float32) - center[0]) / radius
    dy = (np.arange(y1, y2, dtype=np.float32) - center[1]) / radius
    strength = np.clip(1 - np.hypot(dx[None, :], dy[:, None]), 0, 1) ** 2
    light = (strength[:, :, None] * np.array((40, 95, 120), np.float32)).astype(np.uint8)
    image[y1:y2, x1:x2] = cv2.add(image[y1:y2, x1:x2], light)


def _paint_street(canvas: Canvas, time_of_day: str, rng: Generator) -> None:
    _paint_sky(canvas, time_of_day, rng)
    _paint_houses(canvas, time_of_day, rng, 0.46)
    for _ in range(int(rng.integers(0, 3))):
        _paint_tree(canvas, rng.uniform(0, 1), 0.48, rng.uniform(0.26, 0.36), rng)
    canvas.rect(0, 0.45, 1, 0.565, (192, 188, 180))
    canvas.rect(0, 0.555, 1, 0.575, (150, 148, 146))
    canvas.rect(0, 0.575, 1, 0.90, _pick(rng, ((112, 114, 120), (100, 102, 108), (124, 122, 124))))
    offset = rng.uniform(0, 0.16)
    for x in np.arange(offset - 0.16, 1, 0.16):
        canvas.rect(x, 0.715, x + 0.08, 0.728, (220, 218, 206))
    canvas.rect(0, 0.90, 1, 0.92, (158, 156, 152))
    canvas.rect(0, 0.92, 1, 1, (196, 192, 184))
    _paint_lamp_post(canvas, rng.uniform(0.05, 0.45), 0.52, time_of_day != "day")
    _paint_lamp_post(canvas, rng.uniform(0.55, 0.92), 0.52, time_of_day != "day")


def _paint_park(canvas: Canvas, time_of_day: str, rng: Generator) -> None:
    _paint_sky(canvas, time_of_day, rng)
    hill = rng.uniform(0.2, 0.8)
    canvas.oval(hill, 0.52, 0.75, 0.20, (126, 164, 112))
    canvas.oval(hill - 0.5, 0.52, 0.6, 0.15, (116, 156, 106))
    canvas.rect(0, 0.44, 1, 1, _GRASS)
    bend = rng.uniform(0.1, 0.9)
    path = ((bend - 0.03, 0.44), (bend + 0.03, 0.44), (bend * 0.5 + 0.65, 1), (bend * 0.5 + 0.05, 1))
    canvas.polygon(path, (214, 198, 162))
    if rng.random() < 0.4:
        canvas.oval(rng.uniform(0.1, 0.9), 0.56, 0.30, 0.045, (120, 170, 196))
    for x in np.linspace(0.04, 0.96, 6):
        if rng.random() < 0.7:
            _paint_tree(canvas, x + rng.uniform(-0.05, 0.05), 0.47, rng.uniform(0.24, 0.40), rng)
    _paint_bench(canvas, rng.uniform(0.1, 0.8), 0.53)
    if time_of_day != "day":
        _paint_lamp_post(canvas, rng.uniform(0.1, 0.85), 0.52, True)


def _paint_bench(canvas: Canvas, x: float, ground: float) -> None:
    wood: RGB = (158, 116, 76)
    canvas.rect(x, ground - 0.085, x + 0.13, ground - 0.06, wood)
    canvas.rect(x, ground - 0.045, x + 0.13, ground - 0.025, wood)
    for foot in (x + 0.015, x + 0.115):
        canvas.limb(((foot, ground - 0.08), (foot, ground)), 0.014, (82, 70, 62))


def _paint_yard(canvas: Canvas, time_of_day: str, rng: Generator) -> None:
    _paint_sky(canvas, time_of_day, rng)
    canvas.rect(0, 0.25, 1, 0.48, (176, 150, 122))
    for x in np.arange(0, 1, 0.035):
        canvas.limb(((x, 0.25), (x, 0.47)), 0.010, (150, 124, 98))
    wall = _pick(rng, _WALLS)
    left = float(rng.choice((-0.05, 0.55)))
    canvas.rect(left, 0.02, left + 0.5, 0.50, wall)
    canvas.polygon(
        ((left - 0.02, 0.04), (left + 0.06, -0.1), (left + 0.44, -0.1), (left + 0.52, 0.04)), (146, 84, 70)
    )
    is_lit = time_of_day != "day" and rng.random() < 0.8
    for x in (left + 0.08, left + 0.34):
        canvas.rect(x - 0.008, 0.115, x + 0.088, 0.285, (240, 236, 228))
        _paint_window(canvas, (x, 0.13, x + 0.08, 0.27), is_lit)
    canvas.rect(left + 0.20, 0.15, left + 0.29, 0.49, (112, 88, 76))
    canvas.disc(left + 0.275, 0.33, 0.010, (220, 200, 120))
    canvas.rect(0, 0.48, 1, 1, _GRASS)
    canvas.rect(0, 0.56, 1, 0.86, _pick(rng, ((178, 172, 164), (168, 160, 156), (186, 176, 158))))
    for x in np.arange(rng.uniform(0, 0.12), 1, 0.12):
        canvas.limb(((x, 0.56), (x - 0.03, 0.86)), 0.006, (150, 146, 140))
    _paint_tree(canvas, 0.84 if left < 0 else 0.14, 0.49, rng.uniform(0.3, 0.4), rng)
    if is_lit:
        _glow(canvas.image, canvas.pixel((left + 0.245, 0.12)), 0.22 * canvas.height)


def _paint_room(canvas: Canvas, time_of_day: str, rng: Generator) -> None:
    canvas.rect(0, 0, 1, 0.52, _pick(rng, _ROOM_WALLS))
    floor = _pick(rng, ((190, 150, 108), (172, 134, 100), (182, 168, 152)))
    canvas.rect(0, 0.52, 1, 1, floor)
    canvas.rect(0, 0.50, 1, 0.53, (240, 236, 228))
    for y in (0.60, 0.70, 0.83):
        canvas.limb(((0, y), (1, y)), 0.005, (150, 116, 84))
    slots = [float(x) for x in rng.permutation((0.04, 0.29, 0.54, 0.79))]
    _paint_room_window(canvas, slots[0], time_of_day)
    _paint_sofa(canvas, slots[1] - 0.02, rng)
    _paint_picture(canvas, slots[2] + 0.04, rng)
    _paint_plant(canvas, slots[2] + 0.08)
    _paint_floor_lamp(canvas, slots[3] + 0.09, time_of_day)
    canvas.oval(rng.uniform(0.35, 0.65), 0.80, 0.55, 0.10, _pick(rng, ((182, 160, 168), (160, 176, 182))))


def _paint_room_window(canvas: Canvas, x: float, time_of_day: str) -> None:
    canvas.rect(x - 0.01, 0.08, x + 0.17, 0.40, (244, 242, 236))
    sky = SKIES[time_of_day]
    bright = Canvas(canvas.image, canvas.box, FULL)
    bright.rect(x, 0.10, x + 0.16, 0.24, sky[0])
    bright.rect(x, 0.24, x + 0.16, 0.38, sky[1])
    canvas.limb(((x + 0.08, 0.10), (x + 0.08, 0.38)), 0.02, (244, 242, 236))


def _paint_sofa(canvas: Canvas, x: float, rng: Generator) -> None:
    cloth = _pick(rng, ((150, 140, 150), (132, 146, 150), (164, 146, 128)))
    dark: RGB = (int(cloth[0] * 0.85), int(cloth[1] * 0.85), int(cloth[2] * 0.85))
    canvas.rect(x + 0.02, 0.34, x + 0.20, 0.50, cloth)
    canvas.rect(x + 0.01, 0.46, x + 0.21, 0.56, dark)
    for side in (x, x + 0.19):
        canvas.rect(side, 0.41, side + 0.03, 0.57, cloth)


def _paint_picture(canvas: Canvas, x: float, rng: Generator) -> None:
    canvas.rect(x, 0.12, x + 0.11, 0.27, (120, 92, 66))
    canvas.rect(x + 0.01, 0.14, x + 0.10, 0.25, _pick(rng, ((186, 200, 206), (208, 196, 170))))
    canvas.polygon(((x + 0.01, 0.25), (x + 0.045, 0.18), (x + 0.10, 0.25)), (140, 160, 140))


def _paint_plant(canvas: Canvas, x: float) -> None:
    for dx, dy in ((-0.035, 0.34), (0.0, 0.31), (0.035, 0.35)):
        canvas.limb(((x, 0.47), (x + dx, dy)), 0.022, (96, 140, 90))
    canvas.polygon(((x - 0.03, 0.45), (x + 0.03, 0.45), (x + 0.02, 0.55), (x - 0.02, 0.55)), (184, 118, 84))


def _paint_floor_lamp(canvas: Canvas, x: float, time_of_day: str) -> None:
    is_lit = time_of_day != "day"
    canvas.limb(((x, 0.55), (x, 0.22)), 0.012, (96, 84, 74))
    if is_lit:
        _glow(canvas.image, canvas.pixel((x, 0.2)), 0.30 * canvas.height)
        canvas = Canvas(canvas.image, canvas.box, FULL)
    shade = ((x - 0.02, 0.12), (x + 0.02, 0.12), (x + 0.04, 0.22), (x - 0.04, 0.22))
    canvas.polygon(shade, _LIT if is_lit else (232, 222, 196))


def _pick(rng: Generator, options: Sequence[RGB]) -> RGB:
    return options[int(rng.integers(len(options)))]


_PAINT: dict[str, Callable[[Canvas, str, Generator], None]] = {
    "street": _paint_street,
    "park": _paint_park,
    "yard": _paint_yard,
    "room": _paint_room,
}
