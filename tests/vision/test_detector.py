"""The detector: real answers, geometry, batches, classes, and what it refuses to load."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image as Pillow

from vision.boxes import overlap
from vision.detector import Detector, DetectorConfig
from vision.errors import (
    DetectorError,
    FrameRejected,
    ModelBroken,
    ModelNotFound,
    ModelUnsupported,
    UnknownClass,
)
from vision.types import Detections, Image
from vision.ultralytics_quiet import import_ultralytics

BUS_BOX = np.array([3, 230, 805, 750], np.float32)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Records, and refuses, every attempt to reach another machine."""
    attempts: list[object] = []

    def refuse(*args: object, **_: object) -> None:
        attempts.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield attempts
    assert attempts == []


def bus_of(detections: Detections) -> Detections:
    return detections[np.array([label == "bus" for label in detections.labels])]


def test_real_answers(yolo26n_640: Detector, bus: Image) -> None:
    """The numbers that the weights are known for: bus .93, persons .92 .91 .87."""
    found = yolo26n_640.detect([bus])[0]
    assert found.labels[:4] == ["bus", "person", "person", "person"]
    assert found.scores[:4].tolist() == pytest.approx([0.93, 0.92, 0.91, 0.87], abs=0.02)
    assert overlap(found.boxes[0], BUS_BOX) > 0.95
    assert (found.boxes.dtype, found.scores.dtype, found.class_ids.dtype) == (
        np.float32,
        np.float32,
        np.int64,
    )


@pytest.mark.parametrize(
    ("width", "height", "scale"),
    [(853, 480, 0.4), (640, 368, 0.33), (3632, 1080, 1), (270, 480, 0.3), (811, 1081, 1), (3840, 2160, 2)],
)
def test_geometry_of_odd_sizes(
    yolo26n_640: Detector, bus: Image, width: int, height: int, scale: float
) -> None:
    """V12: the bus is found where it was put, whatever the frame's shape."""
    small = cv2.resize(bus, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)[:height, :width]
    x, y = (width - small.shape[1]) // 2, height - small.shape[0]
    frame = np.full((height, width, 3), 114, np.uint8)
    frame[y : y + small.shape[0], x : x + small.shape[1]] = small
    found = bus_of(yolo26n_640.detect([frame])[0])
    expected = BUS_BOX * scale + np.array([x, y, x, y], np.float32)
    assert len(found) == 1
    assert overlap(found.boxes[0], np.asarray(expected, np.float32)) > 0.85


def test_cameras_of_different_sizes_in_one_batch(yolo26n_640: Detector, bus: Image) -> None:
    """V17: a model with a fixed batch of one gets them one by one; the order is kept."""
    images = [bus, cv2.resize(bus, (405, 540)), np.zeros((480, 640, 3), np.uint8), bus[:, ::-1].copy()]
    together = yolo26n_640.detect(images)
    alone = [yolo26n_640.detect([image])[0] for image in images]
    assert [found.labels for found in together] == [found.labels for found in alone]
    assert all(np.allclose(a.boxes, b.boxes, atol=0.1) for a, b in zip(together, alone, strict=True))
    assert len(together[2]) == 0
    assert yolo26n_640.detect([]) == []


def test_grey_and_16_bit_frames(yolo26n_640: Detector, bus: Image) -> None:
    """V14: what is no 8-bit BGR becomes it before the model."""
    grey = cv2.cvtColor(bus, cv2.COLOR_BGR2GRAY)
    deep = bus.astype(np.uint16) * 257
    for picture in (grey, deep):
        assert len(bus_of(yolo26n_640.detect([picture])[0])) == 1
    with pytest.raises(FrameRejected):
        yolo26n_640.detect([np.zeros((0, 4, 3), np.uint8)])


def test_classes_are_chosen_by_name(media: Path, bus: Image) -> None:
    """V19: on the end-to-end head of YOLO26."""
    model = str(media / "yolo26n_int8_640.tflite")
    found = Detector(DetectorConfig(model, classes=("bus", "dog"))).detect([bus])[0]
    assert found.labels == ["bus"]
    assert found.names[0] == "person"


@pytest.mark.parametrize("end2end", [True, False])
def test_classes_are_chosen_on_both_heads(untrained_pt: Path, bus: Image, end2end: bool) -> None:
    """V19: native weights, with the head that needs no suppression and the one that does."""
    config = DetectorConfig(str(untrained_pt), imgsz=64, conf=1e-6, end2end=end2end)
    everything = Detector(config).detect([bus])[0].labels
    wanted = (everything[0], "thing 3")
    found = Detector(replace(config, classes=wanted)).detect([bus])[0].labels
    assert len(set(everything)) > 1
    assert found[0] == wanted[0]
    assert set(found) <= set(wanted)


