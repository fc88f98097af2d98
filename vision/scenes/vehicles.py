"""Cars, buses and trucks from the side, nose to the right, drawn to fill their box."""

from vision.scenes.canvas import Canvas
from vision.scenes.palette import COLORS, FULL, RGB

_TIRE: RGB = (28, 28, 32)
_RIM: RGB = (178, 180, 186)
_GLASS: RGB = (136, 184, 206)
_DARK_GLASS: RGB = (60, 76, 92)
_SKIN: RGB = (226, 178, 140)
_LAMP: RGB = (255, 246, 170)


def draw_vehicle(canvas: Canvas, label: str, color: str, action: str | None) -> None:
    """A vehicle; a driving one has a driver, bright windows and lit lamps."""
    _DRAW[label](canvas, COLORS[color], action == "driving")


def _shade(color: RGB, factor: float = 0.78) -> RGB:
    return (int(color[0] * factor), int(color[1] * factor), int(color[2] * factor))


def _draw_wheels(canvas: Canvas, radius: float, *positions: float) -> None:
    for x in positions:
        canvas.disc(x, 1 - radius, radius, _TIRE)
        canvas.disc(x, 1 - radius, radius * 0.52, _RIM)
        canvas.disc(x, 1 - radius, radius * 0.16, _TIRE)


def _draw_lamps(canvas: Canvas, y: float, is_driving: bool) -> None:
    rear = (250, 60, 50) if is_driving else (130, 30, 30)
    canvas.rect(0.005, y - 0.06, 0.035, y + 0.06, rear)
    if is_driving:
        canvas = Canvas(canvas.image, canvas.box, FULL, canvas.mirrored)
        canvas.disc(0.96, y, 0.08, _LAMP)
        canvas.disc(0.965, y, 0.05, (255, 255, 236))
    else:
        canvas.oval(0.965, y, 0.05, 0.06, (206, 206, 200))


def _draw_driver(canvas: Canvas, x: float, y: float, size: float) -> None:
    canvas.disc(x, y + size * 1.6, size * 1.15, (70, 70, 96))
    canvas.disc(x, y, size, _SKIN)


def _draw_car(canvas: Canvas, body: RGB, is_driving: bool) -> None:
    glass = _GLASS if is_driving else _DARK_GLASS
    canvas.polygon(((0.15, 0.46), (0.27, 0.03), (0.34, 0.0), (0.62, 0.0), (0.68, 0.04), (0.82, 0.46)), body)
    hull = ((0.0, 0.52), (0.03, 0.43), (0.16, 0.40), (0.80, 0.40), (0.96, 0.47), (1.0, 0.58), (1.0, 0.80))
    canvas.polygon((*hull, (0.98, 0.84), (0.02, 0.84), (0.0, 0.78)), body)
    canvas.polygon(((0.22, 0.42), (0.31, 0.09), (0.46, 0.09), (0.46, 0.42)), glass)
    canvas.polygon(((0.50, 0.42), (0.50, 0.09), (0.62, 0.09), (0.74, 0.42)), glass)
    if is_driving:
        _draw_driver(canvas, 0.57, 0.23, 0.09)
        canvas.rect(0.50, 0.40, 0.76, 0.60, body)
    canvas.rect(0.0, 0.73, 1.0, 0.84, _shade(body))
    canvas.limb(((0.48, 0.44), (0.48, 0.74)), 0.03, _shade(body))
    canvas.limb(((0.52, 0.52), (0.58, 0.52)), 0.04, _shade(body, 0.6))
    _draw_wheels(canvas, 0.225, 0.22, 0.78)
    _draw_lamps(canvas, 0.57, is_driving)


def _draw_bus(canvas: Canvas, body: RGB, is_driving: bool) -> None:
    glass = _GLASS if is_driving else _DARK_GLASS
    hull = ((0.0, 0.06), (0.02, 0.0), (0.95, 0.0), (0.99, 0.08), (1.0, 0.86), (0.0, 0.86))
    canvas.polygon(hull, body)
    for index in range(5):
        left = 0.05 + 0.145 * index
        canvas.rect(left, 0.14, left + 0.115, 0.44, glass)
    canvas.rect(0.785, 0.14, 0.865, 0.82, glass)
    canvas.limb(((0.825, 0.14), (0.825, 0.82)), 0.02, _shade(body))
    canvas.polygon(((0.905, 0.14), (0.97, 0.14), (1.0, 0.46), (0.905, 0.46)), glass)
    if is_driving:
        _draw_driver(canvas, 0.94, 0.27, 0.06)
        canvas.rect(0.905, 0.43, 1.0, 0.56, body)
    canvas.rect(0.0, 0.52, 0.77, 0.58, _shade(body))
    canvas.rect(0.0, 0.79, 1.0, 0.86, _shade(body, 0.65))
    _draw_wheels(canvas, 0.15, 0.18, 0.70)
    _draw_lamps(canvas, 0.66, is_driving)


def _draw_truck(canvas: Canvas, body: RGB, is_driving: bool) -> None:
    glass = _GLASS if is_driving else _DARK_GLASS
    canvas.rect(0.02, 0.74, 0.96, 0.84, (70, 72, 78))
    canvas.rect(0.0, 0.0, 0.665, 0.76, body)
    for x in (0.13, 0.265, 0.40, 0.535):
        canvas.limb(((x, 0.05), (x, 0.70)), 0.02, _shade(body))
    canvas.rect(0.0, 0.70, 0.665, 0.76, _shade(body, 0.65))
    cab = ((0.715, 0.80), (0.715, 0.20), (0.74, 0.16), (0.89, 0.16), (0.955, 0.46), (1.0, 0.52), (1.0, 0.84))
    canvas.polygon((*cab, (0.715, 0.84)), body)
    canvas.polygon(((0.77, 0.46), (0.77, 0.23), (0.87, 0.23), (0.925, 0.46)), glass)
    if is_driving:
        _draw_driver(canvas, 0.82, 0.33, 0.065)
        canvas.rect(0.76, 0.45, 0.94, 0.60, body)
    canvas.rect(0.715, 0.75, 1.0, 0.84, _shade(body, 0.65))
    _draw_wheels(canvas, 0.155, 0.13, 0.33, 0.84)
    _draw_lamps(canvas, 0.63, is_driving)


_DRAW = {"car": _draw_car, "bus": _draw_bus, "truck": _draw_truck}
