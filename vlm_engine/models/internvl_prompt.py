"""Conversations as InternVL reads them: an image becomes tiles of one size and a picture of the whole.

All tiles of an image stand in one run of image tokens; to the engine each is an image of its own.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch

from vlm_engine.errors import ModelLoadError, RequestError
from vlm_engine.models.base import PreparedPrompt
from vlm_engine.models.messages import collect_images, image_digest, image_scale, refuse_reserved_text
from vlm_engine.models.processing import ProcessorCall, not_special, run_starts
from vlm_engine.models.tiles import tile_digest, tile_inputs
from vlm_engine.request import Message
from vlm_engine.sequence import Placeholder


class InternVLPrompts:
    """Tokenizes conversations and cuts their images into tiles.

    Args:
        processor: The checkpoint's processor, with a chat template.
        config: The checkpoint's configuration.

    Raises:
        ModelLoadError: Processor and configuration disagree on a tile's size or tokens.
    """

    def __init__(self, processor: Any, config: Any) -> None:
        self.tokenizer = processor.tokenizer
        self._process = ProcessorCall(processor)
        self._image_token_id = int(config.image_token_id)
        marks = ("image_token", "video_token", "start_image_token", "end_image_token")
        self._reserved = not_special(self.tokenizer, [str(getattr(processor, name)) for name in marks])
        self._patch = int(config.vision_config.patch_size[0])
        self._scale = round(1 / config.downsample_ratio)
        self._tile_tokens = int(processor.image_seq_length)
        images = processor.image_processor
        self._least_tiles, self._most_tiles = int(images.min_patches), int(images.max_patches)
        self._check(images.size, tuple(config.vision_config.image_size))

    def _check(self, size: Any, wanted: tuple[int, ...]) -> None:
        given = (size["height"], size["width"])
        if given != wanted or wanted[0] != wanted[1]:
            raise ModelLoadError(
                f"the processor makes tiles of {given} pixels, the model needs squares of {wanted}"
            )
        num_tokens = (wanted[0] // self._patch // self._scale) ** 2
        if num_tokens != self._tile_tokens:
            raise ModelLoadError(
                f"the processor writes {self._tile_tokens} image tokens a tile, the model makes {num_tokens}"
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
        scale = image_scale(messages)
        # why: it picks the tiles by a picture's shape, so that fewer pixels alone would spare few tokens.
        most = max(self._least_tiles, round(self._most_tiles * scale**2))
        cut = str(most) if most < self._most_tiles else ""
        ids, inputs = self._process(messages, **({"max_patches": most} if cut else {}))
        tiles = tile_inputs(inputs.get("pixel_values"), self._patch, self._scale)
        runs = self._placeholders(ids, digests, cut)
        if len(runs) != len(tiles):
            raise RequestError(
                f"the prompt has room for {len(runs)} tiles, its images are {len(tiles)}", field="messages"
            )
        return PreparedPrompt(ids, torch.arange(len(ids))[None], 0, runs, tiles)

    def _placeholders(
        self, token_ids: list[int], digests: Sequence[bytes], cut: str
    ) -> tuple[Placeholder, ...]:
        """One for each tile; a run of image tokens holds all tiles of an image."""
        starts = run_starts(token_ids, self._image_token_id)
        if len(starts) != len(digests):
            raise RequestError(
                f"the chat template placed {len(starts)} of {len(digests)} images", field="messages"
            )
        tiles = [
            (start + tile * self._tile_tokens, tile_digest(digest, tile, cut))
            for start, digest in zip(starts, digests, strict=True)
            for tile in range(self._run_length(token_ids, start) // self._tile_tokens)
        ]
        return tuple(
            Placeholder(start, self._tile_tokens, digest, index)
            for index, (start, digest) in enumerate(tiles)
        )

    def _run_length(self, token_ids: list[int], start: int) -> int:
        run = takewhile(lambda token_id: token_id == self._image_token_id, token_ids[start:])
        return sum(1 for _ in run)
