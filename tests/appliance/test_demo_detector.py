"""The demo detector: its training data, its score and the bundled weights."""

import numpy as np
import pytest
import torch
from torch import tensor
from ultralytics import YOLO
from ultralytics.nn.tasks import torch_safe_load

from appliance.demo.evaluate_detector import BUNDLED, evaluate, match, still_scenes, stream_frames
from appliance.demo.train_detector import (
    COCO_IDS,
    TrainConfig,
    build_model,
    coco_names,
    make_batch,
    rate,
    save,
    shift_and_zoom,
)

TINY = TrainConfig(batch=4, size=(224, 128))


def test_labels_carry_their_coco_ids() -> None:
    names = coco_names()
    assert len(names) == 80
    assert {names[index]: index for index in COCO_IDS.values()} == COCO_IDS


def test_a_batch_is_seeded_and_within_bounds() -> None:
    first, again = (make_batch(np.random.default_rng(5), TINY) for _ in range(2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert first["img"].shape == (4, 3, 128, 224)
    assert 0.2 < first["img"].max() <= 1
    centers, sizes = first["bboxes"][:, :2], first["bboxes"][:, 2:]
    assert (sizes > 0).all()
    assert (centers - sizes / 2 > -1e-5).all()
    assert (centers + sizes / 2 < 1 + 1e-5).all()
    assert len(first["cls"]) == len(first["bboxes"]) == len(first["batch_idx"])
    assert first["batch_idx"].tolist() == sorted(first["batch_idx"].tolist())


def test_zoom_moves_boxes_with_their_pixels() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        image = np.zeros((128, 224, 3), np.uint8)
        image[40:90, 90:140] = 255
        box = np.array([[90, 40, 140, 90]], np.float32)
        moved, ids, boxes = shift_and_zoom(rng, image, np.array([2]), box)
        rows, columns = np.nonzero((moved == 255).all(2))
        assert ids.tolist() == [2]
        seen = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        assert np.abs(boxes[0] - seen).max() < 2.5


def test_rate_rises_and_falls() -> None:
    rates = [rate(step, TrainConfig()) for step in range(TrainConfig.steps)]
    assert max(rates) == pytest.approx(TrainConfig.lr)
    assert rates[0] < 0.1 * TrainConfig.lr > rates[-1]


def test_a_match_needs_class_and_overlap_and_counts_once() -> None:
    truth, ids = tensor([[0.0, 0, 10, 10], [20, 0, 30, 10]]), tensor([0, 2])
    boxes = tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [20, 0, 30, 10], [20, 0, 30, 6]])
    right = match(boxes, tensor([0.0, 0, 0, 2]), truth, ids)
    assert right[:, 0].tolist() == [True, False, False, True]
    assert right[:, -1].tolist() == [True, False, False, False]
    assert not match(boxes[:0], tensor([]), truth, ids).size
    assert not match(boxes, tensor([0.0, 0, 0, 2]), truth[:0], ids[:0]).any()


def test_a_saved_model_loads_without_running_code(tmp_path) -> None:
    """The checkpoint holds nothing beyond the known classes of the Ultralytics format."""
    path = tmp_path / "untrained.pt"
    model = build_model()
    save(model, path, TrainConfig())
    checkpoint, _ = torch_safe_load(path, safe_only=True)
    stored = checkpoint["model"].state_dict()
    assert all(
        torch.equal(stored[name], value.to(stored[name].dtype)) for name, value in model.state_dict().items()
    )
    assert YOLO(path).names == coco_names()


def test_the_bundled_detector_finds_what_is_rendered() -> None:
    assert BUNDLED.stat().st_size <= 6_000_000
    torch_safe_load(BUNDLED, safe_only=True)
    model = YOLO(BUNDLED)
    for samples in (still_scenes(12), stream_frames(12)):
        score = evaluate(model, samples, imgsz=448, conf=0.25)
        assert score["recall"] > 0.8
        assert score["false_alarms"] < 0.2
