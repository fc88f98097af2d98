"""Qwen2.5-VL and Qwen3-VL: m-RoPE, a tower with merged patches, DeepStack where the model has it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vlm_engine.attention import AttentionMetadata
from vlm_engine.models.base import ImageRows, ModelSpec
from vlm_engine.models.decoder import insert_images
from vlm_engine.models.packing import pack_head, pack_linears
from vlm_engine.models.qwen_prompt import QwenPrompts
from vlm_engine.models.tower import QwenTower


class QwenVL:
    """Adapter of the Qwen-VL families over the stock transformers model.

    Args:
        model: ``Qwen2_5_VLForConditionalGeneration`` or ``Qwen3VLForConditionalGeneration`` whose
            decoder uses the paged attention.
        prompts: What reads conversations for it.
        spec: The model's numbers.
    """

    def __init__(self, model: Any, prompts: QwenPrompts, spec: ModelSpec) -> None:
        self.spec = spec
        self.prompts = prompts
        self.encoder = QwenTower(model.model.visual, spec)
        self._model = model
        pack_linears(model.model.language_model)
        self._head = pack_head(model.lm_head)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, images: Sequence[ImageRows], paged: AttentionMetadata
    ) -> Tensor:
        """See `VisionLanguageModel.forward`."""
        decoder = self._model.model.language_model
        embeds = decoder.embed_tokens(token_ids)
        insert_images(embeds, images)
        output = decoder(
            inputs_embeds=embeds[None],
            position_ids=positions[:, None],
            use_cache=False,
            paged=paged,
            **_deepstack(images, embeds),
        )
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See `VisionLanguageModel.logits`."""
        return self._head(hidden).float()  # type: ignore[no-any-return]


def _deepstack(images: Sequence[ImageRows], embeds: Tensor) -> dict[str, Any]:
    """The decoder's DeepStack arguments: which rows are image rows, and what each layer adds."""
    if not images or len(images[0].features) == 1:
        return {}
    mask = torch.zeros(1, len(embeds), dtype=torch.bool, device=embeds.device)
    for rows in images:
        mask[0, rows.first_row : rows.first_row + len(rows.features[0])] = True
    layers = zip(*(rows.features[1:] for rows in images), strict=True)
    return {"visual_pos_masks": mask, "deepstack_visual_embeds": [torch.cat(layer) for layer in layers]}
