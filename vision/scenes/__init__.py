"""Rendered camera scenes that know their ground truth, for demos, training and tests: numpy and OpenCV only."""

from vision.scenes.painter import render
from vision.scenes.sampling import sample_scene
from vision.scenes.scene import LABELS, PLACES, TIMES_OF_DAY, VEHICLES, Scene, SceneObject

__all__ = ["LABELS", "PLACES", "TIMES_OF_DAY", "VEHICLES", "Scene", "SceneObject", "render", "sample_scene"]
