"""Qwen2.5-VL and Qwen3-VL: m-RoPE, a tower with merged patches, DeepStack where the model has it."""

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vlm_engine.attention import AttentionMetadata
from vlm_engine.cost_model import SliceWork
from vlm_engine.errors import ImageRejected, RequestError
from vlm_engine.models.base import ImageInput, ImageRows, ModelSpec, PreparedPrompt
from vlm_engine.models.messages import collect_images, image_digest, refuse_reserved_text
from vlm_engine.models.tower import QwenTower
from vlm_engine.request import Message
from vlm_engine.sequence import Placeholder

RESERVED = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


class QwenVL:
    """Adapter of the Qwen-VL families over the stock transformers model.

    Args:
        model: ``Qwen2_5_VLForConditionalGeneration`` or ``Qwen3VLForConditionalGeneration`` whose
            decoder uses the paged attention.
        processor: Its processor, with a chat template.
        spec: The model's numbers.
    """

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        self.spec = spec
        self.tokenizer = processor.tokenizer
        self.encoder = QwenTower(model.model.visual, spec)
        self._processor = processor
        self._model = model
        self._image_token_id = int(model.config.image_token_id)
        self._merge = int(model.config.vision_config.spatial_merge_size)
        # why: the fast tokenizer and the image processor are called from several threads
        self._lock = threading.Lock()

    def prepare(self, messages: Sequence[Message]) -> PreparedPrompt:
        """See `VisionLanguageModel.prepare`."""
        refuse_reserved_text(messages, RESERVED)
        images = collect_images(messages)
        with self._lock:
            inputs = self._process(messages, [image for image, _ in images], [field for _, field in images])
        token_ids = inputs["input_ids"]
        grids = inputs.get("image_grid_thw")
        positions, delta = self._positions(token_ids, grids)
        ids = token_ids[0].tolist()
        image_inputs = _split_pixels(inputs.get("pixel_values"), grids)
        runs = self._placeholders(ids, image_inputs, [image_digest(image) for image, _ in images])
        return PreparedPrompt(ids, positions, delta, runs, image_inputs)

    def _process(self, messages: Sequence[Message], images: list[Any], fields: list[str]) -> Any:
        try:
            text = self._processor.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            raise RequestError(f"the model's chat template refuses it: {error}", field="messages") from error
        try:
            return self._processor(text=[text], images=images or None, return_tensors="pt")
        except Exception as error:
            culprit = self._culprit(images, fields)
            raise ImageRejected(f"the model cannot take this image: {error}", field=culprit) from error

    def _culprit(self, images: list[Any], fields: list[str]) -> str:
        """Field of the first image that fails alone, else of all messages."""
        for image, field in zip(images, fields, strict=True):
            try:
                self._processor.image_processor(images=[image], return_tensors="pt")
            except Exception:
                return field
        return "messages"

    def _positions(self, token_ids: Tensor, grids: Tensor | None) -> tuple[Tensor, int]:
        """``[3, num_tokens]`` positions and the delta of every later token (case E12)."""
        is_image = (token_ids == self._image_token_id).int()
        positions, delta = self._model.model.get_rope_index(token_ids, is_image, image_grid_thw=grids)
        return positions[:, 0].contiguous(), int(delta[0])

    def _placeholders(
        self, token_ids: list[int], images: Sequence[ImageInput], digests: Sequence[bytes]
    ) -> tuple[Placeholder, ...]:
        starts = _run_starts(token_ids, self._image_token_id)
        if len(starts) != len(images):
            raise RequestError(
                f"the chat template placed {len(starts)} of {len(images)} images; images belong into "
                "user messages",
                field="messages",
            )
        return tuple(
            Placeholder(start, len(image.pixels) // self._merge**2, digest, index, self._works(image))
            for index, (start, image, digest) in enumerate(zip(starts, images, digests, strict=True))
        )

    def _works(self, image: ImageInput) -> tuple[SliceWork, ...]:
        return tuple(part.work for part in self.encoder.slices(image))

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, images: Sequence[ImageRows], paged: AttentionMetadata
    ) -> Tensor:
        """See `VisionLanguageModel.forward`."""
        decoder = self._model.model.language_model
        embeds = decoder.embed_tokens(token_ids)
        for rows in images:
            features = rows.features[0]
            embeds[rows.first_row : rows.first_row + len(features)] = features.to(embeds.dtype)
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
        return self._model.lm_head(hidden).float()  # type: ignore[no-any-return]


def _split_pixels(pixels: Tensor | None, grids: Tensor | None) -> tuple[ImageInput, ...]:
    if pixels is None or grids is None:
        return ()
    parts = torch.split(pixels, grids.prod(-1).tolist())
    return tuple(
        ImageInput(part, (int(t), int(h), int(w)))
        for part, (t, h, w) in zip(parts, grids.tolist(), strict=True)
    )


def _run_starts(token_ids: list[int], token_id: int) -> list[int]:
    """Where runs of `token_id` begin; the special tokens around an image keep runs apart."""
    pairs = pairwise([None, *token_ids])
    return [i for i, (before, here) in enumerate(pairs) if here == token_id and before != token_id]


def _deepstack(images: Sequence[ImageRows], embeds: Tensor) -> dict[str, Any]:
    """The decoder's DeepStack arguments: which rows are image rows, and what each layer adds."""
    if not images or len(images[0].features) == 1:
        return {}
    mask = torch.zeros(1, len(embeds), dtype=torch.bool, device=embeds.device)
    for rows in images:
        mask[0, rows.first_row : rows.first_row + len(rows.features[0])] = True
    layers = zip(*(rows.features[1:] for rows in images), strict=True)
    return {"visual_pos_masks": mask, "deepstack_visual_embeds": [torch.cat(layer) for layer in layers]}
