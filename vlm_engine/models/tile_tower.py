"""Vision towers over tiles, run slice by slice with the stock modules' weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from vlm_engine.models.base import ImageInput, ModelSpec
from vlm_engine.models.tower import MOST_ROWS, rows_per_slice_on
from vlm_engine.models.tower_attention import TowerAttention, make_attention
from vlm_engine.native.ops import NativeLinear, can_pack
from vlm_engine.slices import Slice, TowerLayout, cut, joined

Grid = tuple[int, int, int]


class TileParts(Protocol):
    """A family's tower and connector: what each does to rows, all of it row by row.

    Attributes:
        num_blocks: Blocks of the tower.
        num_heads: Heads of its attention.
        head_dim: Size of a head.
        scale: Patches of an image token's side.
        text_width: Size of an image embedding.
        extra_rows: ``[n, hidden]``, rows behind the patches to which all attend and that become no token.
    """

    num_blocks: int
    num_heads: int
    head_dim: int
    scale: int
    text_width: int
    extra_rows: Tensor

    def positions(self, grid: Grid) -> Tensor:
        """Which learned position each patch of a tile has, ``[num_patches]`` in the order of the rows."""

    def embed(self, pixels: Tensor, positions: Tensor) -> Tensor:
        """``[n, patch_dim]`` and ``[n]`` to ``[n, hidden]``."""

    def project(self, block: int, hidden: Tensor) -> Tensor:
        """Norm, then queries, keys and values side by side: ``[n, 3 * num_heads * head_dim]``."""

    def finish(self, block: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residuals and MLP of a block; ``[n, hidden]``, as both arguments."""

    def merge(self, hidden: Tensor) -> Tensor:
        """Last norm, pixel shuffle and projection: ``[n * scale * scale, hidden]`` to ``[n, text_width]``."""


@dataclass(slots=True, eq=False)
class TileState:
    """One tile on its way through the tower.

    Args:
        pixels: ``[num_patches, patch_dim]``, the patches of an image token together.
        positions: ``[num_patches]``, which learned position each patch has.
        hidden: ``[num_rows, hidden]``, after the slices run so far.
        attention: Queries, keys and values of the block at hand.
        output: ``[num_tokens, text_width]``, filled by the last stage.
    """

    pixels: Tensor
    positions: Tensor
    hidden: Tensor
    attention: TowerAttention
    output: Tensor


class TileTower:
    """Runs a tower and its connector on one tile, slice by slice.

    Rows stand in the order of the image tokens, not of the picture, so that a token's patches are
    a range of memory; to attention without positions of its own the order means nothing.

    Args:
        parts: The family's tower and connector.
        spec: The model's numbers.
        rows_per_slice: About how many rows a slice has.
    """

    def __init__(self, parts: TileParts, spec: ModelSpec, rows_per_slice: int | None = None) -> None:
        self._parts = parts
        self._spec = spec
        self._unit = parts.scale**2
        self._size = rows_per_slice or rows_per_slice_on(spec.device)
        self._stages: dict[str, Callable[[TileState, Slice], None]] = {
            "embed": self._embed,
            "keys": self._keys,
            "rows": self._rows,
            "merge": self._merge,
        }
        self._slices = lru_cache(64)(self._cut)
        self._positions = lru_cache(64)(parts.positions)

    def slices(self, image: ImageInput) -> tuple[Slice, ...]:
        """The slices of a tile, in the order in which to run them."""
        return self._slices(image.grid)

    def _cut(self, grid: Grid) -> tuple[Slice, ...]:
        layout = self.layout(grid)
        # why: slices of one size, so that a single row behind the patches is no slice of its own
        size = -(-layout.num_rows // max(1, round(layout.num_rows / self._size)))
        return cut(layout, -(-size // self._unit) * self._unit)

    def layout(self, grid: Grid) -> TowerLayout:
        """What slicing needs to know of a tile of this grid."""
        num_rows, depth = grid[1] * grid[2] + len(self._parts.extra_rows), self._parts.num_blocks
        return TowerLayout(
            num_rows=num_rows,
            merge_unit=self._unit,
            frames=(num_rows,),
            windows=None,
            full_blocks=(True,) * depth,
            merges_after=(depth - 1,),
        )

    @torch.inference_mode()
    def start(self, image: ImageInput) -> TileState:
        """Make a tile ready for its first slice."""
        parts, num_patches = self._parts, len(image.pixels)
        pixels = image.pixels.to(self._spec.device, self._spec.dtype)
        hidden = torch.cat([pixels.new_empty(num_patches, parts.extra_rows.shape[1]), parts.extra_rows])
        return TileState(
            pixels,
            self._positions(image.grid),
            hidden,
            make_attention(parts.num_heads, len(hidden), parts.head_dim, self._spec),
            pixels.new_empty(num_patches // self._unit, parts.text_width),
        )

    @torch.inference_mode()
    def run(self, state: TileState, slices: Sequence[Slice]) -> None:
        """Run slices; those of a tile in the order of `slices`, none left out."""
        for part in joined(slices, MOST_ROWS, ()):
            self._stages[part.stage](state, part)

    def features(self, state: TileState) -> tuple[Tensor, ...]:
        """Embeddings of the tile once all slices ran: ``[num_tokens, text_width]``."""
        return (state.output,)

    def _embed(self, state: TileState, part: Slice) -> None:
        rows = slice(part.start, min(part.end, len(state.pixels)))
        state.hidden[rows] = self._parts.embed(state.pixels[rows], state.positions[rows])

    def _keys(self, state: TileState, part: Slice) -> None:
        projected = self._parts.project(part.index, state.hidden[part.start : part.end])
        state.attention.put(projected, part.start, None)

    def _rows(self, state: TileState, part: Slice) -> None:
        rows = slice(part.start, part.end)
        attended = state.attention.rows(part.start, part.end, (0, len(state.hidden)))
        state.hidden[rows] = self._parts.finish(part.index, state.hidden[rows], attended.flatten(1))

    def _merge(self, state: TileState, part: Slice) -> None:
        end = min(part.end, len(state.pixels))
        if part.start < end:
            tokens = slice(part.start // self._unit, end // self._unit)
            state.output[tokens] = self._parts.merge(state.hidden[part.start : end])


def joined_projection(attention: Any, spec: ModelSpec) -> Callable[[Tensor], Tensor]:
    """From normed rows to queries, keys and values side by side."""
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    if spec.use_kernels and all(map(can_pack, layers)):
        attention.q_proj = attention.k_proj = attention.v_proj = None
        return NativeLinear(*layers)
    return lambda normed: torch.cat([layer(normed) for layer in layers], dim=-1)
