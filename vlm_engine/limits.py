"""What can never run is refused before it is queued."""

from dataclasses import dataclass

from vlm_engine.errors import ImageRejected, PromptTooLong
from vlm_engine.models.base import PreparedPrompt


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Sizes of a running engine.

    Args:
        max_model_len: Tokens of prompt and output together.
        encoder_cache_tokens: Image tokens of the largest image.
    """

    max_model_len: int
    encoder_cache_tokens: int

    def check(self, prompt: PreparedPrompt) -> None:
        """Refuse a prompt that can never run.

        Raises:
            PromptTooLong: It leaves no room for a token of output.
            ImageRejected: An image is larger than the encoder cache.
        """
        num_tokens, most = len(prompt.token_ids), self.max_model_len - 1
        if num_tokens > most:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens, at most {most} fit; shorten the text or send fewer or "
                "smaller images",
                field="messages",
            )
        for image in prompt.placeholders:
            if image.length > self.encoder_cache_tokens:
                raise ImageRejected(
                    f"image {image.index} takes {image.length} tokens, the encoder holds "
                    f"{self.encoder_cache_tokens}; send a smaller image or raise encoder_cache_tokens",
                    field="messages",
                )
