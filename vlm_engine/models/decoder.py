"""Decoders with one axis of positions: text models, and the text side of families with tiles."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vlm_engine.attention import AttentionMetadata
from vlm_engine.models.base import ImageEncoder, ImageRows, ModelSpec, PromptPreparer
from vlm_engine.models.packing import pack_head
from vlm_engine.models.stack import make_stack


class DecoderModel:
    """Adapter over a stock decoder whose layers use the paged attention.

    Args:
        decoder: The stock decoder, for example ``LlamaModel``.
        head: From hidden states to logits.
        encoder: The vision tower.
        prompts: What reads conversations for it.
        spec: The model's numbers.
        logit_cap: What logits are bent to stay below, by tanh; None for as they are.
    """

    def __init__(
        self,
        decoder: Any,
        head: Any,
        encoder: ImageEncoder,
        prompts: PromptPreparer,
        spec: ModelSpec,
        *,
        logit_cap: float | None = None,
    ) -> None:
        self.spec = spec
        self.prompts = prompts
        self.encoder = encoder
        self._embed = decoder.embed_tokens
        self._head = pack_head(head, use_kernels=spec.use_kernels)
        self._stack = make_stack(decoder, spec)
        self._logit_cap = logit_cap

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, images: Sequence[ImageRows], paged: AttentionMetadata
    ) -> Tensor:
        """See `VisionLanguageModel.forward`."""
        embeds = self._embed(token_ids)
        insert_images(embeds, images)
        return self._stack(embeds, positions, images, paged)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See `VisionLanguageModel.logits`."""
        logits, cap = self._head(hidden), self._logit_cap
        return logits if cap is None else (logits / cap).tanh() * cap


def insert_images(embeds: Tensor, images: Sequence[ImageRows]) -> None:
    """Put image embeddings into the rows of a step, ``[num_tokens, hidden]``, in place."""
    for rows in images:
        features = rows.features[0]
        embeds[rows.first_row : rows.first_row + len(features)] = features.to(embeds.dtype)
