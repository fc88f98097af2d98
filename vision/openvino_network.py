"""A detection network as OpenVINO computes it fastest: compiled for the sizes that come, fed with bytes."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vision.types import Image
from vision.ultralytics_quiet import import_ultralytics

BATCHES = (8, 4, 2, 1)
"""Pictures that are computed together: as many as there are, cut into these, the largest first."""

MAX_COMPILED = 16
"""Networks that are kept, each for a number of pictures of one size; the last used ones."""

_CLASS_APART = 7680.0

Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class NetworkInfo:
    """What has to be known of a network besides its weights.

    Attributes:
        imgsz: height and width that pictures are made to fit into.
        stride: sides of what the network sees are multiples of it.
        num_classes: of its output.
        is_end2end: whether its output has one row an object already.
        num_threads: cores that it may compute on.
    """

    imgsz: tuple[int, int]
    stride: int
    num_classes: int
    is_end2end: bool
    num_threads: int


class OpenVinoNetwork:
    """An export with free sizes, read from its folder.

    why: with sizes left free each other number of pictures is planned anew, which takes a fifth of the time;
    and ultralytics makes floats of the pictures in four passes, where the network can read bytes.

    Args:
        folder: where ultralytics put the export.
        info: about it.

    Raises:
        Exception: whatever OpenVINO raises about files that it cannot read.
    """

    def __init__(self, folder: Path, info: NetworkInfo) -> None:
        import openvino

        self._info = info
        self._core = openvino.Core()
        self._network = self._core.read_model(str(next(folder.glob("*.xml"))))
        self._compiled: OrderedDict[Shape, Any] = OrderedDict()

    def find(
        self, images: Sequence[Image], conf: float, iou: float, classes: Sequence[int] | None, max_det: int
    ) -> list[NDArray[np.float32]]:
        """Find objects.

        Args:
            images: ``[H, W, 3]`` uint8 BGR each, of any sizes.
            conf: scores are above it.
            iou: overlap above which the weaker of two boxes of a class goes, where there may be two.
            classes: ids that are wanted; None for all.
            max_det: rows of a picture at most.

        Returns:
            ``[n, 6]`` a picture: x1 y1 x2 y2 in its pixels, score, class id; best score first.
        """
        found: list[NDArray[np.float32]] = [np.empty((0, 6), np.float32)] * len(images)
        for at, seen, output in self._outputs(images):
            rows = self._objects(output, conf, iou, classes)[:max_det]
            found[at] = _in_pixels_of(images[at], rows, seen)
        return found

    def is_finite(self, image: Image) -> bool:
        """Whether all that comes out for a picture are numbers."""
        return all(bool(np.isfinite(output).all()) for _, _, output in self._outputs([image]))

    def _outputs(self, images: Sequence[Image]) -> Iterator[tuple[int, tuple[int, ...], NDArray[np.float32]]]:
        """Of each picture its place, the size in which the network saw it, and what came out."""
        by_size: dict[tuple[int, ...], list[tuple[int, Image]]] = {}
        for at, image in enumerate(self._boxed(images)):
            by_size.setdefault(image.shape[:2], []).append((at, image))
        for size, pictures in by_size.items():
            for batch in _cut(pictures):
                outputs = self._computed(np.stack([image for _, image in batch]))
                yield from ((at, size, output) for (at, _), output in zip(batch, outputs, strict=True))

    def _boxed(self, images: Sequence[Image]) -> list[Image]:
        import_ultralytics()
        from ultralytics.data.augment import LetterBox

        letterbox = LetterBox(self._info.imgsz, auto=True, stride=self._info.stride)
        return [letterbox(image=image) for image in images]

    def _computed(self, pictures: NDArray[np.uint8]) -> NDArray[np.float32]:
        """``[n, H, W, 3]`` to the network's first output, which is valid until the next call."""
        shape: Shape = pictures.shape[:3]
        request = self._compiled.pop(shape, None) or self._compile(shape)
        self._compiled[shape] = request
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        request.infer([pictures], share_inputs=True)
        return np.asarray(request.get_output_tensor(0).data, np.float32)

    def _compile(self, shape: Shape) -> Any:
        from openvino import Layout, Type
        from openvino.preprocess import ColorFormat, PrePostProcessor

        num, height, width = shape
        network = self._network.clone()
        network.reshape([num, 3, height, width])
        way_in = PrePostProcessor(network)
        tensor = way_in.input().tensor().set_element_type(Type.u8).set_layout(Layout("NHWC"))
        tensor.set_color_format(ColorFormat.BGR)
        way_in.input().model().set_layout(Layout("NCHW"))
        steps = way_in.input().preprocess().convert_element_type(Type.f32)
        steps.convert_color(ColorFormat.RGB).scale([255.0] * 3)
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            # why: threads wait for each other, spinning, and would be tied to cores that others were given
            "INFERENCE_NUM_THREADS": self._info.num_threads,
            "ENABLE_CPU_PINNING": False,
        }
        return self._core.compile_model(way_in.build(), "CPU", options).create_infer_request()

    def _objects(
        self, output: NDArray[np.float32], conf: float, iou: float, classes: Sequence[int] | None
    ) -> NDArray[np.float32]:
        """Rows as `find` gives them, in pixels of what the network saw."""
        rows = output[output[:, 4] > conf, :6] if self._info.is_end2end else self._sure(output, conf)
        if classes is not None:
            rows = rows[np.isin(rows[:, 5], classes)]
        rows = rows[np.argsort(-rows[:, 4], kind="stable")]
        return rows if self._info.is_end2end or len(rows) < 2 else rows[_apart(rows, iou)]

    def _sure(self, output: NDArray[np.float32], conf: float) -> NDArray[np.float32]:
        scores = output[4 : 4 + self._info.num_classes]
        kept = np.flatnonzero(scores.max(axis=0) > conf)
        centers, halves, scores = output[:2, kept], output[2:4, kept] / 2, scores[:, kept]
        columns = (*(centers - halves), *(centers + halves), scores.max(axis=0), scores.argmax(axis=0))
        return np.stack(columns, axis=1).astype(np.float32)


def _cut(pictures: list[tuple[int, Image]]) -> Iterator[list[tuple[int, Image]]]:
    while pictures:
        num = next(num for num in BATCHES if num <= len(pictures))
        yield pictures[:num]
        pictures = pictures[num:]


def _apart(rows: NDArray[np.float32], iou: float) -> NDArray[np.int64]:
    """The places of rows over which no better one of their class lies."""
    import torch
    from torchvision.ops import nms

    boxes = rows[:, :4] + _CLASS_APART * rows[:, 5:]
    kept = nms(torch.from_numpy(boxes), torch.from_numpy(np.ascontiguousarray(rows[:, 4])), iou)
    return np.asarray(kept.numpy(), np.int64)


def _in_pixels_of(image: Image, rows: NDArray[np.float32], seen: tuple[int, ...]) -> NDArray[np.float32]:
    if len(rows):
        from ultralytics.utils.ops import scale_boxes

        rows[:, :4] = scale_boxes(seen, rows[:, :4], image.shape[:2])
    return rows
