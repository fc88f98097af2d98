"""Conversations as SmolVLM and Idefics3 read them: an image becomes tiles and a picture of the whole.

Every tile is an image of its own to the engine, a run of image tokens between markers. So a chunk
may end in any tile, and the tiles before it need not be encoded again. A frame of a video is one tile,
after the words that tell its time.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vlm_engine.errors import ImageRejected, ModelLoadError, RequestError
from vlm_engine.models.base import PreparedPrompt
from vlm_engine.models.messages import (
    Clip,
    collect_clips,
    collect_images,
    image_digest,
    image_scale,
    refuse_reserved_text,
)
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
        # why: Idefics3's processor has none
        has_videos = getattr(processor, "video_processor", None) is not None
        self._process = ProcessorCall(processor, video_options={} if has_videos else None)
        self._image_token_id = int(config.image_token_id)
        self._marker_id = self.tokenizer.convert_tokens_to_ids(processor.fake_image_token)
        self._reserved = _reserved(processor)
        self._patch = int(config.vision_config.patch_size)
        self._scale = int(config.scale_factor)
        self._tile_tokens = int(processor.image_seq_len)
        images = processor.image_processor
        self._tile_side = int(images.max_image_size["longest_edge"])
        self._full_side = int(images.size["longest_edge"])
        side = self._tile_side // self._patch // self._scale
        if side**2 != self._tile_tokens:
            raise ModelLoadError(
                f"the processor writes {self._tile_tokens} image tokens a tile, the model makes {side**2}"
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
        digests, clips = (
            [image_digest(image) for image, _ in collect_images(messages)],
            collect_clips(messages),
        )
        if clips and digests:
            raise ImageRejected(
                "this model reads images or videos in one request, not both; send the frames as images",
                field=clips[0].field,
            )
        options = self._smaller(image_scale(messages))
        ids, inputs = self._process([_in_parts(message) for message in messages], **options)
        pixels = _tile_pixels(inputs.get("pixel_values"), clips)
        images = tile_inputs(pixels, self._patch, self._scale)
        starts = run_starts(ids, self._image_token_id)
        cut = str(options.get("size", ""))
        names = _frame_digests(clips) if clips else self._tile_digests(ids, starts, digests, cut)
        if len(starts) != len(images) or len(names) != len(images):
            raise RequestError("the chat template left out an image", field="messages")
        runs = tuple(
            Placeholder(start, self._tile_tokens, digest, index)
            for index, (start, digest) in enumerate(zip(starts, names, strict=True))
        )
        return PreparedPrompt(ids, torch.arange(len(ids))[None], 0, runs, images)

    def _smaller(self, scale: float) -> dict[str, Any]:
        """Options of the image processor for so much of the full size, in whole tiles.

        why: it enlarges every picture to the full size, so that fewer pixels alone would spare no tokens.
        """
        num_tiles = max(1, round(self._full_side * scale / self._tile_side))
        side = min(self._full_side, num_tiles * self._tile_side)
        return {"size": {"longest_edge": side}} if side < self._full_side else {}

    def _tile_digests(
        self, ids: list[int], starts: list[int], digests: Sequence[bytes], cut: str
    ) -> list[bytes]:
        """Digests of the tiles of images; none if there are more or fewer images than digests."""
        tiles = self._tiles(ids, starts)
        if len({image for image, _ in tiles}) != len(digests):
            return []
        return [tile_digest(digests[image], tile, cut) for image, tile in tiles]

    def _tiles(self, token_ids: list[int], starts: list[int]) -> list[tuple[int, int]]:
        """For each run its image and its number in it: an image's last run has a closing marker after it."""
        tiles = [(0, 0)][: len(starts)]
        for before, start in pairwise(starts):
            image, tile = tiles[-1]
            between = token_ids[before + self._tile_tokens : start]
            is_next_image = between.count(self._marker_id) > 1
            tiles.append((image + 1, 0) if is_next_image else (image, tile + 1))
        return tiles


def _tile_pixels(pixels: Tensor | None, clips: Sequence[Clip]) -> Tensor | None:
    """``[num_tiles, channels, height, width]``, without the frames that make all videos equally long."""
    if pixels is None:
        return None
    if not clips:
        return pixels[0]
    return torch.cat([frames[: len(clip.frames)] for frames, clip in zip(pixels, clips, strict=True)])


def _frame_digests(clips: Sequence[Clip]) -> list[bytes]:
    # why: frames are scaled otherwise than tiles, which have numbers from 0
    return [tile_digest(image_digest(frame), -1) for clip in clips for frame in clip.frames]


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
    video = [processor.video_token] if hasattr(processor, "video_token") else []
    return video + [
        text for text in ordinary if text.startswith(("<row_", "<global-img>", "<image>", "<fake_token"))
    ]
