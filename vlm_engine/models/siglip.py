"""SigLIP's tower, as SmolVLM, Idefics3 and Gemma 3 hold it: what it does to rows of patches."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from vlm_engine.models.base import ModelSpec
from vlm_engine.models.tile_tower import joined_projection


class SiglipTower:
    """The part of `TileParts` that is the tower's own; connectors add theirs.

    Args:
        vision: The stock tower.
        spec: The model's numbers.
    """

    def __init__(self, vision: Any, spec: ModelSpec) -> None:
        self._vision = vision
        self._layers = vision.encoder.layers
        self._device = spec.device
        attention = self._layers[0].self_attn
        self.num_blocks = len(self._layers)
        self.num_heads = int(attention.num_heads)
        self.head_dim = int(attention.head_dim)
        self.extra_rows = torch.empty(0, attention.embed_dim, dtype=spec.dtype, device=spec.device)
        self._projections = [joined_projection(layer.self_attn, spec) for layer in self._layers]

    def embed(self, pixels: Tensor, positions: Tensor) -> Tensor:
        """Patches to rows; a convolution whose stride is its kernel is a matrix product."""
        embeddings = self._vision.embeddings
        proj = embeddings.patch_embedding
        patches = linear(pixels, proj.weight.flatten(1), proj.bias)
        return patches + embeddings.position_embedding(positions)  # type: ignore[no-any-return]

    def project(self, block: int, hidden: Tensor) -> Tensor:
        """See `TileParts`."""
        return self._projections[block](self._layers[block].layer_norm1(hidden))

    def finish(self, block: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """See `TileParts`."""
        layer = self._layers[block]
        hidden = hidden + layer.self_attn.out_proj(attended)
        return hidden + layer.mlp(layer.layer_norm2(hidden))  # type: ignore[no-any-return]
