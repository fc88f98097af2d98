"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL: m-RoPE, a tower with merged patches, DeepStack where the model has it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vlm_engine.attention import AttentionMetadata
from vlm_engine.models.base import ImageRows, ModelSpec
from vlm_engine.models.decoder import insert_images
from vlm_engine.models.packing import pack_head
from vlm_engine.models.qwen_prompt import QwenPrompts
from vlm_engine.models.stack import make_stack
from vlm_engine.models.tower import QwenTower


class QwenVL:
    """Adapter of the Qwen-VL families over the stock transformers model.

    Args:
        model: ``Qwen2VLForConditionalGeneration``, ``Qwen2_5_VL…`` or ``Qwen3VL…``, whose decoder uses
            the paged attention.
        prompts: What reads conversations for it.
        spec: The model's numbers.
    """

    def __init__(self, model: Any, prompts: QwenPrompts, spec: ModelSpec) -> None:
        self.spec = spec
        self.prompts = prompts
        self.encoder = QwenTower(model.model.visual, spec)
        self._embed = model.model.language_model.embed_tokens
        self._head = pack_head(model.lm_head, use_kernels=spec.use_kernels)
        self._stack = make_stack(model.model.language_model, spec)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, images: Sequence[ImageRows], paged: AttentionMetadata
    ) -> Tensor:
        """See `VisionLanguageModel.forward`."""
        embeds = self._embed(token_ids)
        insert_images(embeds, images)
        return self._stack(embeds, positions[:, None], images, paged)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See `VisionLanguageModel.logits`."""
        return self._head(hidden)
