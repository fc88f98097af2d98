"""SmolVLM, SmolVLM2 and Idefics3: a SigLIP tower over tiles, a pixel shuffle, a Llama decoder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from vlm_engine.models.base import ImageInput, ModelSpec
from vlm_engine.models.decoder import DecoderModel
from vlm_engine.models.packing import pack_tower
from vlm_engine.models.smolvlm_prompt import SmolVLMPrompts
from vlm_engine.models.tower import MOST_ROWS, rows_per_slice_on
from vlm_engine.models.tower_attention import TowerAttention, make_attention
from vlm_engine.native.ops import NativeLinear, can_pack
from vlm_engine.slices import Slice, TowerLayout, cut, joined

Grid = tuple[int, int, int]


def smolvlm(model: Any, prompts: SmolVLMPrompts, spec: ModelSpec) -> DecoderModel:
    """Adapter over ``SmolVLMForConditionalGeneration`` or ``Idefics3ForConditionalGeneration``."""
    return DecoderModel(model.model.text_model, model.lm_head, TileTower(model.model, spec), prompts, spec)


@dataclass(slots=True, eq=False)
class TileState:
    """One tile on its way through the tower.

    Args:
        pixels: ``[num_rows, patch_dim]``, the patches of an image token together.
        positions: ``[num_rows]``, which learned position each patch has.
        hidden: ``[num_rows, hidden]``, after the slices run so far.
        attention: Queries, keys and values of the block at hand.
        output: ``[num_tokens, text_hidden]``, filled by the last stage.
    """

    pixels: Tensor
    positions: Tensor
    hidden: Tensor
    attention: TowerAttention
    output: Tensor


class TileTower:
    """Runs the stock tower and connector on one tile, slice by slice, with their weights.

    Rows stand in the order of the image tokens, not of the picture, so that a token's patches are
    a range of memory; to attention without positions of its own the order means nothing.

    Args:
        model: The stock model without its head.
        spec: The model's numbers.
        rows_per_slice: About how many patches a slice has.
    """

    def __init__(self, model: Any, spec: ModelSpec, rows_per_slice: int | None = None) -> None:
        self._vision = model.vision_model
        self._connector = model.connector
        self._spec = spec
        self._scale = int(model.connector.scale_factor)
        self._layers = self._vision.encoder.layers
        self._projections = [_joined_projection(layer.self_attn, spec) for layer in self._layers]
        if spec.use_kernels:
            pack_tower(self._layers, [self._connector])
        size = rows_per_slice or rows_per_slice_on(spec.device)
        self._stages: dict[str, Callable[[TileState, Slice], None]] = {
            "embed": self._embed,
            "keys": self._keys,
            "rows": self._rows,
            "merge": self._merge,
        }
        self._slices = lru_cache(64)(lambda grid: cut(self.layout(grid), size))
        self._positions = lru_cache(64)(self._make_positions)

    def slices(self, image: ImageInput) -> tuple[Slice, ...]:
        """The slices of a tile, in the order in which to run them."""
        return self._slices(image.grid)

    def layout(self, grid: Grid) -> TowerLayout:
        """What slicing needs to know of a tile of this grid."""
        num_rows, depth = grid[1] * grid[2], len(self._layers)
        return TowerLayout(
            num_rows=num_rows,
            merge_unit=self._scale**2,
            frames=(num_rows,),
            windows=None,
            full_blocks=(True,) * depth,
            merges_after=(depth - 1,),
        )

    @torch.inference_mode()
    def start(self, image: ImageInput) -> TileState:
        """Make a tile ready for its first slice."""
        num_rows, attention = len(image.pixels), self._layers[0].self_attn
        pixels = image.pixels.to(self._spec.device, self._spec.dtype)
        width = self._connector.modality_projection.proj.out_features
        return TileState(
            pixels,
            self._positions(image.grid),
            pixels.new_empty(num_rows, attention.embed_dim),
            make_attention(attention.num_heads, num_rows, attention.head_dim, self._spec),
            pixels.new_empty(num_rows // self._scale**2, width),
        )

    def _make_positions(self, grid: Grid) -> Tensor:
        """Learned positions of a full tile's patches, ``[rows * columns]`` in the order of the rows."""
        side, scale = int(self._vision.embeddings.num_patches_per_side), self._scale
        rows, columns = (learned_positions(count, side, self._spec.device) for count in grid[1:])
        table = (rows[:, None] * side + columns).view(grid[1] // scale, scale, grid[2] // scale, scale)
        return table.transpose(1, 2).flatten()

    @torch.inference_mode()
    def run(self, state: TileState, slices: Sequence[Slice]) -> None:
        """Run slices; those of a tile in the order of `slices`, none left out."""
        for part in joined(slices, MOST_ROWS, ()):
            self._stages[part.stage](state, part)

    def features(self, state: TileState) -> tuple[Tensor, ...]:
        """Embeddings of the tile once all slices ran: ``[num_tokens, text_hidden]``."""
        return (state.output,)

    # -- the stages -----------------------------------------------------------------------------

    def _embed(self, state: TileState, part: Slice) -> None:
        """Patches to rows; a convolution whose stride is its kernel is a matrix product."""
        embeddings, rows = self._vision.embeddings, slice(part.start, part.end)
        proj = embeddings.patch_embedding
        state.hidden[rows] = linear(state.pixels[rows], proj.weight.flatten(1), proj.bias)
        state.hidden[rows] += embeddings.position_embedding(state.positions[rows])

    def _keys(self, state: TileState, part: Slice) -> None:
        layer = self._layers[part.index]
        normed = layer.layer_norm1(state.hidden[part.start : part.end])
        state.attention.put(self._projections[part.index](normed), part.start, None)

    def _rows(self, state: TileState, part: Slice) -> None:
        """Attention, output projection, residuals and MLP of the slice's rows, in place."""
        layer, rows = self._layers[part.index], slice(part.start, part.end)
        attended = state.attention.rows(part.start, part.end, (0, len(state.hidden)))
        hidden = state.hidden[rows] + layer.self_attn.out_proj(attended.flatten(1))
        state.hidden[rows] = hidden + layer.mlp(layer.layer_norm2(hidden))

    def _merge(self, state: TileState, part: Slice) -> None:
        """Last norm, pixel shuffle (a view in this order of rows) and projection."""
        unit = self._scale**2
        normed = self._vision.post_layernorm(state.hidden[part.start : part.end])
        merged = self._connector.modality_projection(normed.view(len(normed) // unit, -1))
        state.output[part.start // unit : part.end // unit] = merged


def _joined_projection(attention: Any, spec: ModelSpec) -> Callable[[Tensor], Tensor]:
    """From normed rows to queries, keys and values side by side."""
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    if spec.use_kernels and all(map(can_pack, layers)):
        attention.q_proj = attention.k_proj = attention.v_proj = None
        return NativeLinear(*layers)
    return lambda normed: torch.cat([layer(normed) for layer in layers], dim=-1)


def learned_positions(count: int, num_per_side: int, device: torch.device) -> Tensor:
    """Which of the positions learned along a side each of `count` patches takes, ``[count]``.

    why: the same float32 steps as the stock embedding, since a rounding decides between neighbours.
    """
    boundaries = torch.arange(1 / num_per_side, 1.0, 1 / num_per_side, device=device)
    step = 1.0 / torch.tensor(count, device=device)
    places = (torch.arange(count, dtype=torch.float32, device=device) * step).clamp(max=1.0 - 1e-6)
    return torch.bucketize(places, boundaries, right=True)
