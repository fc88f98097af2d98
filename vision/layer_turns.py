"""A network that waits for the device before it computes, and gives it away between two of its layers."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from vision.gate import DeviceGate, FreeDevice

FALLS = 0.4
RISES = 0.3
MAX_SHAPES = 64

Shape = tuple[int, ...]


class PieceTimes:
    """How long each piece of a forward pass takes, by the shape of its input; follows what is measured.

    Args:
        num_pieces: of the network.
    """

    def __init__(self, num_pieces: int) -> None:
        self._num_pieces = num_pieces
        self._times: OrderedDict[Shape, list[float]] = OrderedDict()

    def of(self, shape: Shape) -> list[float]:
        """Milliseconds of each piece; those of a new shape are scaled from the one nearest in size.

        The list is the one that `learn` moves on; without any measurement it is of zeros.
        """
        if shape not in self._times:
            self._times[shape] = self._scaled(shape)
            if len(self._times) > MAX_SHAPES:
                self._times.popitem(last=False)
        self._times.move_to_end(shape)
        return self._times[shape]

    def _scaled(self, shape: Shape) -> list[float]:
        if not self._times:
            return [0.0] * self._num_pieces
        size = _size(shape)
        nearest = min(self._times, key=lambda known: abs(_size(known) - size))
        return [ms * size / _size(nearest) for ms in self._times[nearest]]

    def learn(self, shape: Shape, piece: int, measured_ms: float) -> None:
        """Move a piece's time towards what was measured.

        why: down faster than up, since what disturbs a measurement (a kernel's first run at a shape,
        another process) makes it longer, never shorter.
        """
        times = self.of(shape)
        known = times[piece]
        share = 1.0 if known == 0.0 else FALLS if measured_ms < known else RISES
        times[piece] = known + share * (measured_ms - known)


class LayerTurns:
    """Has a loaded ultralytics model ask a gate for the device, layer by layer.

    The pieces are the layers of a native model, between any two of which the device may be given away;
    an exported model is one piece. What is computed stays the same: the model's own code runs, and waits
    in hooks between its layers.

    Args:
        backend: ultralytics' ``AutoBackend``, as a predictor holds it once it has run.
        gate: who lends the device; may be replaced between two forward passes.
    """

    def __init__(self, backend: Any, gate: DeviceGate | None = None) -> None:
        self.gate: DeviceGate = gate or FreeDevice()
        layers = _layers(backend)
        self.num_pieces = max(1, len(layers))
        self._device = backend.device
        self._times = PieceTimes(self.num_pieces)
        self._shape: Shape = ()
        self._piece = self._granted = 0
        self._started_s = 0.0
        self._hooks = [
            backend.register_forward_pre_hook(self._begin),
            backend.register_forward_hook(self._finish, always_call=True),
            *(layer.register_forward_pre_hook(self._at_border) for layer in layers[1:]),
        ]

    def remove(self) -> None:
        """Let the model compute without asking."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: Any, inputs: tuple[Any, ...]) -> None:
        self._shape = tuple(inputs[0].shape)
        self._piece = self._granted = 0
        self._acquire()

    def _at_border(self, module: Any, inputs: tuple[Any, ...]) -> None:
        self._end_piece()
        if self._piece == self._granted:
            self.gate.release()
            self._acquire()

    def _finish(self, module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """invariant: also called when the forward pass raised, so that the device is always given back."""
        self._end_piece()
        self.gate.release()

    def _acquire(self) -> None:
        self._granted = self._piece + self.gate.acquire(self._times.of(self._shape)[self._piece :])
        self._started_s = time.perf_counter()

    def _end_piece(self) -> None:
        self._synchronize()
        now = time.perf_counter()
        self._times.learn(self._shape, self._piece, 1e3 * (now - self._started_s))
        self._piece, self._started_s = self._piece + 1, now

    def _synchronize(self) -> None:
        """Wait for the GPU: the device is given back when the work is done, not when it is queued."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)


def _layers(backend: Any) -> Sequence[Any]:
    """The layers that a native model runs in order; none of a model that cannot be stopped in between."""
    is_native = backend.format == "pt" and getattr(backend, "base_model", False)
    return list(backend.model.model) if is_native else []


def _size(shape: Shape) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
