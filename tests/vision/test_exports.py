"""A `.pt` as an OpenVINO export: made once, the same answers, and torch where that cannot be."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from appliance.settings import BUNDLED_DETECTOR
from tests.disks import small_disk
from vision import exports, openvino_network
from vision.boxes import overlap
from vision.detector import Detector, DetectorConfig
from vision.errors import ModelUnsupported
from vision.gate import FreeDevice
from vision.scenes import SceneStream
from vision.types import Image
from vision.ultralytics_quiet import import_ultralytics

CONFIG = DetectorConfig(BUNDLED_DETECTOR, imgsz=320, runtime="openvino")
AUTO = replace(CONFIG, runtime="auto")
needs_openvino = pytest.mark.skipif(
    exports.find_spec("openvino") is None, reason="the extra `openvino` brings the runtime"
)


@pytest.fixture(scope="module")
def cache(export_cache: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(export_cache))
        yield export_cache / "vision-appliance" / "detectors"


@pytest.fixture(scope="module")
def loaded(cache: Path) -> tuple[Detector, frozenset[openvino_network.Shape]]:
    """A detector, and for what its network was compiled when it was ready."""
    detector = Detector(CONFIG)
    assert detector._network is not None
    return detector, frozenset(detector._network._compiled)


@pytest.fixture(scope="module")
def fast(loaded: tuple[Detector, object]) -> Detector:
    return loaded[0]


@pytest.fixture
def no_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Path:
        raise RuntimeError("this network is too strange")

    monkeypatch.setattr(exports, "_make", refuse)


def frames(size: tuple[int, int] = (448, 256)) -> list[Image]:
    stream = SceneStream("street", 7, 1.0, size)
    return [stream.frame(index)[0] for index in (4, 5, 9)]


@needs_openvino
def test_an_export_finds_what_the_weights_find(fast: Detector) -> None:
    """In batches of any number and frames of any size."""
    native = Detector(replace(CONFIG, runtime="torch"))
    assert (fast.runtime, fast.device, native.runtime) == ("openvino", "cpu", "pt")
    assert fast.names == native.names
    small, large = frames(), frames((640, 480))
    for batch, alike in (
        (small, [small]),
        (small[:1], [small[:1]]),
        ([*large, *small], [large, small]),
        (large * 3, [large] * 3),
    ):
        found = fast.detect(batch, 0.2)
        expected = [one for pictures in alike for one in native.detect(pictures, 0.35)]
        assert sum(map(len, expected)) >= len(batch)
        for ours, theirs in zip(found, expected, strict=True):
            for label, score, box in zip(theirs.labels, theirs.scores, theirs.boxes, strict=True):
                same = [i for i in range(len(ours)) if overlap(ours.boxes[i], box) > 0.8]
                assert [ours.labels[i] for i in same] == [label]
                assert ours.scores[same[0]] == pytest.approx(score, abs=0.03)


@needs_openvino
def test_it_finds_what_ultralytics_finds_by_the_same_export(fast: Detector) -> None:
    """Which computes while turns are taken: near the threshold, crowded, of chosen classes, none at all."""
    by_ultralytics, before = copy(fast), fast._options
    by_ultralytics._network = None
    pictures = [*frames(), np.zeros((256, 448, 3), np.uint8)]
    few, crowd, none = ({"conf": 0.1}, {"conf": 0.001, "iou": 0.95}, {"conf": 0.99})
    for options in (few, crowd, none, few | {"classes": [0, 16]}):
        for detector in (fast, by_ultralytics):
            detector._options = {**detector._options, "classes": None, "iou": 0.7, **options}
        found, expected = (
            fast.detect(pictures, options["conf"]),
            by_ultralytics.detect(pictures, options["conf"]),
        )
        assert [len(one) for one in found] == pytest.approx([len(one) for one in expected], rel=0.1, abs=1)
        for ours, theirs in zip(found, expected, strict=True):
            num = min(len(ours), len(theirs), 3)
            assert ours.scores[:num] == pytest.approx(theirs.scores[:num], abs=0.02)
            assert ours.class_ids[:num].tolist() == theirs.class_ids[:num].tolist()
            assert ours.boxes[:num] == pytest.approx(theirs.boxes[:num], abs=8)
    fast._options = before
    by_ultralytics.take_turns(FreeDevice())
    assert by_ultralytics._network is None
    assert len(by_ultralytics.detect(pictures)) == 4
    by_ultralytics._turns.remove()  # type: ignore[union-attr]


@needs_openvino
@pytest.mark.parametrize("size", [(1920, 1080), (1280, 720), (640, 360)])
def test_it_is_ready_for_cameras_before_their_first_frame(
    loaded: tuple[Detector, frozenset[openvino_network.Shape]], size: tuple[int, int]
) -> None:
    """V20: nothing is compiled any more for pictures of 16 to 9, however many come at once."""
    detector, shapes = loaded
    assert detector._network is not None
    (seen,) = {picture.shape[:2] for picture in detector._network._boxed(frames(size))}
    assert {(num, *seen) for num in openvino_network.BATCHES} == shapes


@needs_openvino
def test_it_keeps_so_many_compiled_networks(fast: Detector, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each size and number of pictures, the last used ones."""
    monkeypatch.setattr(openvino_network, "MAX_COMPILED", 2)
    network = fast._network
    assert network is not None
    picture = frames((64, 64))[0]
    fast.detect([picture] * 7)
    assert [shape[0] for shape in network._compiled] == [2, 1]
    assert {shape[1:] for shape in network._compiled} == {(320, 320)}


