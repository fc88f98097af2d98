"""A checkpoint's processor at work: one prompt at a time, with errors that name the culprit."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from PIL import Image

from vlm_engine.errors import ImageRejected
from vlm_engine.models.messages import Clip, collect_clips, collect_images
from vlm_engine.models.user_text import UserText
from vlm_engine.request import Message


class ProcessorCall:
    """Chat template, tokens and pixels of one conversation; safe from any thread.

    Args:
        processor: The checkpoint's processor, with a chat template.
        video_options: What its video processor is told besides frames and times; None where the family's
            adapter reads no videos.
        options: For the processor, over what the checkpoint says.
    """

    def __init__(
        self, processor: Any, *, video_options: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._processor = processor
        self._video_options = video_options
        self._options = options
        self._user_text = UserText(processor)
        # why: the fast tokenizer and the image processor are called from several threads
        self._lock = threading.Lock()

    @property
    def reads_videos(self) -> bool:
        """Whether there may be videos among the messages."""
        return self._video_options is not None

    def __call__(self, messages: Sequence[Message], **image_options: Any) -> tuple[list[int], Any]:
        """Tokens of checked messages, and the processor's output for their pixels.

        Args:
            messages: The conversation.
            image_options: For the image processor, in place of the checkpoint's own.

        Raises:
            RequestError: The chat template cannot take the messages.
            ImageRejected: The processor cannot take an image, or the family no videos.
        """
        images, clips = collect_images(messages), collect_clips(messages)
        if clips and not self.reads_videos:
            raise ImageRejected("this model reads no videos; send its frames as images", field=clips[0].field)
        with self._lock:
            rendered = self._user_text.render(messages)
            options = self._options | (image_options if images else {})
            if self._starts_with_bos(rendered.text):
                options["add_special_tokens"] = False
            try:
                inputs = self._processor(
                    text=[rendered.text],
                    images=[image for image, _ in images] or None,
                    return_tensors="pt",
                    # why: a prompt that is too long is refused, in words of our own
                    verbose=False,
                    **self._video_arguments(clips),
                    **options,
                )
            except Exception as error:
                field = self._culprit(images, clips)
                raise ImageRejected(f"the model cannot take this picture: {error}", field=field) from error
            return self._user_text.restored(inputs["input_ids"][0].tolist(), rendered), inputs

    def _starts_with_bos(self, text: str) -> bool:
        bos = self._processor.tokenizer.bos_token
        return bool(bos) and text.startswith(bos)

    def _culprit(self, images: Sequence[tuple[Image.Image, str]], clips: Sequence[Clip]) -> str:
        """Field of the first image or video that fails alone, else of all messages."""
        attempts: list[tuple[str, str, dict[str, Any]]] = [
            (field, "image_processor", {"images": [image]}) for image, field in images
        ]
        for clip in clips:
            arguments = self._video_arguments([clip])
            options = arguments.pop("videos_kwargs")
            attempts.append((clip.field, "video_processor", arguments | options))
        for field, part, arguments in attempts:
            try:
                getattr(self._processor, part)(**arguments, return_tensors="pt")
            except Exception:
                return field
        return "messages"

    def _video_arguments(self, clips: Sequence[Clip]) -> dict[str, Any]:
        """All frames are read, at the times at which they were taken."""
        if not clips:
            return {}
        frames = [np.stack([np.asarray(frame.convert("RGB")) for frame in clip.frames]) for clip in clips]
        options = {
            "do_sample_frames": False,
            "input_data_format": "channels_last",
            "video_metadata": [clip_metadata(len(clip.frames), clip.fps) for clip in clips],
            **(self._video_options or {}),
        }
        return {"videos": frames, "videos_kwargs": options}


def clip_metadata(num_frames: int, fps: float) -> dict[str, Any]:
    """What transformers' video processors want to know of a clip whose frames are all read."""
    return {
        "total_num_frames": num_frames,
        "fps": fps,
        "duration": num_frames / fps,
        "frames_indices": list(range(num_frames)),
    }


def not_special(tokenizer: Any, texts: Iterable[str]) -> list[str]:
    """Those of some texts which a processor reads as part of an image, and which the tokenizer cannot leave
    as text because they are no special tokens."""
    added = tokenizer.added_tokens_decoder.values()
    special = {str(token.content) for token in added if token.special}
    return [text for text in texts if text not in special]


def run_starts(token_ids: list[int], token_id: int) -> list[int]:
    """Where runs of `token_id` begin; the special tokens around an image keep runs apart."""
    pairs = pairwise([None, *token_ids])
    return [i for i, (before, here) in enumerate(pairs) if here == token_id and before != token_id]
