"""Rendered camera scenes that know their ground truth: for demos, training and tests."""

from vision.scenes.painter import render
from vision.scenes.sampling import sample_scene
from vision.scenes.scene import LABELS, PLACES, TIMES_OF_DAY, VEHICLES, Scene, SceneObject
from vision.scenes.stream import SceneStream

__all__ = [
    "LABELS",
    "PLACES",
    "TIMES_OF_DAY",
    "VEHICLES",
    "Scene",
    "SceneObject",
    "SceneStream",
    "render",
    "sample_scene",
]
