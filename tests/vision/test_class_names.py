"""Names of classes out of a model's file, against those of the loaded model."""

import pickle
import shutil
import zipfile
from pathlib import Path

import pytest

from vision.class_names import class_names
from vision.detector import Detector, DetectorConfig
from vision.ultralytics_quiet import import_ultralytics

BUNDLED = Path(__file__).parents[2] / "appliance" / "models" / "yolo26n-scenes.pt"


def test_of_a_checkpoint_what_the_loaded_model_says() -> None:
    assert class_names(BUNDLED) == tuple(Detector(DetectorConfig(str(BUNDLED))).names.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "package"), [("onnx", "onnxruntime"), ("openvino", "openvino")])
def test_of_an_export(kind: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    export = import_ultralytics().YOLO(shutil.copy(BUNDLED, tmp_path)).export

    model = export(format=kind, imgsz=64, verbose=False, **({"simplify": False} if kind == "onnx" else {}))

    assert class_names(model) == class_names(BUNDLED)


def test_of_a_tflite_file(media: Path) -> None:
    names = class_names(media / "yolo26n_int8_320.tflite")

    assert names
    assert (len(names), names[0], names[16]) == (80, "person", "dog")


class Evil:
    def __reduce__(self):
        return print, ("code of the file ran",)


def test_no_code_of_the_file_runs(tmp_path: Path, capsys) -> None:
    path = tmp_path / "evil.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("evil/data.pkl", pickle.dumps({"model": Evil(), "ema": None}))

    assert class_names(path) is None
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["a.pt", "a.onnx", "a.tflite", "a.xyz", "none.pt"])
def test_what_tells_nothing(tmp_path: Path, name: str) -> None:
    if name != "none.pt":
        (tmp_path / name).write_bytes(b"no model " * 100)

    assert class_names(tmp_path / name) is None
    assert class_names(tmp_path) is None
