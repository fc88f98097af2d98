"""People, dogs and bicycles, drawn to fill their box."""

from dataclasses import dataclass

from vision.scenes.canvas import Canvas, Point
from vision.scenes.palette import COATS, COLORS, FULL, HAIRS, RGB, SKINS, TROUSERS

_SHOE: RGB = (44, 38, 38)
_RUBBER: RGB = (34, 34, 38)


@dataclass(frozen=True, slots=True)
class Look:
    """What differs between two objects of one kind and is not in the ground truth."""

    skin: int = 0
    hair: int = 0
    trousers: int = 0
    coat: int = 0
    mirrored: bool = False


def draw_person(canvas: Canvas, color: str, action: str | None, look: Look) -> None:
    """A person from the front when standing, from the side with a stride as wide as the box when walking."""
    if action == "walking":
        _draw_walker(canvas, COLORS[color], look)
    else:
        _draw_stander(canvas, COLORS[color], look)
    _draw_head(canvas, look, action == "walking")


def _draw_head(canvas: Canvas, look: Look, from_side: bool) -> None:
    skin, hair = SKINS[look.skin % len(SKINS)], HAIRS[look.hair % len(HAIRS)]
    x = 0.5 + (0.015 / canvas.aspect if from_side else 0.0)
    canvas.disc(x, 0.092, 0.092, hair)
    if from_side:
        canvas.oval(x + 0.026 / canvas.aspect, 0.108, 0.066, 0.074, skin)
        return
    canvas.oval(x, 0.112, 0.070, 0.070, skin)
    if look.hair % 3 == 1:
        for side in (-1, 1):
            canvas.limb(_from_center(canvas, (side * 0.078, 0.08), (side * 0.080, 0.18)), 0.035, hair)
    for side in (-1, 1):
        canvas.disc(x + side * 0.026 / canvas.aspect, 0.108, 0.010, _SHOE)


def _draw_stander(canvas: Canvas, shirt: RGB, look: Look) -> None:
    skin, trousers = SKINS[look.skin % len(SKINS)], TROUSERS[look.trousers % len(TROUSERS)]
    edge = canvas.aspect / 2
    for side in (-1, 1):
        canvas.limb(_from_center(canvas, (side * 0.062, 0.56), (side * 0.066, 0.95)), 0.092, trousers)
        canvas.oval(0.5 + side * 0.076 / canvas.aspect, 0.972, 0.056, 0.028, _SHOE)
        hand = (side * (edge - 0.034), 0.53)
        canvas.disc(0.5 + hand[0] / canvas.aspect, hand[1] + 0.02, 0.032, skin)
        canvas.limb(_from_center(canvas, (side * 0.105, 0.245), hand), 0.066, _shade(shirt))
    canvas.limb(_from_center(canvas, (0, 0.17), (0, 0.22)), 0.06, skin)
    _draw_torso(canvas, shirt, 0.128)


def _draw_walker(canvas: Canvas, shirt: RGB, look: Look) -> None:
    skin, trousers = SKINS[look.skin % len(SKINS)], TROUSERS[look.trousers % len(TROUSERS)]
    stride = canvas.aspect / 2 - 0.055
    reach = min(stride, 0.19)
    back, front = (-stride, 0.925), (stride - 0.015, 0.955)
    canvas.limb(_from_center(canvas, (0, 0.25), (-reach * 0.75, 0.37), (-reach, 0.47)), 0.062, _shade(shirt))
    canvas.disc(0.5 - reach / canvas.aspect, 0.49, 0.030, skin)
    canvas.limb(_from_center(canvas, (0, 0.55), (-stride * 0.35, 0.74), back), 0.088, _shade(trousers))
    canvas.oval(0.5 + (back[0] + 0.01) / canvas.aspect, 0.955, 0.058, 0.030, _SHOE)
    canvas.limb(_from_center(canvas, (0, 0.55), (stride * 0.62, 0.74), front), 0.094, trousers)
    canvas.oval(0.5 + (front[0] + 0.012) / canvas.aspect, 0.972, 0.058, 0.028, _SHOE)
    canvas.limb(_from_center(canvas, (0, 0.17), (0, 0.22)), 0.06, skin)
    _draw_torso(canvas, shirt, 0.105)
    canvas.disc(0.5 + (reach + 0.01) / canvas.aspect, 0.46, 0.030, skin)
    canvas.limb(_from_center(canvas, (0, 0.26), (reach * 0.35, 0.39), (reach, 0.45)), 0.062, _shade(shirt))


