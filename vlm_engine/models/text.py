"""Text-only families: a decoder and its tokenizer's chat template, no images."""

from collections.abc import Sequence
from typing import Any

import torch

from vlm_engine.errors import ImageRejected
from vlm_engine.models.base import ImageInput, ModelSpec, PreparedPrompt
from vlm_engine.models.decoder import DecoderModel
from vlm_engine.models.messages import walk_parts
from vlm_engine.models.user_text import UserText
from vlm_engine.request import Message


def text_model(model: Any, prompts: "TextPrompts", spec: ModelSpec) -> DecoderModel:
    """Adapter over a stock ``…ForCausalLM``."""
    cap = getattr(model.config, "final_logit_softcapping", None)
    return DecoderModel(model.model, model.lm_head, NoTower(), prompts, spec, logit_cap=cap)


class TextPrompts:
    """Tokenizes conversations.

    Args:
        tokenizer: The checkpoint's tokenizer, with a chat template.
        config: The checkpoint's configuration; not needed.
    """

    def __init__(self, tokenizer: Any, config: Any) -> None:
        self.tokenizer = tokenizer
        self._user_text = UserText(tokenizer)

    @property
    def reads_videos(self) -> bool:
        """See `PromptPreparer`."""
        return False

    def prepare(self, messages: Sequence[Message]) -> PreparedPrompt:
        """Tokens and positions of a conversation.

        Raises:
            RequestError: The messages have no valid shape.
            ImageRejected: There is an image among them.
        """
        for field, part in walk_parts(messages):
            if part["type"] != "text":
                raise ImageRejected(f"this model reads no {part['type']}s", field=field)
        rendered = self._user_text.render([_joined(message) for message in messages])
        # why: the template writes the special tokens, so the tokenizer must add none
        ids = self.tokenizer(rendered.text, add_special_tokens=False, verbose=False)["input_ids"]
        ids = self._user_text.restored(list(ids), rendered)
        return PreparedPrompt(ids, torch.arange(len(ids))[None], 0, (), ())


class NoTower:
    """The tower of a model without one: prompts hold no images, so it is never asked to encode."""

    def slices(self, image: ImageInput) -> Sequence[Any]:
        """No work."""
        return ()

    def start(self, image: ImageInput) -> Any:
        """No state."""

    def run(self, state: Any, slices: Sequence[Any]) -> None:
        """Nothing to run."""

    def features(self, state: Any) -> tuple[torch.Tensor, ...]:
        """No embeddings."""
        return ()


def _joined(message: Message) -> Message:
    """The message with its content as one string, as text models' chat templates want it."""
    content = message["content"]
    return (
        message if isinstance(content, str) else {**message, "content": "".join(p["text"] for p in content)}
    )
