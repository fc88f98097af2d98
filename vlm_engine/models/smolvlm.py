"""SmolVLM, SmolVLM2 and Idefics3: a SigLIP tower over tiles, a pixel shuffle, a Llama decoder."""

from typing import Any

import torch
from torch import Tensor

from vlm_engine.models.base import ModelSpec
from vlm_engine.models.decoder import DecoderModel
from vlm_engine.models.packing import pack_tower
from vlm_engine.models.siglip import SiglipTower
from vlm_engine.models.smolvlm_prompt import SmolVLMPrompts
from vlm_engine.models.tile_tower import Grid, TileTower
from vlm_engine.models.tiles import in_token_order


def smolvlm(model: Any, prompts: SmolVLMPrompts, spec: ModelSpec) -> DecoderModel:
    """Adapter over ``SmolVLMForConditionalGeneration`` or ``Idefics3ForConditionalGeneration``."""
    tower = TileTower(SiglipParts(model.model, spec), spec)
    return DecoderModel(model.model.text_model, model.lm_head, tower, prompts, spec)


class SiglipParts(SiglipTower):
    """Tower and connector of a stock model; see `TileParts`.

    Args:
        model: The stock model without its head.
        spec: The model's numbers.
    """

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        super().__init__(model.vision_model, spec)
        self._connector = model.connector
        self.scale = int(self._connector.scale_factor)
        self.text_width = int(self._connector.modality_projection.proj.out_features)
        if spec.use_kernels:
            pack_tower(self._layers, [self._connector])

    def positions(self, grid: Grid) -> Tensor:
        """Learned positions of a full tile's patches, ``[rows * columns]``."""
        side = int(self._vision.embeddings.num_patches_per_side)
        rows, columns = (learned_positions(count, side, self._device) for count in grid[1:])
        return in_token_order(rows[:, None] * side + columns, self.scale)

    def merge(self, hidden: Tensor) -> Tensor:
        """Last norm, pixel shuffle (a view in this order of rows) and projection."""
        normed = self._vision.post_layernorm(hidden)
        tokens = normed.view(len(normed) // self.scale**2, -1)
        return self._connector.modality_projection(tokens)  # type: ignore[no-any-return]


def learned_positions(count: int, num_per_side: int, device: torch.device) -> Tensor:
    """Which of the positions learned along a side each of `count` patches takes, ``[count]``.

    why: the same float32 steps as the stock embedding, since a rounding decides between neighbours.
    """
    boundaries = torch.arange(1 / num_per_side, 1.0, 1 / num_per_side, device=device)
    step = 1.0 / torch.tensor(count, device=device)
    places = (torch.arange(count, dtype=torch.float32, device=device) * step).clamp(max=1.0 - 1e-6)
    return torch.bucketize(places, boundaries, right=True)
