"""Conversations as Gemma 3 reads them: an image becomes one square picture, whose tokens see each other.

Pan and scan, which adds crops of long pictures, stays off whatever the checkpoint says.
"""

from collections.abc import Sequence
from typing import Any

import torch

from vlm_engine.errors import ModelLoadError, RequestError
from vlm_engine.models.base import PreparedPrompt
from vlm_engine.models.messages import collect_images, image_digest, refuse_reserved_text
from vlm_engine.models.processing import ProcessorCall, not_special, run_starts
from vlm_engine.models.tiles import tile_inputs
from vlm_engine.request import Message
from vlm_engine.sequence import Placeholder


class Gemma3Prompts:
    """Tokenizes conversations and makes their images squares.

    Args:
        processor: The checkpoint's processor, with a chat template.
        config: The checkpoint's configuration.

    Raises:
        ModelLoadError: Processor and configuration disagree on a picture's size or tokens.
    """

    def __init__(self, processor: Any, config: Any) -> None:
        self.tokenizer = processor.tokenizer
        self._process = ProcessorCall(processor, do_pan_and_scan=False)
        self._image_token_id = int(config.image_token_id)
        marks = (self.tokenizer.boi_token, self.tokenizer.image_token, self.tokenizer.eoi_token)
        self._reserved = not_special(self.tokenizer, marks)
        self._patch = int(config.vision_config.patch_size)
        self._num_tokens = int(config.mm_tokens_per_image)
        per_side = int(config.vision_config.image_size) // self._patch
        self._scale = max(1, per_side // int(self._num_tokens**0.5))
        self._check(processor, config, (per_side / self._scale) ** 2)

    def _check(self, processor: Any, config: Any, num_tokens: float) -> None:
        size, side = processor.image_processor.size, config.vision_config.image_size
        if (size["height"], size["width"]) != (side, side):
            raise ModelLoadError(
                f"the processor makes pictures of {size['height']}x{size['width']} pixels, "
                f"the model needs {side}x{side}"
            )
        written = int(processor.image_seq_length)
        if not written == self._num_tokens == num_tokens:
            raise ModelLoadError(
                f"the processor writes {written} tokens an image, the model makes {num_tokens:g} "
                f"and mm_tokens_per_image is {self._num_tokens}"
            )
        if self._image_token_id >= config.text_config.vocab_size:
            raise ModelLoadError(
                f"image_token_index {self._image_token_id} is outside the vocabulary of "
                f"{config.text_config.vocab_size} tokens"
            )

    @property
    def reads_videos(self) -> bool:
        """See `PromptPreparer`."""
        return self._process.reads_videos

    def prepare(self, messages: Sequence[Message]) -> PreparedPrompt:
        """Tokens, positions and pixels of a conversation.

        Raises:
            RequestError: The messages have no valid shape, or an image cannot be taken.
        """
        refuse_reserved_text(messages, self._reserved)
        digests = [image_digest(image) for image, _ in collect_images(messages)]
        ids, inputs = self._process(messages)
        images = tile_inputs(inputs.get("pixel_values"), self._patch, self._scale)
        starts = run_starts(ids, self._image_token_id)
        if len(starts) != len(digests):
            raise RequestError(
                f"the chat template placed {len(starts)} of {len(digests)} images", field="messages"
            )
        runs = tuple(
            Placeholder(start, self._num_tokens, digest, index, attends_both_ways=True)
            for index, (start, digest) in enumerate(zip(starts, digests, strict=True))
        )
        return PreparedPrompt(ids, torch.arange(len(ids))[None], 0, runs, images)