def test_an_unknown_class_is_an_error_at_start(untrained_pt: Path) -> None:
    """V18: the message lists what the model knows."""
    config = DetectorConfig(str(untrained_pt), imgsz=64, classes=("thing 1", "peron"))
    with pytest.raises(UnknownClass, match=r"no class 'peron'.*thing 0, thing 1, thing 2") as caught:
        Detector(config)
    assert caught.value.unknown == ("peron",)
    assert len(caught.value.known) == 80


def test_warm_before_it_is_ready(untrained_pt: Path) -> None:
    """V20: the first frame takes no more of a processor than any other."""
    detector = Detector(DetectorConfig(str(untrained_pt), imgsz=320))
    frame = np.zeros((320, 320, 3), np.uint8)
    times = []
    for _ in range(4):
        started = time.process_time()
        detector.detect([frame])
        times.append(time.process_time() - started)
    assert times[0] < 5 * max(times[1:]) + 0.1
    assert detector.load_s > times[0]


def test_weights_that_give_nan_are_refused(untrained: Any, tmp_path: Path) -> None:
    """V21: one bad weight in the middle of the network."""
    model = deepcopy(untrained)
    model.model.model[4].cv1.conv.weight.data[0, 0] = float("nan")
    model.save(tmp_path / "nan.pt")
    with pytest.raises(ModelBroken, match=r"nan\.pt.*NaN"):
        Detector(DetectorConfig(str(tmp_path / "nan.pt"), imgsz=64))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "package"), [("onnx", "onnxruntime"), ("openvino", "openvino")])
def test_exports_that_give_nan_are_refused(untrained: Any, tmp_path: Path, kind: str, package: str) -> None:
    """V21: whatever computes."""
    pytest.importorskip(package)
    model = deepcopy(untrained)
    model.model.model[4].cv1.conv.weight.data[0, 0] = float("nan")
    model.save(tmp_path / "nan.pt")
    options = {"simplify": False} if kind == "onnx" else {}
    export = (
        import_ultralytics().YOLO(tmp_path / "nan.pt").export(format=kind, imgsz=64, verbose=False, **options)
    )
    with pytest.raises(ModelBroken, match=r"nan.*NaN"):
        Detector(DetectorConfig(export))


def test_weights_that_see_things_everywhere_are_refused(untrained: Any, tmp_path: Path) -> None:
    """V21: finite, and wrong."""
    model = deepcopy(untrained)
    for branch in model.model.model[-1].cv3:
        branch[-1].bias.data[0] = 10.0
    model.save(tmp_path / "ghosts.pt")
    with pytest.raises(ModelBroken, match=r"ghosts\.pt is sure of \d+ objects on a black picture"):
        Detector(DetectorConfig(str(tmp_path / "ghosts.pt"), imgsz=64))


def test_a_broken_export_is_refused(media: Path) -> None:
    """V21: it computes NaN, nothing, or hundreds of things in an empty picture, by what is in memory."""
    pytest.importorskip("ai_edge_litert")
    with pytest.raises(ModelBroken, match=r"broken_yolo26n_int8\.tflite.*accidental; export it again"):
        Detector(DetectorConfig(str(media / "broken_yolo26n_int8.tflite")))


@pytest.mark.filterwarnings("ignore")
def test_an_onnx_export_gives_what_the_weights_give(
    untrained: Any, untrained_pt: Path, tmp_path: Path, bus: Image
) -> None:
    pytest.importorskip("onnxruntime")
    export = import_ultralytics().YOLO(shutil.copy(untrained_pt, tmp_path)).export
    model = export(format="onnx", imgsz=64, simplify=False, nms=False, verbose=False)
    frames = [cv2.resize(bus, (64, 64)), cv2.resize(bus[:, ::-1], (64, 64))]
    config = DetectorConfig(str(untrained_pt), imgsz=64, conf=1e-6, end2end=True)
    native = Detector(config).detect(frames)
    exported = Detector(DetectorConfig(model, conf=1e-6)).detect(frames)
    assert exported[0].names == native[0].names
    for ours, theirs in zip(exported, native, strict=True):
        assert len(ours) == len(theirs) > 0
        assert ours.scores[:20] == pytest.approx(theirs.scores[:20], rel=2e-3)
        assert ours.labels[0] == theirs.labels[0]
        assert ours.boxes[0] == pytest.approx(theirs.boxes[0], abs=0.5)
    assert exported[0].scores[0] != pytest.approx(exported[1].scores[0], rel=2e-3)


