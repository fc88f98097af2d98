"""Measure the demo detector on rendered scenes it was not trained on.

    python -m appliance.demo.evaluate_detector --scenes 400 --frames 400

Prints one JSON object: mAP50 and mAP50-95 on still scenes and on frames of moving streams, and recall and
false alarms at the threshold that the appliance uses.
"""

import argparse
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("ULTRALYTICS_SAFE_LOAD", "1")

import numpy as np
import torch
from ultralytics import YOLO
from ultralytics.utils.metrics import ap_per_class, box_iou

from appliance.demo.train_detector import COCO_IDS, truth_of
from vision.scenes import PLACES, Scene, SceneStream, render, sample_scene
from vision.scenes.canvas import Image

BUNDLED = Path(__file__).parents[1] / "models/yolo26n-scenes.pt"
SEED = 90_000  # invariant: far from every seed that training uses
_IOUS = torch.linspace(0.5, 0.95, 10)
_LABELS = {index: label for label, index in COCO_IDS.items()}
Sample = tuple[Image, Scene]


def still_scenes(count: int, seed: int = SEED) -> Iterator[Sample]:
    """Independent scenes of all places and times of day."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        scene = sample_scene(rng)
        yield render(scene, rng), scene


def stream_frames(count: int, seed: int = SEED) -> Iterator[Sample]:
    """Frames two seconds apart of streams of all places, 16 of each stream."""
    for index in range(count):
        stream_index, step = divmod(index, 16)
        if step == 0:
            stream = SceneStream(PLACES[stream_index % len(PLACES)], seed + stream_index, fps=5.0)
        yield stream.frame(step * 10)


def evaluate(model: YOLO, samples: Iterator[Sample], imgsz: int, conf: float) -> dict[str, Any]:
    """Score a model on pictures with known truth.

    conf: the threshold of the reported recall and false alarms (per object), both at an IoU of 0.5; the mAP
    figures use all scores. ms: median time of a picture.
    """
    hits, scores, found, asked, seconds = [], [], [], [], []
    for image, scene in samples:
        started = time.perf_counter()
        boxes = model.predict(image, imgsz=imgsz, conf=0.001, verbose=False)[0].boxes.cpu()
        seconds.append(time.perf_counter() - started)
        ids, truth = truth_of(scene)
        hits.append(match(boxes.xyxy, boxes.cls, torch.from_numpy(truth), torch.from_numpy(ids)))
        scores.append(boxes.conf.numpy())
        found.append(boxes.cls.numpy())
        asked.append(ids)
    figures = _figures(*(np.concatenate(part) for part in (hits, scores, found, asked)), conf=conf)
    return {"pictures": len(asked), "ms": round(1e3 * float(np.median(seconds)), 1), **figures}


def match(boxes: torch.Tensor, classes: torch.Tensor, truth: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    """Which detections are right at each of 10 IoUs, bool [detections, 10].

    boxes and truth: xyxy, the detections by falling score. Each true object counts once, for the detection of
    its class that covers it best.
    """
    right = np.zeros((len(boxes), len(_IOUS)), bool)
    if not len(boxes) or not len(truth):
        return right
    overlap = box_iou(truth, boxes) * (ids[:, None] == classes[None, :])
    for column, threshold in enumerate(_IOUS):
        pairs = torch.nonzero(overlap >= threshold)
        order = overlap[pairs[:, 0], pairs[:, 1]].argsort(descending=True)
        taken: set[int] = set()
        for owner, index in pairs[order].tolist():
            if owner not in taken and not right[index, column]:
                taken.add(owner)
                right[index, column] = True
    return right


def _figures(
    hits: np.ndarray, scores: np.ndarray, found: np.ndarray, asked: np.ndarray, *, conf: float
) -> dict[str, Any]:
    results = ap_per_class(hits, scores, found, asked)
    precisions, classes = results[5], results[6]
    shown = scores >= conf
    return {
        "objects": len(asked),
        "mAP50": round(float(precisions[:, 0].mean()), 4),
        "mAP50-95": round(float(precisions.mean()), 4),
        "recall": round(float(hits[shown, 0].sum() / len(asked)), 4),
        "false_alarms": round(float((~hits[shown, 0]).sum() / len(asked)), 4),
        "conf": conf,
        "by_class_mAP50": {
            _LABELS[int(c)]: round(float(p[0]), 4) for c, p in zip(classes, precisions, strict=True)
        },
    }


def main() -> None:
    """Evaluate as the command line says and print JSON."""
    parser = argparse.ArgumentParser(description="Measure the demo detector on unseen rendered scenes.")
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--scenes", type=int, default=400)
    parser.add_argument("--frames", type=int, default=400)
    parser.add_argument("--imgsz", type=int, default=448)
    parser.add_argument("--conf", type=float, default=0.25)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    model = YOLO(options.model)
    parts = {"scenes": still_scenes(options.scenes), "stream": stream_frames(options.frames)}
    report = {name: evaluate(model, part, options.imgsz, options.conf) for name, part in parts.items()}
    print(json.dumps({"model": options.model.name, "imgsz": options.imgsz, **report}, indent=1))


if __name__ == "__main__":
    main()
