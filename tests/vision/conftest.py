"""Models for the tests of this package: real ones from the media folder, tiny ones made on the spot."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from vision.detector import Detector, DetectorConfig
from vision.types import Image
from vision.ultralytics_quiet import import_ultralytics


@pytest.fixture(scope="session")
def bus() -> Image:
    """The street scene that ultralytics brings: a bus and four people, [1080, 810, 3]."""
    from ultralytics.utils import ASSETS

    return np.asarray(cv2.imread(str(ASSETS / "bus.jpg")), np.uint8)


@pytest.fixture(scope="session")
def yolo26n_640(media: Path) -> Detector:
    """The real YOLO26n, COCO, end-to-end head, batch 1, input 640×640."""
    pytest.importorskip("ai_edge_litert", reason="the extra `test` brings the runtime of .tflite models")
    return Detector(DetectorConfig(str(media / "yolo26n_int8_640.tflite")))


@pytest.fixture(scope="session")
def untrained() -> Any:
    """A YOLO26n with random weights that react to the picture, as an ultralytics model."""
    yolo = import_ultralytics().YOLO("yolo26n.yaml")
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        for module in yolo.model.modules():
            if isinstance(module, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(module.weight)
        head = yolo.model.model[-1]
        for branch in (*head.cv2, *head.cv3, *head.one2one_cv2, *head.one2one_cv3):
            branch[-1].weight.data *= 30
    yolo.model.names = {i: f"thing {i}" for i in range(80)}
    return yolo


@pytest.fixture(scope="session")
def untrained_pt(untrained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "untrained.pt"
    untrained.save(path)
    return path