def test_a_missing_model_is_named_and_not_downloaded(no_network: list[object]) -> None:
    for name in ("yolo26n.pt", "no/such/yolo26n.onnx", "nothing.yaml"):
        with pytest.raises(ModelNotFound, match="nothing is downloaded") as caught:
            Detector(DetectorConfig(name))
        assert name in str(caught.value)


def test_loading_asks_nobody(untrained_pt: Path, no_network: list[object], bus: Image) -> None:
    Detector(DetectorConfig(str(untrained_pt), imgsz=64)).detect([bus])


def test_nothing_goes_to_standard_output(untrained_pt: Path, tmp_path: Path) -> None:
    """Not the first time on a machine, and no warning of ultralytics either: it belongs to results."""
    program = (
        "import logging, sys\n"
        "from vision import Detector, DetectorConfig\n"
        "Detector(DetectorConfig(sys.argv[1], imgsz=64))\n"
        "logging.getLogger('ultralytics').warning('something odd')\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("YOLO_")}
    done = subprocess.run(
        [sys.executable, "-c", program, str(untrained_pt)],
        capture_output=True,
        text=True,
        check=True,
        env={**environment, "YOLO_CONFIG_DIR": str(tmp_path)},
    )
    assert done.stdout == ""
    assert "something odd" in done.stderr


@pytest.mark.parametrize("name", ["a.pt", "a.onnx", "a.tflite", "a.xyz", "yolo26n.pt"])
@pytest.mark.parametrize("content", [b"", b"this is no model\n" * 50])
def test_files_that_are_no_model(
    tmp_path: Path, name: str, content: bytes, no_network: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not deleted and fetched anew either, as ultralytics does with names that it knows."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    with pytest.raises(ModelUnsupported, match=name) as caught:
        Detector(DetectorConfig(name))
    assert "\n" not in str(caught.value)
    assert Path(name).exists()


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("a.onnx", "onnxruntime", "onnxruntime"),
        ("a_openvino_model", "openvino", "openvino"),
        ("a.tflite", "ai_edge_litert", "ai-edge-litert"),
        ("a.engine", "tensorrt", "tensorrt"),
    ],
)
def test_a_runtime_that_is_missing_is_named_and_not_installed(
    tmp_path: Path,
    name: str,
    module: str,
    package: str,
    no_network: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the environment says to ultralytics, which would fetch it by pip."""
    monkeypatch.setattr("vision.runtimes.find_spec", lambda wanted: None if wanted == module else wanted)
    monkeypatch.setenv("YOLO_AUTOINSTALL", "true")
    (tmp_path / name).mkdir() if name.endswith("_model") else (tmp_path / name).touch()
    with pytest.raises(ModelUnsupported, match=f"needs the package {package}, .*pip install {package}"):
        Detector(DetectorConfig(str(tmp_path / name)))
    from ultralytics.utils import checks

    import_ultralytics()
    assert not checks.AUTOINSTALL


def test_code_in_a_weight_file_does_not_run(tmp_path: Path) -> None:
    import torch

    class Mischief:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "was run",))

    torch.save({"model": Mischief()}, tmp_path / "a.pt")
    with pytest.raises(ModelUnsupported):
        Detector(DetectorConfig(str(tmp_path / "a.pt")))
    assert not (tmp_path / "was run").exists()


def test_pillow_stays_as_it_was(tmp_path: Path, no_network: list[object]) -> None:
    """ultralytics replaces `PIL.Image.open` by one that installs packages when bytes are no picture."""
    import_ultralytics()
    (tmp_path / "p.png").write_bytes(b"no picture")
    with pytest.raises(Pillow.UnidentifiedImageError):
        Pillow.open(tmp_path / "p.png")


def test_models_for_other_tasks_and_devices_that_are_not_there(untrained_pt: Path) -> None:
    with pytest.raises(ModelUnsupported, match="classify"):
        Detector(DetectorConfig("yolo26n-cls.yaml"))
    with pytest.raises(DetectorError, match="'gpu'"):
        Detector(DetectorConfig(str(untrained_pt), device="gpu"))
