"""The Qwen-VL vision towers, run slice by slice with the stock modules' weights.

Exactly the stock tower in another order: rows are put into window order at the start, so that a
range of rows is a range of memory, and each slice writes its rows in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from vlm_engine.models.base import ImageInput, ModelSpec
from vlm_engine.models.packing import pack_tower
from vlm_engine.models.tower_attention import TowerAttention, make_attention
from vlm_engine.slices import Slice, TowerLayout, cut, joined, segments_between

Grid = tuple[int, int, int]
ROWS_ON_CPU = 256
ROWS_ON_GPU = 65536
MOST_ROWS = 1024


@dataclass(slots=True, eq=False)
class EncoderState:
    """One image on its way through the tower.

    Args:
        layout: Tower and image.
        pixels: ``[num_rows, patch_dim]`` in the order of the rows.
        hidden: ``[num_rows, hidden]``, after the slices run so far.
        cos: ``[num_rows, 1, head_dim]``, float32.
        sin: As `cos`.
        attention: Queries, keys and values of the block at hand.
        outputs: ``[num_tokens, out_hidden]`` for each merger, filled as it is run.
        restore: Order of the tokens that undoes the window order, if there is one.
        position_embeds: ``[num_rows, hidden]``, where the tower learns positions.
    """

    layout: TowerLayout
    pixels: Tensor
    hidden: Tensor
    cos: Tensor
    sin: Tensor
    attention: TowerAttention
    outputs: list[Tensor] = field(default_factory=list)
    restore: Tensor | None = None
    position_embeds: Tensor | None = None


class QwenTower:
    """Runs the tower of Qwen2-VL, Qwen2.5-VL or Qwen3-VL in slices.

    Args:
        visual: The stock tower.
        spec: The model's numbers.
        rows_per_slice: About how many patches a slice has; a slice is the shortest time for which
            a chat can be held up, and a larger one costs less in all.
    """

    def __init__(self, visual: Any, spec: ModelSpec, rows_per_slice: int | None = None) -> None:
        self._visual = visual
        self._spec = spec
        size = rows_per_slice or rows_per_slice_on(spec.device)
        self._unit = int(visual.spatial_merge_size) ** 2
        self._is_windowed = hasattr(visual, "fullatt_block_indexes")
        self._mergers = [visual.merger, *getattr(visual, "deepstack_merger_list", ())]
        if spec.use_kernels:
            pack_tower(visual.blocks, self._mergers)
        self._stages: dict[str, Callable[[EncoderState, Slice], None]] = {
            "embed": self._embed,
            "keys": self._keys,
            "rows": self._rows,
            "windows": self._windows_stage,
            "merge": self._merge,
        }
        self._slices = lru_cache(64)(lambda grid: cut(self.layout(grid), size))

    def slices(self, image: ImageInput) -> tuple[Slice, ...]:
        """The slices of an image, in the order in which to run them."""
        return self._slices(image.grid)

    def layout(self, grid: Grid) -> TowerLayout:
        """What slicing needs to know of an image of this grid."""
        visual, depth = self._visual, len(self._visual.blocks)
        num_frames, area = grid[0], grid[1] * grid[2]
        full = range(depth) if not self._is_windowed else visual.fullatt_block_indexes
        deepstack = getattr(visual, "deepstack_visual_indexes", ())
        return TowerLayout(
            num_rows=num_frames * area,
            merge_unit=self._unit,
            frames=tuple(area * (i + 1) for i in range(num_frames)),
            windows=tuple(self._windows(grid)[1][1:].tolist()) if self._is_windowed else None,
            full_blocks=tuple(block in full for block in range(depth)),
            merges_after=(depth - 1, *deepstack),
        )

    def _windows(self, grid: Grid) -> tuple[Tensor, Tensor]:
        visual = self._visual
        return get_vision_window_index(  # type: ignore[no-any-return]
            torch.tensor([grid]), visual.spatial_merge_size, visual.window_size, visual.patch_size
        )

    @torch.inference_mode()
    def start(self, image: ImageInput) -> EncoderState:
        """Make an image ready for its first slice."""
        visual, grid = self._visual, torch.tensor([image.grid])
        dtype, device = self._spec.dtype, self._spec.device
        num_rows = len(image.pixels)
        order = self._row_order(image.grid)
        pixels = image.pixels if order is None else image.pixels[order]
        position_ids = get_vision_position_ids(grid, visual.spatial_merge_size)
        if order is not None:
            position_ids = position_ids[order]
        blocks = visual.blocks
        hidden = torch.empty(num_rows, blocks[0].attn.dim, dtype=dtype, device=device)
        cos, sin = visual.rotary_pos_emb(hidden, position_ids.to(device))
        heads = blocks[0].attn.num_heads
        return EncoderState(
            self.layout(image.grid),
            pixels.to(device, dtype),
            hidden,
            cos[:, None].float(),
            sin[:, None].float(),
            make_attention(heads, num_rows, hidden.shape[1] // heads, self._spec),
            [torch.empty(0)] * len(self._mergers),
            None if order is None else torch.argsort(order[:: self._unit] // self._unit).to(device),
            self._position_embeds(grid, device),
        )

    def _row_order(self, grid: Grid) -> Tensor | None:
        """Patches in window order, those of one image token together; None for the given order."""
        if not self._is_windowed:
            return None
        tokens = self._windows(grid)[0]
        return (tokens[:, None] * self._unit + torch.arange(self._unit)).flatten()

    def _position_embeds(self, grid: Tensor, device: torch.device) -> Tensor | None:
        visual = self._visual
        if not hasattr(visual, "pos_embed"):
            return None
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=visual.spatial_merge_size,
        )
        taps = visual.pos_embed(indices.to(device)) * weights.to(device)[:, :, None]
        return taps.sum(1)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def run(self, state: EncoderState, slices: Sequence[Slice]) -> None:
        """Run slices; those of an image in the order of `slices`, none left out."""
        for part in joined(slices, MOST_ROWS, state.layout.frames):
            self._stages[part.stage](state, part)

    def features(self, state: EncoderState) -> tuple[Tensor, ...]:
        """Embeddings of the image once all slices ran: ``[num_tokens, out_hidden]`` each."""
        if state.restore is None:
            return tuple(state.outputs)
        return tuple(output[state.restore] for output in state.outputs)

    def _embed(self, state: EncoderState, part: Slice) -> None:
        """Patches to rows; a convolution whose stride is its kernel is a matrix product."""
        proj, rows = self._visual.patch_embed.proj, slice(part.start, part.end)
        state.hidden[rows] = linear(state.pixels[rows], proj.weight.flatten(1), proj.bias)
        if state.position_embeds is not None:
            state.hidden[rows] += state.position_embeds[rows].to(state.hidden.dtype)

    def _keys(self, state: EncoderState, part: Slice) -> None:
        block, rows = self._visual.blocks[part.index], slice(part.start, part.end)
        qkv = block.attn.qkv(block.norm1(state.hidden[rows]))
        state.attention.put(qkv, part.start, (state.cos[rows], state.sin[rows]))

    def _rows(self, state: EncoderState, part: Slice) -> None:
        ends = state.layout.frames
        end = next(stop for stop in ends if stop >= part.end)
        begin = max((stop for stop in ends if stop <= part.start), default=0)
        self._finish_rows(state, part, state.attention.rows(part.start, part.end, (begin, end)))

    def _windows_stage(self, state: EncoderState, part: Slice) -> None:
        self._keys(state, part)
        windows = state.layout.windows
        assert windows is not None, "a windowed slice in a tower without windows"
        segments = segments_between(windows, part.start, part.end)
        self._finish_rows(state, part, state.attention.windows(segments))

    def _finish_rows(self, state: EncoderState, part: Slice, attended: Tensor) -> None:
        """Output projection, residuals and MLP of the slice's rows, in place."""
        block, rows = self._visual.blocks[part.index], slice(part.start, part.end)
        hidden = state.hidden[rows] + block.attn.proj(attended.flatten(1))
        state.hidden[rows] = hidden + block.mlp(block.norm2(hidden))

    def _merge(self, state: EncoderState, part: Slice) -> None:
        merged = self._mergers[part.index](state.hidden[part.start : part.end])
        if not part.start:
            num_tokens = state.layout.num_rows // self._unit
            state.outputs[part.index] = merged.new_empty(num_tokens, merged.shape[1])
        state.outputs[part.index][part.start // self._unit : part.end // self._unit] = merged


def rows_per_slice_on(device: torch.device) -> int:
    """Rows of a slice that a device computes in a few milliseconds."""
    return ROWS_ON_CPU if device.type == "cpu" else ROWS_ON_GPU
