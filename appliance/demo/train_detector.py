"""Train the demo detector: YOLO26n on endless rendered scenes, seeded, on one CPU core.

    python -m appliance.demo.train_detector --out yolo26n-scenes.pt

Every picture is rendered for its step and never seen again, at the size the demo cameras deliver.
"""

import argparse
import logging
import math
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor, nn
from ultralytics import __version__ as ultralytics_version
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils import DEFAULT_CFG_DICT, ROOT, YAML

from vision.scenes import Scene, render, sample_scene
from vision.scenes.canvas import Image
from vision.scenes.scene import area

log = logging.getLogger(__name__)
COCO_IDS = {"person": 0, "bicycle": 1, "car": 2, "bus": 5, "truck": 7, "dog": 16}
_MIN_VISIBLE = 0.3


@dataclass(frozen=True)
class TrainConfig:
    """How long and how fast: `batch` pictures of `size` (width, height) pixels a step.

    lr rises over `warmup` steps, then falls to 0.
    """

    steps: int = 1100
    batch: int = 16
    size: tuple[int, int] = (448, 256)
    lr: float = 2e-3
    weight_decay: float = 5e-4
    warmup: int = 50
    ema: float = 0.995
    seed: int = 26


def coco_names() -> dict[int, str]:
    """The 80 COCO class names by id."""
    return dict(YAML.load(ROOT / "cfg/datasets/coco.yaml")["names"])


