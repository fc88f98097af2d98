"""Conversations as the Qwen-VL families read them; needs the processor, not the weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vlm_engine.errors import RequestError
from vlm_engine.models.base import ImageInput, PreparedPrompt
from vlm_engine.models.messages import collect_images, image_digest
from vlm_engine.models.processing import ProcessorCall, run_starts
from vlm_engine.request import Message
from vlm_engine.sequence import Placeholder


class QwenPrompts:
    """Tokenizes conversations and preprocesses their images.

    Args:
        processor: The checkpoint's processor, with a chat template.
        config: The checkpoint's configuration.
    """

    def __init__(self, processor: Any, config: Any) -> None:
        self.tokenizer = processor.tokenizer
        self._process = ProcessorCall(processor)
        self._image_token_id = int(config.image_token_id)
        self._merge = int(config.vision_config.spatial_merge_size)

    def prepare(self, messages: Sequence[Message]) -> PreparedPrompt:
        """Tokens, positions and pixels of a conversation.

        Raises:
            RequestError: The messages have no valid shape, or an image cannot be taken.
        """
        images = collect_images(messages)
        ids, inputs = self._process(messages)
        image_inputs = _split_pixels(inputs.get("pixel_values"), inputs.get("image_grid_thw"))
        runs = self._placeholders(ids, image_inputs, [image_digest(image) for image, _ in images])
        grids = [
            (t, h // self._merge, w // self._merge) for t, h, w in (image.grid for image in image_inputs)
        ]
        positions, delta = rotary_positions(len(ids), [run.start for run in runs], grids)
        return PreparedPrompt(ids, positions, delta, runs, image_inputs)

    def _placeholders(
        self, token_ids: list[int], images: Sequence[ImageInput], digests: Sequence[bytes]
    ) -> tuple[Placeholder, ...]:
        starts = run_starts(token_ids, self._image_token_id)
        if len(starts) != len(images):
            raise RequestError(
                f"the chat template placed {len(starts)} of {len(images)} images; images belong into "
                "user messages",
                field="messages",
            )
        return tuple(
            Placeholder(start, len(image.pixels) // self._merge**2, digest, index)
            for index, (start, image, digest) in enumerate(zip(starts, images, digests, strict=True))
        )


def rotary_positions(
    num_tokens: int, starts: Sequence[int], grids: Sequence[tuple[int, int, int]]
) -> tuple[Tensor, int]:
    """Positions of m-RoPE (https://arxiv.org/abs/2409.12191): time, row and column.

    Text counts up on all three axes; an image's tokens stand on its grid, and the text after it
    goes on behind the grid's longer side.

    Args:
        num_tokens: Length of the prompt.
        starts: Where the images' tokens begin, ascending.
        grids: ``(frames, rows, columns)`` of image tokens, one for each start.

    Returns:
        ``[3, num_tokens]`` positions, and the delta that gives the position of any later token
        when it is added to its index; the delta is one constant of the sequence (case E12).
    """
    parts: list[Tensor] = []
    token, position = 0, 0
    for start, (frames, rows, columns) in zip(starts, grids, strict=True):
        parts.append(torch.arange(position, position + start - token).expand(3, -1))
        position += start - token
        axes = torch.meshgrid(torch.arange(frames), torch.arange(rows), torch.arange(columns), indexing="ij")
        parts.append(torch.stack([axis.flatten() for axis in axes]) + position)
        token = start + frames * rows * columns
        position += max(rows, columns)
    parts.append(torch.arange(position, position + num_tokens - token).expand(3, -1))
    positions = torch.cat(parts, dim=1)
    return positions, int(positions.max()) + 1 - num_tokens


def _split_pixels(pixels: Tensor | None, grids: Tensor | None) -> tuple[ImageInput, ...]:
    if pixels is None or grids is None:
        return ()
    parts = torch.split(pixels, grids.prod(-1).tolist())
    return tuple(
        ImageInput(part, (int(t), int(h), int(w)))
        for part, (t, h, w) in zip(parts, grids.tolist(), strict=True)
    )