def _draw_torso(canvas: Canvas, shirt: RGB, half: float) -> None:
    hip, neck = half * 0.86, half * 0.55
    outline = ((-neck, 0.195), (neck, 0.195), (half, 0.235), (hip, 0.585), (-hip, 0.585), (-half, 0.235))
    canvas.polygon(_from_center(canvas, *outline), shirt)


def _from_center(canvas: Canvas, *points: Point) -> list[Point]:
    """Points whose x is in heights from the middle of the box."""
    return [(0.5 + x / canvas.aspect, y) for x, y in points]


def _shade(color: RGB) -> RGB:
    return (int(color[0] * 0.84), int(color[1] * 0.84), int(color[2] * 0.84))


def draw_dog(canvas: Canvas, look: Look) -> None:
    """A dog from the side, nose to the right."""
    # why: a black dog in the dark is hard for people too
    coats = COATS if canvas.light == FULL else COATS[:-1]
    coat = coats[look.coat % len(coats)]
    dark = _shade(coat)
    for x, y in ((0.27, 0.93), (0.66, 0.93)):
        canvas.limb(((x + 0.05, 0.60), (x + 0.05, y)), 0.10, dark)
        canvas.limb(((x - 0.04, 0.60), (x - 0.04, y)), 0.11, coat)
    canvas.limb(((0.20, 0.46), (0.09, 0.30), (0.05, 0.12)), 0.09, coat)
    canvas.oval(0.44, 0.52, 0.26 * canvas.aspect, 0.18, coat)
    canvas.polygon(((0.58, 0.40), (0.70, 0.16), (0.86, 0.30), (0.70, 0.62)), coat)
    canvas.disc(0.78, 0.25, 0.175, coat)
    canvas.oval(0.89, 0.31, 0.12, 0.09, coat)
    canvas.disc(0.965, 0.27, 0.045, _SHOE)
    canvas.oval(0.71, 0.20, 0.075, 0.18, dark)
    canvas.disc(0.81, 0.19, 0.035, _SHOE)
    canvas.limb(((0.665, 0.42), (0.735, 0.48)), 0.07, COLORS["red"])


def draw_bicycle(canvas: Canvas, look: Look) -> None:
    """A bicycle from the side, handlebar to the right."""
    frame = tuple(COLORS.values())[look.coat % 5]
    wheel = min(0.33, 0.245 * canvas.aspect)
    left, right, axle = wheel / canvas.aspect, 1 - wheel / canvas.aspect, 1 - wheel
    for x in (left, right):
        canvas.ring(x, axle, wheel, 0.075, _RUBBER)
        for dx, dy in ((0.7, 0.0), (0.0, 0.7), (0.5, 0.5), (0.5, -0.5)):
            reach = wheel * dx / canvas.aspect
            spoke = ((x - reach, axle - wheel * dy), (x + reach, axle + wheel * dy))
            canvas.limb(spoke, 0.012, (170, 170, 176))
    crank, seat, head = (0.46, axle + 0.01), (0.37, 0.30), (0.70, 0.24)
    canvas.limb(((left, axle), seat, crank, (left, axle)), 0.062, frame)
    canvas.limb((seat, (0.715, 0.30), crank), 0.066, frame)
    canvas.limb((head, (right, axle)), 0.062, frame)
    canvas.limb((seat, (0.355, 0.17)), 0.045, _RUBBER)
    canvas.limb(((0.29, 0.13), (0.42, 0.13)), 0.09, _RUBBER)
    canvas.limb(((0.62, 0.05), (0.685, 0.07), head), 0.06, _RUBBER)
    canvas.disc(crank[0], crank[1], 0.055, _RUBBER)
