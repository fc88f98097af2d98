"""Gemma 3: a SigLIP tower, mean pooling, a decoder most of whose layers have a window."""

from typing import Any

import torch
from torch import Tensor

from vlm_engine.errors import UnsupportedModel
from vlm_engine.models.base import ModelSpec
from vlm_engine.models.decoder import DecoderModel
from vlm_engine.models.gemma3_prompt import Gemma3Prompts
from vlm_engine.models.packing import pack_tower
from vlm_engine.models.siglip import SiglipTower
from vlm_engine.models.text import TextPrompts, text_model
from vlm_engine.models.tile_tower import Grid, TileTower
from vlm_engine.models.tiles import in_token_order

TOWER = "siglip_vision_model"


def gemma3(model: Any, prompts: Gemma3Prompts, spec: ModelSpec) -> DecoderModel:
    """Adapter over ``Gemma3ForConditionalGeneration``.

    Raises:
        UnsupportedModel: Its tower or decoder is of another kind.
    """
    kind = model.config.vision_config.model_type
    if kind != TOWER:
        raise UnsupportedModel(f"{spec.name}: a tower of kind {kind!r} is not supported, {TOWER!r} is")
    _check_decoder(model.config.text_config, spec)
    base = model.model
    tower = TileTower(Gemma3Parts(base, spec), spec)
    # why: no cap on logits, as the stock model with images, which has none whatever its configuration says
    return DecoderModel(base.language_model, model.lm_head, tower, prompts, spec)


def gemma3_text(model: Any, prompts: TextPrompts, spec: ModelSpec) -> DecoderModel:
    """Adapter over ``Gemma3ForCausalLM``.

    Raises:
        UnsupportedModel: Its decoder is of another kind.
    """
    _check_decoder(model.config, spec)
    return text_model(model, prompts, spec)


def _check_decoder(text: Any, spec: ModelSpec) -> None:
    for name in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if getattr(text, name):
            raise UnsupportedModel(f"{spec.name}: decoders with {name} are not supported")


class Gemma3Parts(SiglipTower):
    """Tower and projector of a stock model; see `TileParts`.

    Args:
        model: The stock model without its head.
        spec: The model's numbers.
    """

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        super().__init__(model.vision_tower, spec)
        self._projector = model.multi_modal_projector
        self.scale = int(self._projector.kernel_size)
        self.text_width = int(self._projector.mm_input_projection_weight.shape[1])
        if spec.use_kernels:
            pack_tower(self._layers, [])

    def positions(self, grid: Grid) -> Tensor:
        """Learned positions of a picture's patches, ``[rows * columns]``."""
        table = torch.arange(grid[1] * grid[2], device=self._device)
        return in_token_order(table.view(grid[1], grid[2]), self.scale)

    def merge(self, hidden: Tensor) -> Tensor:
        """Last norm, mean of a token's patches (neighbours in this order of rows), norm and projection."""
        normed = self._vision.post_layernorm(hidden)
        pooled = normed.view(len(normed) // self.scale**2, self.scale**2, -1).mean(1)
        projector = self._projector
        return projector.mm_soft_emb_norm(pooled) @ projector.mm_input_projection_weight  # type: ignore[no-any-return]
