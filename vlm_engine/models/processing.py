"""A checkpoint's processor at work: one prompt at a time, with errors that name the culprit."""

import threading
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from PIL import Image

from vlm_engine.errors import ImageRejected
from vlm_engine.models.messages import collect_images
from vlm_engine.models.user_text import UserText
from vlm_engine.request import Message


class ProcessorCall:
    """Chat template, tokens and pixels of one conversation; safe from any thread.

    Args:
        processor: The checkpoint's processor, with a chat template.
        options: For the processor, over what the checkpoint says.
    """

    def __init__(self, processor: Any, **options: Any) -> None:
        self._processor = processor
        self._options = options
        self._user_text = UserText(processor)
        # why: the fast tokenizer and the image processor are called from several threads
        self._lock = threading.Lock()

    def __call__(self, messages: Sequence[Message]) -> tuple[list[int], Any]:
        """Tokens of checked messages, and the processor's output for their pixels.

        Raises:
            RequestError: The chat template cannot take the messages.
            ImageRejected: The processor cannot take an image.
        """
        images = collect_images(messages)
        with self._lock:
            rendered = self._user_text.render(messages)
            options = dict(self._options)
            if self._starts_with_bos(rendered.text):
                options["add_special_tokens"] = False
            try:
                inputs = self._processor(
                    text=[rendered.text],
                    images=[image for image, _ in images] or None,
                    return_tensors="pt",
                    **options,
                )
            except Exception as error:
                field = self._culprit(images)
                raise ImageRejected(f"the model cannot take this image: {error}", field=field) from error
            return self._user_text.restored(inputs["input_ids"][0].tolist(), rendered), inputs

    def _starts_with_bos(self, text: str) -> bool:
        bos = self._processor.tokenizer.bos_token
        return bool(bos) and text.startswith(bos)

    def _culprit(self, images: Sequence[tuple[Image.Image, str]]) -> str:
        """Field of the first image that fails alone, else of all messages."""
        for image, field in images:
            try:
                self._processor.image_processor(images=[image], return_tensors="pt")
            except Exception:
                return field
        return "messages"


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