@needs_openvino
def test_it_is_made_once_and_nothing_else_is_left(fast: Detector, cache: Path, no_exports: None) -> None:
    assert Detector(AUTO).runtime == "openvino"
    (kept,) = cache.iterdir()
    assert kept.name.startswith("yolo26n-scenes-")
    assert not list(Path(BUNDLED_DETECTOR).parent.glob("*openvino*"))


@needs_openvino
def test_other_weights_and_sizes_are_other_exports(fast: Detector, cache: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pt"
    other.write_bytes(Path(BUNDLED_DETECTOR).read_bytes() + b"\0")
    names = {
        exports._name(Path(model), size, is_end2end)
        for model, size, is_end2end in [
            (BUNDLED_DETECTOR, 320, False),
            (BUNDLED_DETECTOR, 640, False),
            (BUNDLED_DETECTOR, 320, True),
            (str(other), 320, False),
        ]
    }
    assert len(names) == 4
    assert next(cache.iterdir()).name in names


def broken(kept: Path) -> None:
    next(kept.glob("*.bin")).write_bytes(b"")


def half_written(kept: Path) -> None:
    next(kept.glob("*.xml")).unlink()


def of_other_weights(kept: Path) -> None:
    """All weights are a little less than they were."""
    weights = next(kept.glob("*.bin"))
    values = np.frombuffer(weights.read_bytes(), np.float32)
    weights.write_bytes(np.where(np.abs(values) < 10, values * np.float32(0.7), values).tobytes())


@needs_openvino
@pytest.mark.parametrize("damage", [broken, half_written, of_other_weights])
def test_what_is_damaged_is_not_believed_and_made_again(
    fast: Detector,
    cache: Path,
    damage: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copied = tmp_path / "vision-appliance" / "detectors"
    shutil.copytree(cache, copied)
    damage(next(copied.iterdir()))
    with caplog.at_level(logging.WARNING, "vision"):
        assert Detector(AUTO).runtime == "openvino"
    (record,) = caplog.records
    (kept,) = copied.iterdir()
    assert f"{kept} cannot be used and is made again" in record.getMessage()
    assert all(path.stat().st_size for path in (*kept.glob("*.xml"), *kept.glob("*.bin")))


@needs_openvino
def test_what_cannot_be_made_again_is_not_kept_either(
    fast: Detector,
    cache: Path,
    no_exports: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copied = tmp_path / "vision-appliance" / "detectors"
    shutil.copytree(cache, copied)
    broken(next(copied.iterdir()))
    with caplog.at_level(logging.WARNING, "vision.detector"):
        assert Detector(AUTO).runtime == "pt"
    assert "stays with torch" in caplog.text
    assert list(copied.iterdir()) == []


@needs_openvino
def test_what_cannot_be_exported_stays_with_torch(
    untrained_pt: Path, cache: Path, no_exports: None, caplog: pytest.LogCaptureFixture
) -> None:
    config = DetectorConfig(str(untrained_pt), imgsz=64, runtime="auto")
    with caplog.at_level(logging.WARNING, "vision.detector"):
        assert Detector(config).runtime == "pt"
    assert f"{untrained_pt} stays with torch" in caplog.text
    assert "too strange" in caplog.text
    with pytest.raises(ModelUnsupported, match=r"detector\.runtime asks: RuntimeError: this network"):
        Detector(replace(config, runtime="openvino"))


def small_weights(path: Path, *, is_end2end: bool) -> None:
    """Of a network that is exported in no time and knows two classes."""
    from ultralytics.nn.tasks import DetectionModel

    layers = [[-1, 1, "Conv", [width, 3, 2]] for width in (8, 8, 16, 16, 16)]
    head = [[[2, 3, 4], 1, "Detect", ["nc"]]]
    definition = {"nc": 2, "end2end": is_end2end, "reg_max": 1, "backbone": layers, "head": head}
    yolo = import_ultralytics().YOLO("yolov8n.yaml")
    yolo.model = DetectionModel(definition, nc=2, verbose=False)
    yolo.model.names = {0: "pallet", 1: "forklift"}
    yolo.save(path)


@needs_openvino
@pytest.mark.parametrize("is_end2end", [False, True])
def test_classes_of_ones_own_and_a_cache_that_cannot_be_written(
    is_end2end: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file" / "in the way"))
    (tmp_path / "a file").touch()
    small_weights(tmp_path / "own.pt", is_end2end=is_end2end)
    config = DetectorConfig(str(tmp_path / "own.pt"), imgsz=64, end2end=is_end2end)
    with caplog.at_level(logging.WARNING, "vision.exports"):
        detector = Detector(replace(config, runtime="openvino"))
    assert "cannot be kept" in caplog.text
    assert detector.names == {0: "pallet", 1: "forklift"}
    assert [len(found) for found in detector.detect(frames())] == [0, 0, 0]
    expected = [len(found) for found in Detector(config).detect(frames(), 1e-3)]
    assert [len(found) for found in detector.detect(frames(), 1e-3)] == expected
    assert min(expected) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a file", "own.pt"]


def test_without_the_package_torch_computes(
    untrained_pt: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is installed; who insists on it is told what to install."""
    monkeypatch.setattr(exports, "find_spec", lambda _: None)
    config = DetectorConfig(str(untrained_pt), imgsz=64, runtime="auto")
    with caplog.at_level(logging.WARNING, "vision.detector"):
        assert Detector(config).runtime == "pt"
    assert "pip install -e '.[openvino]'" in caplog.text
    with pytest.raises(ModelUnsupported, match=r"pip install -e '\.\[openvino\]'"):
        Detector(replace(config, runtime="openvino"))
    assert exports.why_no_export("a.onnx", "cpu") == "only a .pt can be exported, not a.onnx"
    assert "cuda:0" in str(exports.why_no_export("a.pt", "cuda:0"))


def test_the_newest_exports_are_kept(tmp_path: Path) -> None:
    for age in range(exports.NUM_KEPT + 3):
        folder = tmp_path / f"{age}_openvino_model"
        folder.mkdir()
        os.utime(folder, (1e9 - age, 1e9 - age))
    for name, is_old in (("making-stopped", True), ("making-now", False)):
        (tmp_path / name).mkdir()
        if is_old:
            os.utime(tmp_path / name, (1e9, 1e9))
    exports._forget_old(tmp_path)
    (tmp_path / "making-now").rmdir()
    assert {int(path.name.split("_")[0]) for path in tmp_path.iterdir()} == set(range(exports.NUM_KEPT))


@needs_openvino
def test_a_cache_without_room_and_no_room_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Made elsewhere for this once; where that is full too, torch computes, and the log says why."""
    small_weights(tmp_path / "own.pt", is_end2end=False)
    config = DetectorConfig(str(tmp_path / "own.pt"), imgsz=64, runtime="auto")
    caplog.set_level(logging.WARNING)
    with small_disk(tmp_path / "disk", "1m") as disk:
        disk.fill(but=10)
        monkeypatch.setenv("XDG_CACHE_HOME", str(disk.folder))
        assert Detector(config)._network is not None
        assert "cannot be kept: [Errno 28] no room for 4 MB" in caplog.text
        caplog.clear()
        monkeypatch.setattr("tempfile.tempdir", str(disk.folder))
        assert Detector(config)._network is None
        assert "stays with torch" in caplog.text
        assert "Errno 28] no room" in caplog.messages[-1]
        assert sorted(path.name for path in disk.folder.rglob("*") if path.is_file()) == ["filler"]