def truth_of(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """COCO class ids int64 [n] and boxes float32 [n, 4] xyxy pixels of a scene."""
    ids = np.array([COCO_IDS[o.label] for o in scene.objects], np.int64)
    boxes = np.array([o.box for o in scene.objects], np.float32).reshape(-1, 4)
    return ids, boxes


def shift_and_zoom(
    rng: Generator, image: Image, ids: np.ndarray, boxes: np.ndarray
) -> tuple[Image, np.ndarray, np.ndarray]:
    """Zoom by 0.75-1.35 and shift, so that the border cuts objects; what is mostly cut is dropped."""
    height, width = image.shape[:2]
    zoom = float(np.exp(rng.uniform(np.log(0.75), np.log(1.35))))
    dx, dy = rng.uniform(-0.2, 0.2) * width, rng.uniform(-0.12, 0.12) * height
    offset = np.array((width / 2 * (1 - zoom) + dx, height / 2 * (1 - zoom) + dy), np.float32)
    matrix = np.array([[zoom, 0, offset[0]], [0, zoom, offset[1]]], np.float64)
    fill = tuple(int(v) for v in rng.integers(60, 160, 3))
    warped = cv2.warpAffine(image, matrix, (width, height), borderValue=fill)
    moved = boxes * zoom + np.tile(offset, 2)
    cut = np.clip(moved, 0, (width, height, width, height)).astype(np.float32)
    share = [area(tuple(c)) / area(tuple(m)) for c, m in zip(cut, moved, strict=True)]
    kept = np.array(share, np.float32) > _MIN_VISIBLE
    return warped, ids[kept], cut[kept]


def make_batch(rng: Generator, config: TrainConfig) -> dict[str, Tensor]:
    """One batch as the YOLO loss wants it.

    img: float32 [B, 3, H, W] RGB 0..1. cls: [n, 1]. bboxes: [n, 4] centre and size, 0..1. batch_idx: [n].
    """
    images, ids, boxes, owners = [], [], [], []
    for index in range(config.batch):
        scene = sample_scene(rng, size=config.size)
        sample = (render(scene, rng), *truth_of(scene))
        if rng.random() < 0.6:
            sample = shift_and_zoom(rng, *sample)
        images.append(sample[0][:, :, ::-1])
        ids.append(sample[1])
        boxes.append(sample[2])
        owners += [index] * len(sample[1])
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return {
        "img": pixels.float().div(255).contiguous(memory_format=torch.channels_last),
        "cls": torch.from_numpy(np.concatenate(ids)).float()[:, None],
        "bboxes": _relative(np.concatenate(boxes), config.size),
        "batch_idx": torch.tensor(owners, dtype=torch.float32),
    }


def _relative(boxes: np.ndarray, size: tuple[int, int]) -> Tensor:
    corners = torch.from_numpy(boxes) / torch.tensor((*size, *size))
    low, high = corners[:, :2], corners[:, 2:]
    return torch.cat(((low + high) / 2, high - low), 1)


def build_model() -> DetectionModel:
    """An untrained YOLO26n with the 80 COCO classes."""
    model = DetectionModel("yolo26n.yaml", ch=3, nc=80, verbose=False)
    model.names = coco_names()
    model.args = get_cfg(overrides={"epochs": 100})
    model.task = "detect"
    return model.to(memory_format=torch.channels_last)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW that leaves biases and norms undecayed."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, config.lr, betas=(0.937, 0.999), weight_decay=config.weight_decay)


def rate(step: int, config: TrainConfig) -> float:
    """Learning rate of a step: a linear rise, then half a cosine down to 0."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (1 + math.cos(math.pi * done)) / 2


def train(config: TrainConfig) -> Iterator[tuple[int, DetectionModel]]:
    """Train and yield (steps done, averaged model) after each twentieth of the steps and at the end."""
    torch.manual_seed(config.seed)
    rng = np.random.default_rng(config.seed)
    model = build_model().train()
    average = deepcopy(model).eval().requires_grad_(False)
    optimizer = make_optimizer(model, config)
    report = max(1, config.steps // 20)
    started = time.monotonic()
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, config)
        items = _train_step(model, optimizer, make_batch(rng, config))
        _follow(average, model, min(config.ema, (step + 1) / (step + 10)))
        if step * 100 // config.steps != (step + 1) * 100 // config.steps:
            model.criterion.update()
        if (step + 1) % report == 0 or step + 1 == config.steps:
            log.info("step=%d seconds=%.0f loss=%s", step + 1, time.monotonic() - started, items)
            yield step + 1, average


def _train_step(
    model: DetectionModel, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]
) -> dict[str, float]:
    # why: convolutions in bfloat16 take two thirds of the time; the loss needs float32
    with torch.autocast("cpu", torch.bfloat16):
        predictions = model(batch["img"])
    loss, items = model.loss(batch, _to_float(predictions))
    optimizer.zero_grad()
    loss.sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    return {name: round(float(value), 3) for name, value in items.items()}


def _to_float(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_float(item) for key, item in value.items()}
    return [_to_float(item) for item in value] if isinstance(value, (list, tuple)) else value.float()


@torch.no_grad()
def _follow(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Move an average of the weights towards the model's."""
    current = model.state_dict()
    for name, value in average.state_dict().items():
        if value.is_floating_point():
            value.lerp_(current[name], 1 - decay)
        else:
            value.copy_(current[name])


def save(model: DetectionModel, path: Path, config: TrainConfig) -> None:
    """Store a model as a checkpoint of the Ultralytics format, in half precision, without training state."""
    model = deepcopy(model).to(memory_format=torch.contiguous_format).half().eval()
    model.criterion = None
    model.args = {key: DEFAULT_CFG_DICT[key] for key in ("task", "mode")} | {"imgsz": config.size[0]}
    checkpoint = {
        "epoch": -1,
        "model": model,
        "ema": None,
        "optimizer": None,
        "train_args": {"task": "detect", "model": "yolo26n.yaml", "imgsz": config.size[0]},
        "version": ultralytics_version,
    }
    torch.save(checkpoint, path)


def main() -> None:
    """Train as the command line says and store the newest averaged model all along."""
    parser = argparse.ArgumentParser(description="Train the demo detector on rendered scenes.")
    parser.add_argument("--out", type=Path, required=True, help="where the .pt goes")
    parser.add_argument("--steps", type=int, default=TrainConfig.steps)
    parser.add_argument("--seed", type=int, default=TrainConfig.seed)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = TrainConfig(steps=options.steps, seed=options.seed)
    for _, model in train(config):
        save(model, options.out, config)


if __name__ == "__main__":
    main()
