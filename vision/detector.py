"""Object detection by an ultralytics model: YOLO26 and every other that it loads, native or exported."""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vision.errors import ModelNotFound, ModelUnsupported, UnknownClass, VisionError
from vision.gate import DeviceGate
from vision.layer_turns import LayerTurns
from vision.openvino_network import OpenVinoNetwork
from vision.pixels import to_bgr8
from vision.runtimes import check_runtime, share_cores
from vision.selftest import check_model, check_tflite
from vision.types import Detections, Image
from vision.ultralytics_quiet import import_ultralytics

log = logging.getLogger(__name__)

Runtime = Literal["auto", "torch", "openvino"]
"""What computes a ``.pt``."""

_TASKS = ("detect", "segment", "pose")
_DEFINITIONS = (".yaml", ".yml")


@dataclass(frozen=True)
class DetectorConfig:
    """Which model, and what of its answers is wanted.

    Attributes:
        model: path of a ``.pt``, of an exported model (``.onnx``, ``.tflite``, ``.engine``,
            ``…_openvino_model``, …), or of a ``.yaml`` definition (also the name of one of ultralytics' own),
            which has random weights.
        imgsz: pixels of the longer side that the model sees; None takes what it was trained or exported with.
        conf: lowest score of a detection, 0 to 1.
        iou: overlap above which the weaker of two boxes of a class goes; without effect on end-to-end heads.
        classes: names of wanted classes; empty for all.
        device: ``cpu``, ``cuda``, ``cuda:1``, or ``auto`` for CUDA where there is some.
        end2end: use the end-to-end head of a ``.pt`` or ``.yaml`` that has two, as YOLO26; by default its
            one-to-many head is used with ``iou``, as ultralytics does. An export has one head and keeps it.
        runtime: what computes a ``.pt`` on a CPU: ``torch``; or ``openvino``, by an export that is made once,
            kept in the user's cache, and checked against the original at each start; or ``auto``, that where
            it is possible and ``torch`` elsewhere.
    """

    model: str
    imgsz: int | None = None
    conf: float = 0.25
    iou: float = 0.7
    classes: tuple[str, ...] = ()
    device: str = "cpu"
    end2end: bool = False
    runtime: Runtime = "torch"


class Detector:
    """A model, loaded, warmed up and tested; ready when the constructor returns.

    Args:
        config: what to load.

    Raises:
        ModelNotFound: no such file. Nothing is downloaded.
        ModelUnsupported: not a detection model, its runtime is not installed, or it cannot be exported to the
            one that the configuration insists on.
        ModelBroken: it failed its self-test.
        UnknownClass: ``config.classes`` has a name that the model does not know.

    Attributes:
        config: as given.
        names: class id → name, of the model.
        load_s: seconds that loading, warming up and the self-test took.
    """

    def __init__(self, config: DetectorConfig) -> None:
        started = time.perf_counter()
        self.config = config
        path = _find(config.model)
        self._yolo = _load(path)
        self._options = _options(config)
        self._network: OpenVinoNetwork | None = None
        with _as_unsupported(config.model):
            self._warm_up()
            _share_cores(self._yolo, path)
        self.names: Mapping[int, str] = dict(self._yolo.predictor.model.names)
        class_ids = self._class_ids(config.classes)
        check_model(self._yolo, self._options, config.model)
        if config.runtime != "torch":
            self._export(path, is_needed=config.runtime == "openvino")
        self._options["classes"] = class_ids
        self._turns: LayerTurns | None = None
        self.load_s = time.perf_counter() - started

    @property
    def device(self) -> str:
        """Where the model runs, as ``cpu`` or ``cuda:0``."""
        device = self._yolo.predictor.model.device
        return device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"

    @property
    def runtime(self) -> str:
        """What computes, as ultralytics calls the format: ``pt``, ``openvino``, ``onnx``, …"""
        return str(self._yolo.predictor.model.format)

    def become(self, other: "Detector") -> None:
        """Compute by the runtime of another detector of the same model from now on, and ask for no turns."""
        self._yolo, self._options, self._turns = other._yolo, other._options, None
        self._network = other._network

    def take_turns(self, gate: DeviceGate) -> None:
        """Ask `gate` for the device from now on, before each batch and, of native models, between layers.

        What is detected stays the same.
        """
        if self._turns is not None:
            self._turns.remove()
        self._network = None
        self._turns = LayerTurns(self._yolo.predictor.model)
        # why: how long the layers take is measured once before anybody is told
        self._warm_up()
        self._turns.gate = gate

    def detect(self, images: Sequence[Image], min_score: float | None = None) -> list[Detections]:
        """Find objects in pictures of any sizes, in one batch.

        An exported model with a fixed batch gets the pictures in batches of that size.

        Args:
            images: ``[H, W, 3]`` uint8 BGR each; other depths and channels are converted by `to_bgr8`.
            min_score: in place of ``config.conf``, for a tracker that wants the weak ones too.

        Returns:
            One `Detections` a picture, best score first, boxes in pixels of that picture.

        Raises:
            FrameRejected: one of them is not a picture.
        """
        if not images:
            return []
        conf = self.config.conf if min_score is None else min_score
        return [self._detections(rows) for rows in self._find([to_bgr8(image) for image in images], conf)]

    def _find(self, images: list[Image], conf: float) -> list[NDArray[np.float32]]:
        """``[n, 6]`` a picture: x1 y1 x2 y2, score, class id."""
        options = self._options
        if self._network is not None:
            return self._network.find(images, conf, options["iou"], options["classes"], options["max_det"])
        results = self._yolo.predict(images, **{**options, "conf": conf})
        return [result.boxes.data.cpu().numpy() for result in results]

    def _export(self, path: str, *, is_needed: bool) -> None:
        """Go over to an export of the model; where there can be none, stay, and say why."""
        from vision.exports import exported, why_no_export

        reason = why_no_export(path, self.device)
        if reason is None:
            try:
                self._yolo, self._options, self._network = exported(self._yolo, self._options, path)
            except Exception as error:
                # why: the converter fails on networks that it does not know in ways of its own
                reason = f"{type(error).__name__}: {_why(error)}"
        if reason is None:
            log.info("the detector %s computes by OpenVINO", path)
        elif is_needed:
            raise ModelUnsupported(f"{path} cannot be run by OpenVINO, as detector.runtime asks: {reason}")
        elif path.endswith(".pt") and self.device == "cpu":
            log.warning(
                "the detector %s stays with torch, which takes about twice the time: %s", path, reason
            )

    def _warm_up(self) -> None:
        self._yolo.predict([np.full((320, 320, 3), 114, np.uint8)], **self._options)

    def _detections(self, rows: NDArray[np.float32]) -> Detections:
        rows = rows[np.argsort(-rows[:, 4], kind="stable")]
        xyxy, scores, class_ids = rows[:, :4], rows[:, 4], rows[:, 5]
        return Detections(
            xyxy.astype(np.float32), scores.astype(np.float32), class_ids.astype(np.int64), self.names
        )

    def _class_ids(self, classes: Sequence[str]) -> list[int] | None:
        ids = {name: class_id for class_id, name in self.names.items()}
        if unknown := [name for name in classes if name not in ids]:
            raise UnknownClass(unknown, self.names.values(), f"the detector {self.config.model}")
        return [ids[name] for name in classes] or None


