"""Colours by name, and how daylight, dusk and night tint them."""

from dataclasses import dataclass

RGB = tuple[int, int, int]

COLORS: dict[str, RGB] = {
    "red": (212, 36, 40),
    "blue": (38, 84, 214),
    "green": (34, 158, 66),
    "yellow": (250, 216, 44),
    "orange": (250, 128, 20),
    "white": (246, 246, 244),
    "black": (30, 30, 34),
}
SKINS: tuple[RGB, ...] = ((250, 212, 180), (228, 178, 138), (172, 118, 80), (122, 80, 54))
HAIRS: tuple[RGB, ...] = ((46, 34, 28), (110, 70, 38), (206, 160, 84), (150, 146, 144))
TROUSERS: tuple[RGB, ...] = ((62, 66, 84), (98, 84, 72), (128, 122, 116), (70, 84, 112))
COATS: tuple[RGB, ...] = ((146, 92, 46), (206, 162, 104), (232, 222, 206), (52, 44, 42))


@dataclass(frozen=True, slots=True)
class Light:
    """How bright red, green and blue are seen, 1 as they are."""

    red: float = 1.0
    green: float = 1.0
    blue: float = 1.0

    def tint(self, color: RGB) -> tuple[int, int, int]:
        """An RGB colour as the BGR that this light shows."""
        return (
            min(255, int(color[2] * self.blue)),
            min(255, int(color[1] * self.green)),
            min(255, int(color[0] * self.red)),
        )


FULL = Light()
# why: what stands in front is tinted less than the backdrop, so that its colour can be told at night too
BACKDROP_LIGHT = {"day": FULL, "dusk": Light(0.86, 0.64, 0.66), "night": Light(0.27, 0.31, 0.45)}
OBJECT_LIGHT = {"day": FULL, "dusk": Light(0.96, 0.84, 0.80), "night": Light(0.80, 0.80, 0.86)}
SKIES: dict[str, tuple[RGB, RGB]] = {
    "day": ((104, 174, 236), (208, 234, 250)),
    "dusk": ((92, 70, 132), (250, 156, 84)),
    "night": ((8, 12, 32), (26, 36, 72)),
}
