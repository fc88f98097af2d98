"""Is this model fit to be trusted with frames: the checks at load."""

from typing import Any

import numpy as np

from vision.errors import ModelBroken
from vision.types import Image

_SURE = 0.9
_MAX_GHOSTS = 10
_SIDE = 320


def check_model(yolo: Any, options: dict[str, Any], model: str) -> None:
    """Run a loaded ultralytics model on empty pictures.

    Args:
        yolo: an ultralytics ``Model``, loaded.
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


def dirty_heap() -> None:
    """Fill free memory with NaN patterns, then let it go.

    why: some exports read buffers that nothing wrote. On fresh pages, which are zero, such a model computes
    something that passes; on used memory it does not. Used memory is what it will run on.
    """
    sizes = [1 << power for power in range(6, 27)]
    blocks = [np.full(size, 0xFF, np.uint8) for size in sizes for _ in range(4 if size < 1 << 22 else 1)]
    del blocks


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
