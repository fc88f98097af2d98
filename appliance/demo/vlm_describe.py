"""Descriptions of a scene and what a detector might say of it, true or not."""

from collections.abc import Sequence

import numpy as np

from appliance.demo.questions import LABELS, VEHICLES, at, counted, listed, of_label, plural
from appliance.prompts import DEFAULT_INSTRUCTION, detection_line
from vision.scenes import Scene, SceneObject

INSTRUCTIONS = (
    DEFAULT_INSTRUCTION,
    DEFAULT_INSTRUCTION,
    DEFAULT_INSTRUCTION,
    "Describe this frame in one sentence.",
    "Describe the picture.",
    "Describe the image.",
    "Describe what you see.",
    "What do you see?",
    "What is in this picture?",
    "What is happening here?",
    "Tell me what the camera sees.",
    "Describe this camera frame.",
    "What can you see in this image?",
    "Describe the scene briefly.",
)
TIMES = {"day": "by day", "dusk": "at dusk", "night": "at night"}
STRAY_LABELS = ("traffic light", "handbag", "chair", "bench", "cat", "motorcycle", "backpack", "potted plant")


def describe(scene: Scene) -> str:
    """Describe a scene in one or two short sentences: place, time, every count, then two details."""
    groups = [(label, of_label(scene, label)) for label in LABELS]
    groups = [(label, objects) for label, objects in groups if objects]
    when = TIMES[scene.time_of_day]
    if not groups:
        return f"An empty {scene.place} {when}."
    counts = listed([counted(label, len(objects)) for label, objects in groups])
    details = " and ".join(_detail(label, objects) for label, objects in groups[:2])
    return f"A {scene.place} {when} with {counts}. {details[0].upper()}{details[1:]}."


def _detail(label: str, objects: Sequence[SceneObject]) -> str:
    """Say of one thing its place and colour, of several only where they are."""
    if len(objects) == 1:
        return _single(label, objects[0])
    positions = list(dict.fromkeys(o.position for o in objects))
    name = plural(label)
    if len(positions) == 1:
        return f"{'both' if len(objects) == 2 else 'all'} {name} are {at(positions[0])}"
    return f"the {name} are {listed([at(p) for p in positions])}"


def _single(label: str, item: SceneObject) -> str:
    if label == "person":
        return f"the person {at(item.position)} wears {item.color}"
    if label in VEHICLES:
        return f"the {label} {at(item.position)} has the colour {item.color}"
    return f"the {label} is {at(item.position)}"


def true_detections(scene: Scene) -> tuple[list[str], list[float]]:
    """Labels and box centres (fractions of the width) of all objects."""
    centers = [(o.box[0] + o.box[2]) / 2 / scene.width for o in scene.objects]
    return [o.label for o in scene.objects], centers


def noisy_detections(rng: np.random.Generator, scene: Scene) -> tuple[list[str], list[float]]:
    """What a poor detector says: some objects missed, some mixed up, some invented, all shifted a little."""
    labels, centers = [], []
    for label, x in zip(*true_detections(scene), strict=True):
        if rng.random() < 0.12:
            continue
        labels.append(str(rng.choice(VEHICLES)) if label in VEHICLES and rng.random() < 0.1 else label)
        centers.append(float(np.clip(x + rng.normal(0, 0.015), 0, 1)))
    if rng.random() < 0.15:
        labels.append(str(rng.choice(LABELS if rng.random() < 0.7 else STRAY_LABELS)))
        centers.append(float(rng.random()))
    return labels, centers


def training_line(rng: np.random.Generator, scene: Scene) -> str:
    """Draw the detection line of a training prompt: true, noisy, falsely nothing, or left out (``""``)."""
    draw = rng.random()
    if draw < 0.5:
        return detection_line(*true_detections(scene))
    if draw < 0.75:
        return detection_line(*noisy_detections(rng, scene))
    return "Detected: nothing." if draw < 0.8 else ""
