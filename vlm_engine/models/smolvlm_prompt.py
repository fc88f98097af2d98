"""Conversations as SmolVLM and Idefics3 read them: an image becomes tiles and a picture of the whole.

Every tile is an image of its own to the engine, a run of image tokens between markers. So a chunk
may end in any tile, and the tiles before it need not be encoded again.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from vlm_engine.errors import ModelLoadError, RequestError
from vlm_engine.models.base import PreparedPrompt
from vlm_engine.models.messages import collect_images, image_digest, refuse_reserved_text
from vlm_engine.models.processing import ProcessorCall, run_starts
from vlm_engine.models.tiles import tile_digest, tile_inputs
from vlm_engine.request import Message
from vlm_engine.sequence import Placeholder


class SmolVLMPrompts:
    """Tokenizes conversations and cuts their images into tiles.

    Args:
        processor: The checkpoint's processor, with a chat template.
        config: The checkpoint's configuration.

    Raises:
        ModelLoadError: Processor and configuration disagree on the tokens of a tile.
    """

    def __init__(self, processor: Any, config: Any) -> None:
        self.tokenizer = processor.tokenizer
        self._process = ProcessorCall(processor)
        self._image_token_id = int(config.image_token_id)
        self._marker_id = self.tokenizer.convert_tokens_to_ids(processor.fake_image_token)
        self._reserved = _reserved(processor)
        self._patch = int(config.vision_config.patch_size)
        self._scale = int(config.scale_factor)
        self._tile_tokens = int(processor.image_seq_len)
        side = processor.image_processor.max_image_size["longest_edge"] // self._patch // self._scale
        if side**2 != self._tile_tokens:
            raise ModelLoadError(
                f"the processor writes {self._tile_tokens} image tokens a tile, the model makes {side**2}"
            )

    def prepare(self, messages: Sequence[Message]) -> PreparedPrompt:
        """Tokens, positions and pixels of a conversation.

        Raises:
            RequestError: The messages have no valid shape, or an image cannot be taken.
        """
        refuse_reserved_text(messages, self._reserved)
        digests = [image_digest(image) for image, _ in collect_images(messages)]
        ids, inputs = self._process([_in_parts(message) for message in messages])
        pixels = inputs.get("pixel_values")
        images = tile_inputs(None if pixels is None else pixels[0], self._patch, self._scale)
        starts = run_starts(ids, self._image_token_id)
        tiles = self._tiles(ids, starts)
        if len(tiles) != len(images) or len({image for image, _ in tiles}) != len(digests):
            raise RequestError("the chat template left out an image", field="messages")
        runs = tuple(
            Placeholder(start, self._tile_tokens, tile_digest(digests[image], tile), index)
            for index, (start, (image, tile)) in enumerate(zip(starts, tiles, strict=True))
        )
        return PreparedPrompt(ids, torch.arange(len(ids))[None], 0, runs, images)

    def _tiles(self, token_ids: list[int], starts: list[int]) -> list[tuple[int, int]]:
        """For each run its image and its number in it: an image's last run has a closing marker after it."""
        tiles = [(0, 0)][: len(starts)]
        for before, start in pairwise(starts):
            image, tile = tiles[-1]
            between = token_ids[before + self._tile_tokens : start]
            is_next_image = between.count(self._marker_id) > 1
            tiles.append((image + 1, 0) if is_next_image else (image, tile + 1))
        return tiles


def _in_parts(message: Message) -> Message:
    """The message with its content as a list of parts.

    why: the families' chat templates walk over the content and silently leave out a plain string.
    """
    content = message["content"]
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
    )


def _reserved(processor: Any) -> list[str]:
    """Text that stands for a part of an image, and that the tokenizer cannot leave as text."""
    added = processor.tokenizer.added_tokens_decoder.values()
    ordinary = [str(token.content) for token in added if not token.special]
    return [text for text in ordinary if text.startswith(("<row_", "<global-img>", "<image>", "<fake_token"))]
