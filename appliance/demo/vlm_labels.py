"""What each picture token should know of a scene: the targets of the tower's warm-up.

A 448x256 frame has 14x8 merged tokens of 32x32 pixels. A token's row of CHANNELS numbers in 0..1
says which objects cover it, which have their centre in it, in which colours, and where and when
the scene is. The same rows, blurred into noisy logits, stand for the picture while the text half
learns alone.
"""

import numpy as np
from numpy.typing import NDArray

from appliance.demo.questions import LABELS, POSITIONS, VEHICLES
from vision.scenes import PLACES, TIMES_OF_DAY, Scene, SceneObject

COLORS = ("red", "blue", "green", "yellow", "orange", "white", "black")
CELL = 32
_NAMES = (
    *(f"cover {v}" for v in LABELS),
    *(f"centre {v}" for v in LABELS),
    *(f"second {v}" for v in ("person", "thing")),
    *(f"clothes {v}" for v in COLORS),
    *(f"body {v}" for v in COLORS),
    *(f"object {v}" for v in POSITIONS),
    *(f"action {v}" for v in ("standing", "walking", "driving", "parked")),
    *(f"time {v}" for v in TIMES_OF_DAY),
    *(f"place {v}" for v in PLACES),
    *(f"token {v}" for v in POSITIONS),
)
INDEX = {name: i for i, name in enumerate(_NAMES)}
CHANNELS = len(_NAMES)
Floats = NDArray[np.float32]


def channel_weights() -> Floats:
    """Loss weight of each channel: what a count and an answer hang on weighs more."""
    weights = np.ones(CHANNELS, np.float32)
    for name, i in INDEX.items():
        kind = name.split()[0]
        weights[i] = {
            "centre": 4.0,
            "object": 2.0,
            "clothes": 2.0,
            "body": 2.0,
            "time": 0.3,
            "place": 0.3,
        }.get(kind, 1.0)
        weights[i] = 0.1 if kind == "token" else weights[i]
    return weights


def label_tokens(scene: Scene) -> Floats:
    """Targets of a scene: float32 [rows * columns, CHANNELS], row by row."""
    rows, columns = scene.height // CELL, scene.width // CELL
    grid = np.zeros((rows, columns, CHANNELS), np.float32)
    grid[..., INDEX[f"time {scene.time_of_day}"]] = 1
    grid[..., INDEX[f"place {scene.place}"]] = 1
    thirds = ((np.arange(columns) + 0.5) * 3 / columns).astype(int)
    for column, third in enumerate(thirds):
        grid[:, column, INDEX[f"token {POSITIONS[third]}"]] = 1
    for item in sorted(scene.objects, key=lambda o: o.box[3]):
        _mark(grid, item)
    return grid.reshape(rows * columns, CHANNELS)


def _mark(grid: Floats, item: SceneObject) -> None:
    """Write one object; a nearer one is written later and its colour wins."""
    x1, y1, x2, y2 = (v / CELL for v in item.box)
    rows, columns = grid.shape[:2]
    area = grid[_span(y1, y2, rows), _span(x1, x2, columns)]
    area[..., INDEX[f"cover {item.label}"]] = 1
    cell = grid[min(rows - 1, int((y1 + y2) / 2)), min(columns - 1, int((x1 + x2) / 2))]
    if item.color:
        part = "body" if item.label in VEHICLES else "clothes"
        first = INDEX[f"{part} red"]
        area[..., first : first + len(COLORS)] = 0
        area[..., INDEX[f"{part} {item.color}"]] = 1
        cell[INDEX[f"{part} {item.color}"]] = 1
    if item.action:
        area[..., INDEX[f"action {item.action}"]] = 1
        cell[INDEX[f"action {item.action}"]] = 1
    if cell[INDEX[f"centre {item.label}"]]:
        cell[INDEX["second person" if item.label == "person" else "second thing"]] = 1
    cell[INDEX[f"centre {item.label}"]] = 1
    cell[INDEX[f"object {item.position}"]] = 1


def _span(low: float, high: float, count: int) -> slice:
    """Cells at least half covered by low..high (in cells), one at least."""
    first = min(count - 1, max(0, round(low)))
    return slice(first, min(count, max(first + 1, round(high))))


def blurred_logits(rng: np.random.Generator, labels: Floats, blur: float = 0.4) -> Floats:
    """Labels as a trained but fallible tower would tell them: noisy logits of the same shape."""
    sharpness = rng.uniform(2.5, 4.5, (labels.shape[0], 1, 1)).astype(np.float32)
    noise = rng.normal(0, blur, labels.shape).astype(np.float32)
    logits: Floats = np.clip((2 * labels - 1) * sharpness + noise, -6, 6).astype(np.float32)
    return logits
