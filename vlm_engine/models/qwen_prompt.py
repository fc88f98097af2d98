"""Conversations as the Qwen-VL families read them; needs the processor, not the weights.

A video is cut in time: what the tower sees at once, mostly two frames, is an image of its own to the engine.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlm_engine.errors import RequestError
from vlm_engine.models.base import ImageInput, PreparedPrompt
from vlm_engine.models.messages import Clip, collect_clips, collect_images, image_digest
from vlm_engine.models.processing import ProcessorCall, run_starts
from vlm_engine.request import Message
from vlm_engine.sequence import Placeholder

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """An image, a video or a part of one that stands in one run of tokens.

    Args:
        grid: ``(frames, rows, columns)`` of its tokens.
        images: What the tower reads, one for each frame of the grid.
        digests: Of the images.
        time_step: Positions from one frame to the next.
    """

    grid: Grid
    images: tuple[ImageInput, ...]
    digests: tuple[bytes, ...]
    time_step: float = 1.0


class QwenPrompts:
    """Tokenizes conversations and preprocesses their images and videos.

    Args:
        processor: The checkpoint's processor, with a chat template.
        config: The checkpoint's configuration.
    """

    def __init__(self, processor: Any, config: Any) -> None:
        self.tokenizer = processor.tokenizer
        self._process = ProcessorCall(processor, video_options={"cap_pixels_per_frame": True})
        self._image_token_id = int(config.image_token_id)
        self._video_token_id = int(config.video_token_id)
        vision = config.vision_config
        self._merge = int(vision.spatial_merge_size)
        self._depth = int(vision.temporal_patch_size)
        # why: Qwen2.5-VL tells time by positions, Qwen3-VL by words between the frames, Qwen2-VL not at all
        self._positions_per_second = float(getattr(vision, "tokens_per_second", 0))
        self._writes_times = config.model_type == "qwen3_vl"

    @property
    def reads_videos(self) -> bool:
        """See `PromptPreparer`."""
        return self._process.reads_videos

    def prepare(self, messages: Sequence[Message]) -> PreparedPrompt:
        """Tokens, positions and pixels of a conversation.

        Raises:
            RequestError: The messages have no valid shape, or an image cannot be taken.
        """
        digests = [image_digest(image) for image, _ in collect_images(messages)]
        clips = collect_clips(messages)
        ids, inputs = self._process(messages)
        images = list(self._image_runs(inputs, digests))
        videos = list(self._video_runs(inputs, clips))
        placed = [*self._place(ids, self._image_token_id, images, "images")]
        placed += self._place(ids, self._video_token_id, videos, "videos or frames of them")
        placed.sort(key=lambda item: item[0])
        starts, runs = [start for start, _ in placed], [run for _, run in placed]
        positions, delta = rotary_positions(
            len(ids), starts, [run.grid for run in runs], [run.time_step for run in runs]
        )
        every = tuple(image for run in runs for image in run.images)
        return PreparedPrompt(ids, positions, delta, self._placeholders(starts, runs), every)

    def _image_runs(self, inputs: Any, digests: Sequence[bytes]) -> Iterator[Run]:
        images = _split_pixels(inputs.get("pixel_values"), inputs.get("image_grid_thw"))
        for image, digest in zip(images, digests, strict=True):
            yield Run(self._tokens(image.grid), (image,), (digest,))

    def _video_runs(self, inputs: Any, clips: Sequence[Clip]) -> Iterator[Run]:
        videos = _split_pixels(inputs.get("pixel_values_videos"), inputs.get("video_grid_thw"))
        for video, clip in zip(videos, clips, strict=True):
            frames, rows, columns = video.grid
            parts = tuple(ImageInput(part, (1, rows, columns)) for part in video.pixels.chunk(frames))
            step = self._time_step(clip)
            digests = tuple(self._clip_digests(clip, video.grid, step))
            if self._writes_times:
                for part, digest in zip(parts, digests, strict=True):
                    yield Run(self._tokens(part.grid), (part,), (digest,))
            else:
                yield Run(self._tokens(video.grid), parts, digests, step)

    def _time_step(self, clip: Clip) -> float:
        if not self._positions_per_second or self._writes_times:
            return 1.0
        # why: in float32 as the stock model, since positions are cut to whole numbers
        return float(torch.tensor(self._depth / clip.fps) * self._positions_per_second)

    def _clip_digests(self, clip: Clip, grid: Grid, time_step: float) -> Iterator[bytes]:
        """Digests of what the tower reads at once: its frames and the size to which they were scaled.

        why: the step too, since keys of equal frames at other positions must not be shared.
        """
        frames = [image_digest(frame) for frame in clip.frames]
        frames += frames[-1:] * (grid[0] * self._depth - len(frames))
        for first in range(0, len(frames), self._depth):
            placed = f":{grid[1]}x{grid[2]}:{time_step}".encode()
            yield hashlib.sha256(b"".join(frames[first : first + self._depth]) + placed).digest()

    def _tokens(self, grid: Grid) -> Grid:
        return grid[0], grid[1] // self._merge, grid[2] // self._merge

    def _place(
        self, token_ids: list[int], token_id: int, runs: Sequence[Run], what: str
    ) -> list[tuple[int, Run]]:
        starts = run_starts(token_ids, token_id)
        if len(starts) != len(runs):
            raise RequestError(
                f"the chat template placed {len(starts)} of {len(runs)} {what}; they belong into user "
                "messages",
                field="messages",
            )
        return list(zip(starts, runs, strict=True))

    def _placeholders(self, starts: Sequence[int], runs: Sequence[Run]) -> tuple[Placeholder, ...]:
        found: list[Placeholder] = []
        for start, run in zip(starts, runs, strict=True):
            length = run.grid[1] * run.grid[2]
            for frame, digest in enumerate(run.digests):
                found.append(Placeholder(start + frame * length, length, digest, len(found)))
        return tuple(found)


def rotary_positions(
    num_tokens: int,
    starts: Sequence[int],
    grids: Sequence[Grid],
    time_steps: Sequence[float] | None = None,
) -> tuple[Tensor, int]:
    """Positions of m-RoPE (https://arxiv.org/abs/2409.12191): time, row and column.

    Text counts up on all three axes; tokens of an image or video stand on its grid, and the text after
    it goes on behind the longer side, as `generate()` has it, however long the video is.

    Args:
        num_tokens: Length of the prompt.
        starts: Where the images' tokens begin, ascending.
        grids: ``(frames, rows, columns)`` of image tokens, one for each start.
        time_steps: Positions from one frame of a grid to the next, 1 if not given; positions are whole.

    Returns:
        ``[3, num_tokens]`` positions, and the delta that gives the position of any later token
        when it is added to its index; the delta is one constant of the sequence.
    """
    parts: list[Tensor] = []
    token, position = 0, 0
    steps = time_steps or [1.0] * len(grids)
    for start, (frames, rows, columns), step in zip(starts, grids, steps, strict=True):
        parts.append(torch.arange(position, position + start - token).expand(3, -1))
        position += start - token
        times = (torch.arange(frames) * step).long()
        axes = torch.meshgrid(times, torch.arange(rows), torch.arange(columns), indexing="ij")
        parts.append(torch.stack([axis.flatten() for axis in axes]) + position)
        token = start + frames * rows * columns
        position += max(rows, columns)
    parts.append(torch.arange(position, position + num_tokens - token).expand(3, -1))
    positions = torch.cat(parts, dim=1)
    # why: not the largest, since a video's times may be ahead of the text that follows it
    return positions, int(positions[:, -1].max()) + 1 - num_tokens


def _split_pixels(pixels: Tensor | None, grids: Tensor | None) -> tuple[ImageInput, ...]:
    if pixels is None or grids is None:
        return ()
    parts = torch.split(pixels, grids.prod(-1).tolist())
    return tuple(
        ImageInput(part, (int(t), int(h), int(w)))
        for part, (t, h, w) in zip(parts, grids.tolist(), strict=True)
    )