def _share_cores(yolo: Any, path: str) -> None:
    import torch

    share_cores(yolo.predictor.model, path, torch.get_num_threads())


def _find(model: str) -> str:
    path = Path(model).expanduser()
    if path.exists():
        # why: ultralytics deletes and downloads again what it cannot read, if it goes by a bare known name
        return str(path.resolve())
    if path.suffix in _DEFINITIONS and path.name == model and _has_definition(model):
        return model
    hint = "nothing is downloaded; get the file first and give its path"
    raise ModelNotFound(f"no detection model at {model} (looked in {Path.cwd()}): {hint}")


def _has_definition(name: str) -> bool:
    import_ultralytics()
    from ultralytics.nn.tasks import yaml_model_load

    try:
        return bool(yaml_model_load(name))
    except FileNotFoundError:
        return False


def _load(path: str) -> Any:
    check_runtime(path)
    with _as_unsupported(path):
        yolo = import_ultralytics().YOLO(
            path, task=None if path.endswith((".pt", *_DEFINITIONS)) else "detect"
        )
        if path.endswith(".tflite") and not path.endswith("_edgetpu.tflite"):
            check_tflite(path)
    if yolo.task not in _TASKS:
        raise ModelUnsupported(f"{path} is a model for {yolo.task}; one that finds boxes is needed (detect)")
    return yolo


class _as_unsupported(contextlib.AbstractContextManager[None]):  # noqa: N801
    """Whatever ultralytics and the runtimes raise about a model file is one error of ours."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, VisionError):
            raise ModelUnsupported(
                f"{self._model} cannot be loaded as a detection model: {_why(error)}"
            ) from error


def _why(error: Exception) -> str:
    if isinstance(error, ImportError) and error.name:
        return f"it needs the package {error.name.partition('.')[0]}, which is not installed"
    lines = str(error).strip().splitlines()
    return lines[0].removeprefix("ERROR ❌️ ").strip() if lines else type(error).__name__


def _options(config: DetectorConfig) -> dict[str, Any]:
    options: dict[str, Any] = {
        "conf": config.conf,
        "iou": config.iou,
        "device": _device(config.device),
        "verbose": False,
        "max_det": 300,
    }
    if config.imgsz is not None:
        options["imgsz"] = config.imgsz
    if config.end2end:
        options["nms"] = False
    return options


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelUnsupported(
            f"device {name!r} of the detector is not known: cpu, cuda or auto are"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelUnsupported(
            "the detector was told to use CUDA, but torch finds none: set device to cpu or auto"
        )
    return device
