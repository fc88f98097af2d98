"""A detector that waits for the device: same answers however it is interrupted, and always given back."""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vision.detector import Detector, DetectorConfig
from vision.layer_turns import MAX_SHAPES, PieceTimes
from vision.types import Detections, Image


class Ration:
    """A gate that lends a given number of pieces at a time and writes down what it was asked."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes
        self.asked: list[list[float]] = []
        self.is_lent = False
        self.num_released = 0

    def acquire(self, piece_ms: Sequence[float]) -> int:
        assert not self.is_lent, "asked for what it has"
        self.is_lent = True
        self.asked.append(list(piece_ms))
        size = self._sizes[(len(self.asked) - 1) % len(self._sizes)] if self._sizes else len(piece_ms)
        return min(size, len(piece_ms))

    def release(self) -> None:
        assert self.is_lent, "gave back what it has not"
        self.is_lent = False
        self.num_released += 1


@pytest.fixture(scope="module")
def detector(untrained_pt: Path) -> Detector:
    return Detector(DetectorConfig(str(untrained_pt), imgsz=64, conf=1e-6))


@pytest.fixture(scope="module")
def frames(bus: Image) -> list[Image]:
    return [bus, cv2.resize(bus, (405, 540))]


@pytest.fixture(scope="module")
def unsliced(untrained_pt: Path, frames: list[Image]) -> list[Detections]:
    """What a detector that asks nobody finds, in a batch and in one picture."""
    detector = Detector(DetectorConfig(str(untrained_pt), imgsz=64, conf=1e-6))
    return [*detector.detect(frames), *detector.detect(frames[:1])]


@pytest.mark.parametrize("sizes", [(1,), (2, 1, 7), (23,), (24,)])
def test_slices_give_what_the_whole_gives(
    detector: Detector, frames: list[Image], unsliced: list[Detections], sizes: tuple[int, ...]
) -> None:
    """Bit for bit, at every way to cut the network between its layers, alone and in a batch."""
    gate = Ration(*sizes)
    detector.take_turns(gate)
    sliced = [*detector.detect(frames), *detector.detect(frames[:1])]
    for ours, theirs in zip(sliced, unsliced, strict=True):
        assert len(ours) > 0
        assert np.array_equal(ours.boxes, theirs.boxes)
        assert np.array_equal(ours.scores, theirs.scores)
        assert np.array_equal(ours.class_ids, theirs.class_ids)
    assert len(gate.asked) == gate.num_released > 1
    assert not gate.is_lent


def test_each_turn_says_what_is_left_and_how_long_it_takes(detector: Detector, bus: Image) -> None:
    gate = Ration(10)
    detector.take_turns(gate)
    detector.detect([bus])
    detector.detect([bus])
    assert [len(pieces) for pieces in gate.asked] == [24, 14, 4] * 2
    assert all(ms > 0 for pieces in gate.asked for ms in pieces)


def test_the_device_comes_back_when_the_model_fails(detector: Detector, bus: Image) -> None:
    gate = Ration(3)
    detector.take_turns(gate)
    layer = detector._yolo.predictor.model.model.model[5]
    broken = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        detector.detect([bus])
    assert not gate.is_lent
    broken.remove()
    assert len(detector.detect([bus])) == 1
    assert not gate.is_lent


def test_an_export_is_one_piece(yolo26n_640: Detector, bus: Image) -> None:
    gate = Ration(5)
    before = yolo26n_640.detect([bus])[0]
    yolo26n_640.take_turns(gate)
    after = yolo26n_640.detect([bus])[0]
    assert [len(pieces) for pieces in gate.asked] == [1]
    assert np.array_equal(after.boxes, before.boxes)
    assert yolo26n_640.device == "cpu"


def test_times_of_a_new_shape_are_scaled_and_then_learned() -> None:
    times = PieceTimes(2)
    assert times.of((1, 8)) == [0, 0]
    times.learn((1, 8), 0, 10.0)
    times.learn((1, 8), 1, 30.0)
    assert times.of((1, 8)) == [10, 30]
    assert times.of((3, 8)) == [30, 90]
    times.learn((3, 8), 0, 20.0)
    assert times.of((3, 8))[0] == pytest.approx(26)
    times.learn((3, 8), 0, 50.0)
    assert times.of((3, 8))[0] == pytest.approx(33.2)
    for size in range(10, 10 + MAX_SHAPES):
        times.of((1, size))
    assert len(times._times) == MAX_SHAPES


@given(measured=st.lists(st.floats(0.01, 1e4), min_size=1, max_size=50))
def test_times_stay_between_what_was_measured(measured: list[float]) -> None:
    times = PieceTimes(1)
    for ms in measured:
        times.learn((1,), 0, ms)
        assert min(measured) - 1e-9 <= times.of((1,))[0] <= max(measured) + 1e-9
