"""Is this model fit to be trusted with frames: the checks at load."""

from importlib import import_module
from itertools import cycle, islice
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from vision.boxes import overlap
from vision.errors import ModelBroken
from vision.openvino_network import BATCHES, OpenVinoNetwork
from vision.types import Image
from vision.ultralytics_quiet import import_ultralytics

_SURE = 0.9
_MAX_GHOSTS = 10
_SIDE = 320
_WEAK = 0.1
_MUST_AGREE = 0.3
_SCORE_TOLERANCE = 0.1
_SAME_BOX = 0.6


def check_model(yolo: Any, options: dict[str, Any], model: str) -> None:
    """Run a loaded ultralytics model on empty pictures.

    Args:
        yolo: an ultralytics ``Model``, loaded, with its predictor set up.
        options: keywords for its ``predict``.
        model: its name, for messages.

    Raises:
        ModelBroken: an output that is not finite, or sure sightings in pictures without content.
    """
    for what, image in _empty_pictures().items():
        found = yolo.predict([image], **{**options, "conf": _SURE})[0]
        if not _is_finite(yolo.predictor, image):
            raise ModelBroken(
                f"{model} computes values that are not numbers (NaN) on {what}: export it again"
            )
        if len(found) > _MAX_GHOSTS:
            raise ModelBroken(
                f"{model} is sure of {len(found)} objects on {what}, where there is nothing: "
                "its weights are damaged or its export is; export it again"
            )


def check_agreement(original: Any, export: OpenVinoNetwork, options: dict[str, Any]) -> None:
    """See that an export finds what the original finds, in pictures of streets, in noise and in a photograph.

    They have the proportions of most cameras and are looked at in batches of each size, so that an export
    that passes is ready for those.

    Args:
        original: a loaded ultralytics ``Model`` that passed `check_model`.
        export: another of the same weights.
        options: keywords for the ``predict`` of `original`.

    Raises:
        ModelBroken: an output that is not finite, or an object that only one of them sees.
    """
    pictures = _pictures_with_content()
    if not export.is_finite(pictures[0]):
        raise ModelBroken("the export computes values that are not numbers (NaN)")
    expected = original.predict(pictures, **{**options, "conf": _WEAK})
    shown = list(islice(cycle(pictures), sum(BATCHES)))
    found = export.find(shown, _WEAK, options["iou"], None, options["max_det"])
    for mine, theirs in zip(found, cycle(expected), strict=False):
        original_rows = theirs.boxes.data.cpu().numpy()
        for rows, others in ((mine, original_rows), (original_rows, mine)):
            if lost := [row for row in rows if row[4] >= _MUST_AGREE and not _is_among(row, others)]:
                raise ModelBroken(
                    f"the export and the original disagree on an object of score {lost[0][4]:.2f}"
                )


def _is_among(row: NDArray[np.float32], others: NDArray[np.float32]) -> bool:
    return any(
        row[5] == other[5]
        and abs(row[4] - other[4]) <= _SCORE_TOLERANCE
        and overlap(row[:4], other[:4]) >= _SAME_BOX
        for other in others
    )


def _pictures_with_content() -> list[Image]:
    """Drawn places, noise, and the street that ultralytics brings along, all of one size."""
    from vision.scenes import SceneStream

    drawn = [SceneStream(place, 7, 1.0, (448, 256)).frame(5)[0] for place in ("street", "yard", "park")]
    photograph = import_ultralytics().utils.ASSETS / "bus.jpg"
    if photograph.exists():
        drawn.append(np.asarray(cv2.resize(cv2.imread(str(photograph)), (448, 256)), np.uint8))
    return [*drawn, np.random.default_rng(1).integers(0, 256, (256, 448, 3), np.uint8)]


def check_tflite(path: str) -> None:
    """Look for weights in a ``.tflite`` file that its runtime reads beyond their end.

    why: the kernel for depthwise convolution of floats by integer weights takes one scale a channel; given
    one for all, it reads on into whatever lies there. What such a model computes is NaN, nothing or nonsense
    by chance, so that running it proves nothing.

    Raises:
        ModelBroken: there are such weights.
    """
    interpreter = import_module("ai_edge_litert.interpreter").Interpreter(path)
    tensors = {tensor["index"]: tensor for tensor in interpreter.get_tensor_details()}
    for operation in getattr(interpreter, "_get_ops_details", list)():
        if operation["op_name"] == "DEPTHWISE_CONV_2D":
            values, weights = (tensors[index] for index in operation["inputs"][:2])
            num_scales = len(weights["quantization_parameters"]["scales"])
            if values["dtype"] == np.float32 and num_scales == 1 < weights["shape"][-1]:
                raise ModelBroken(
                    f"{path} has weights with one scale for all channels where its runtime reads one each: "
                    "what it computes is accidental; export it again, quantised by channel"
                )


def _empty_pictures() -> dict[str, Image]:
    noise = np.random.default_rng(0).integers(0, 256, (_SIDE, _SIDE, 3), np.uint8)
    return {
        "a black picture": np.zeros_like(noise),
        "a grey picture": np.full_like(noise, 114),
        "a white picture": np.full_like(noise, 255),
        "noise": noise,
    }


def _is_finite(predictor: Any, image: Image) -> bool:
    import torch

    with torch.inference_mode():
        output = predictor.model(predictor.preprocess([image]))
    return all(bool(torch.isfinite(t).all()) for t in _tensors(output))


def _tensors(output: Any) -> list[Any]:
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in _tensors(item)]
    return [output] if hasattr(output, "isfinite") else []
