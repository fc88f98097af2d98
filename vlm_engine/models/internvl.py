"""InternVL in transformers' own format: a ViT with a class token over tiles, a pixel shuffle, a decoder."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from vlm_engine.errors import UnsupportedModel
from vlm_engine.models.base import ModelSpec
from vlm_engine.models.decoder import DecoderModel
from vlm_engine.models.internvl_prompt import InternVLPrompts
from vlm_engine.models.packing import pack_tower
from vlm_engine.models.tile_tower import Grid, TileTower, joined_projection
from vlm_engine.models.tiles import in_token_order

DECODERS = ("llama", "qwen2", "qwen3")


def internvl(model: Any, prompts: InternVLPrompts, spec: ModelSpec) -> DecoderModel:
    """Adapter over ``InternVLForConditionalGeneration``.

    Raises:
        UnsupportedModel: Its decoder is of another kind, or image tokens are not made of the last layer.
    """
    config, base = model.config, model.model
    if config.text_config.model_type not in DECODERS:
        raise UnsupportedModel(
            f"{spec.name}: decoder {config.text_config.model_type!r} is not supported; "
            f"supported are {', '.join(DECODERS)}"
        )
    taken = (config.vision_feature_layer, config.vision_feature_select_strategy)
    if taken != (-1, "default"):
        raise UnsupportedModel(
            f"{spec.name}: image tokens made of {taken} are not supported, of (-1, 'default') are"
        )
    tower = TileTower(InternVLParts(base, spec), spec)
    return DecoderModel(base.language_model, model.lm_head, tower, prompts, spec)


class InternVLParts:
    """Tower and projector of a stock model; see `TileParts`.

    Args:
        model: The stock model without its head.
        spec: The model's numbers.
    """

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        self._vision, self._projector = model.vision_tower, model.multi_modal_projector
        self._embeddings, self._layers = self._vision.embeddings, self._vision.encoder.layer
        attention = self._layers[0].attention
        self.num_blocks = len(self._layers)
        self.num_heads = int(attention.num_heads)
        self.head_dim = int(attention.head_dim)
        self.scale = round(1 / model.config.downsample_ratio)
        self.text_width = int(self._projector.linear_2.out_features)
        self.extra_rows = self._class_row()
        self._projections = [joined_projection(layer.attention, spec) for layer in self._layers]
        if spec.use_kernels:
            pack_tower(self._layers, [self._projector])

    def _class_row(self) -> Tensor:
        """The class token at its position, ``[1, hidden]``."""
        row: Tensor = self._embeddings.cls_token[0].detach()
        learned = self._embeddings.position_embeddings
        return row if learned is None else row + learned[0, :1].detach()

    def positions(self, grid: Grid) -> Tensor:
        """Learned positions of a tile's patches, ``[rows * columns]``; 0 is the class token's."""
        table = 1 + torch.arange(grid[1] * grid[2], device=self.extra_rows.device)
        return in_token_order(table.view(grid[1], grid[2]), self.scale)

    def embed(self, pixels: Tensor, positions: Tensor) -> Tensor:
        """Patches to rows; a convolution whose stride is its kernel is a matrix product."""
        proj, learned = self._embeddings.patch_embeddings.projection, self._embeddings.position_embeddings
        rows = linear(pixels, proj.weight.flatten(1), proj.bias)
        return rows if learned is None else rows + learned[0, positions]

    def project(self, block: int, hidden: Tensor) -> Tensor:
        """See `TileParts`."""
        layer = self._layers[block]
        joined = self._projections[block](layer.layernorm_before(hidden))
        if isinstance(layer.attention.q_norm, nn.Identity):
            return joined
        query, keys, values = joined.chunk(3, dim=-1)
        return torch.cat([layer.attention.q_norm(query), layer.attention.k_norm(keys), values], dim=-1)

    def finish(self, block: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """See `TileParts`; both branches have a learned scale."""
        layer = self._layers[block]
        hidden = layer.lambda_1 * layer.attention.projection_layer(attended) + hidden
        widened: Tensor = layer.mlp(layer.layernorm_after(hidden))
        return layer.lambda_2 * widened + hidden  # type: ignore[no-any-return]

    def merge(self, hidden: Tensor) -> Tensor:
        """Last norm where there is one, pixel shuffle (a view in this order of rows), projector."""
        normed = self._vision.layernorm(hidden)
        return self._projector(normed.view(len(normed) // self.scale**2, -1))  # type: ignore[no-any-return]
