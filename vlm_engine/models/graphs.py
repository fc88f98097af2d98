"""CUDA graphs of decode steps: recorded once for each number of sequences, then replayed."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlm_engine.attention import AttentionMetadata
from vlm_engine.kv_cache import KVCache
from vlm_engine.models.base import ImageRows
from vlm_engine.varlen import VarlenLayout

log = logging.getLogger(__name__)

Stack = Callable[[Tensor, Tensor, Sequence[ImageRows], AttentionMetadata], Tensor]
Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], Any]]]
WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A graph and the tensors that it reads and writes, for `size` sequences."""

    embeds: Tensor
    positions: Tensor
    paged: AttentionMetadata
    output: Tensor
    replay: Callable[[], Any]


class GraphStack:
    """Decodes by replaying graphs; all other steps run as they are.

    A step of n sequences is filled up to the next power of two: rows without a sequence write to the cache's
    spare block and read it. Where recording fails, the log says so and decodes run as they are too.

    Args:
        stack: What runs a step, on the variable-length kernel with a block table.
        max_model_len: Positions of the longest sequence.
        capture: Records a function that reads and writes the same tensors each time; gives what it
            returns, and what replays it.
    """

    def __init__(self, stack: Stack, max_model_len: int, capture: Capture | None = None) -> None:
        self._stack = stack
        self._max_model_len = max_model_len
        self._capture = capture or capture_cuda
        self._recorded: dict[int, _Recorded] = {}
        self._is_off = False

    def __call__(
        self, embeds: Tensor, positions: Tensor, images: Sequence[ImageRows], paged: AttentionMetadata
    ) -> Tensor:
        """See `vlm_engine.models.stack.DecoderStack`."""
        layout = paged.varlen
        is_decode = layout is not None and layout.block_table is not None and layout.max_queries == 1
        if self._is_off or images or not is_decode or paged.cache.spare_block is None:
            return self._stack(embeds, positions, images, paged)
        size = 1 << (len(embeds) - 1).bit_length()
        recorded = self._recorded.get(size) or self._record(size, embeds, positions, paged)
        if recorded is None:
            return self._stack(embeds, positions, images, paged)
        _fill(recorded, embeds, positions, paged)
        recorded.replay()
        return recorded.output[: len(embeds)]

    def _record(
        self, size: int, embeds: Tensor, positions: Tensor, paged: AttentionMetadata
    ) -> _Recorded | None:
        own_embeds = embeds.new_zeros(size, embeds.shape[1])
        own_positions = positions.new_zeros(*positions.shape[:-1], size)
        own_paged = self._empty_step(size, paged)
        try:
            output, replay = self._capture(lambda: self._stack(own_embeds, own_positions, (), own_paged))
        except RuntimeError as error:
            log.warning("decode steps run without CUDA graphs: %s", str(error).splitlines()[0])
            self._is_off = True
            return None
        self._recorded[size] = _Recorded(own_embeds, own_positions, own_paged, output, replay)
        return self._recorded[size]

    def _empty_step(self, size: int, paged: AttentionMetadata) -> AttentionMetadata:
        """A step of `size` rows without a sequence, whose tensors stay where they are."""
        device, width = paged.write_slots.device, -(-self._max_model_len // paged.block_size)
        ramp, spare = torch.arange(size + 1, dtype=torch.int32, device=device), _spare(paged.cache)
        layout = VarlenLayout(
            ramp,
            ramp.clone(),
            1,
            width * paged.block_size,
            torch.ones(size, dtype=torch.int32, device=device),
            torch.full((size, width), spare, dtype=torch.int32, device=device),
        )
        slots = torch.full((size,), spare * paged.block_size, dtype=torch.long, device=device)
        return AttentionMetadata(paged.cache, (), (), slots, paged.block_size, layout)


def _spare(cache: KVCache) -> int:
    assert cache.spare_block is not None, "graphs need a spare block"
    return cache.spare_block


def _fill(recorded: _Recorded, embeds: Tensor, positions: Tensor, paged: AttentionMetadata) -> None:
    """Put a step into the recorded tensors; the rows behind it become rows without a sequence."""
    num_rows = len(embeds)
    own, layout, spare = recorded.paged.varlen, paged.varlen, _spare(paged.cache)
    assert own is not None
    assert layout is not None
    recorded.embeds[:num_rows] = embeds
    recorded.positions[..., :num_rows] = positions
    slots = recorded.paged.write_slots
    slots.fill_(spare * paged.block_size)
    slots[:num_rows] = paged.write_slots
    _fill_layout(own, layout, num_rows, spare)


def _fill_layout(own: VarlenLayout, layout: VarlenLayout, num_rows: int, spare: int) -> None:
    assert own.num_keys is not None
    assert layout.num_keys is not None
    assert own.block_table is not None
    assert layout.block_table is not None
    own.num_keys.fill_(1)
    own.num_keys[:num_rows] = layout.num_keys
    own.cu_keys[1:] = own.num_keys.cumsum(0)
    own.block_table.fill_(spare)
    own.block_table[:num_rows, : layout.block_table.shape[1]] = layout.block_table


def capture_cuda(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Any]]:
    """Record `run` after a few warm-up calls on a stream of its own, as torch's documentation asks."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return output, graph.replay
