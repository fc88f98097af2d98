"""From a scene to its picture."""

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from vision.scenes.backdrops import draw_backdrop
from vision.scenes.camera import expose, sample_camera
from vision.scenes.canvas import Canvas, Image
from vision.scenes.figures import Look, draw_bicycle, draw_dog, draw_person
from vision.scenes.palette import OBJECT_LIGHT
from vision.scenes.scene import Scene, SceneObject
from vision.scenes.vehicles import draw_vehicle


def render(scene: Scene, rng: Generator) -> Image:
    """Draw a scene: uint8 [H, W, 3] BGR, the same for the same numbers from `rng`.

    What the scene leaves open (backdrop, faces, directions, the camera) comes from `rng`.
    """
    image = draw_backdrop(scene, rng)
    looks = [sample_look(rng) for _ in scene.objects]
    draw_objects(image, scene.objects, looks, scene.time_of_day)
    return expose(image, sample_camera(rng), rng)


def sample_look(rng: Generator) -> Look:
    """A random appearance."""
    skin, hair, trousers, coat, side = (int(v) for v in rng.integers(0, 60, 5))
    return Look(skin, hair, trousers, coat, mirrored=side % 2 == 1)


def draw_objects(
    image: Image, objects: Sequence[SceneObject], looks: Sequence[Look], time_of_day: str
) -> None:
    """Draw objects into an image in place, the far ones first; one look per object."""
    order = sorted(range(len(objects)), key=lambda i: objects[i].box[3])
    for index in order:
        _draw_object(image, objects[index], looks[index], time_of_day)


def _draw_object(image: Image, item: SceneObject, look: Look, time_of_day: str) -> None:
    canvas = Canvas(image, item.box, OBJECT_LIGHT[time_of_day], look.mirrored)
    _draw_shadow(canvas)
    if item.label == "person":
        draw_person(canvas, item.color or "blue", item.action, look)
    elif item.label == "dog":
        draw_dog(canvas, look)
    elif item.label == "bicycle":
        draw_bicycle(canvas, look)
    else:
        draw_vehicle(canvas, item.label, item.color or "blue", item.action)


def _draw_shadow(canvas: Canvas) -> None:
    """Darken a flat ellipse under the object."""
    x1, _, x2, y2 = canvas.box
    ry = max(2.0, 0.035 * canvas.height)
    left, top = max(0, int(x1)), max(0, int(y2 - ry))
    patch = canvas.image[top : int(y2 + ry) + 1, left : max(left, int(x2) + 1)]
    if not patch.size:
        return
    rows = (np.arange(patch.shape[0], dtype=np.float32) + top - y2) / ry
    columns = (np.arange(patch.shape[1], dtype=np.float32) + left - (x1 + x2) / 2) / ((x2 - x1) / 2)
    inside = rows[:, None] ** 2 + columns[None, :] ** 2 < 1
    patch[inside] = (patch[inside].astype(np.uint16) * 11 // 16).astype(np.uint8)
