"""What can never run is refused before it is queued."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vlm_engine.errors import ImageRejected, PromptTooLong, RequestError
from vlm_engine.models.base import PreparedPrompt
from vlm_engine.models.messages import walk_parts
from vlm_engine.request import Message
from vlm_engine.sampling_params import SamplingParams

MOST_CHARS_PER_TOKEN = 32
"""No text of people's or programs' comes near it: English has four, code and tables fewer."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Sizes of a running engine.

    Args:
        max_model_len: Tokens of prompt and output together.
        encoder_cache_tokens: Image tokens of the largest image.
        vocab_size: Token ids that the model has.
    """

    max_model_len: int
    encoder_cache_tokens: int
    vocab_size: int

    def check_text(self, messages: Sequence[Message]) -> None:
        """Refuse a text that is so long that counting its tokens alone would hold up everybody else.

        Raises:
            PromptTooLong: It says how long a text may be.
        """
        num_chars = 0
        most = MOST_CHARS_PER_TOKEN * self.max_model_len
        for field, part in walk_parts(messages):
            num_chars += len(part.get("text", ""))
            if num_chars > most:
                raise PromptTooLong(
                    f"the prompt's text has over {most} characters, more than any that fits into "
                    f"{self.max_model_len} tokens; shorten it",
                    field=field,
                )

    def check(self, prompt: PreparedPrompt, sampling: SamplingParams) -> None:
        """Refuse a request that can never run.

        Raises:
            PromptTooLong: It leaves no room for a token of output.
            ImageRejected: An image is larger than the encoder cache.
            RequestError: A token id is not in the vocabulary.
        """
        self._check_ids("logit_bias", sampling.logit_bias)
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
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

    def _check_ids(self, field: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= self.vocab_size:
                raise RequestError(
                    f"{field}: there is no token {token_id}, the last one is {self.vocab_size - 1}",
                    field=field,
                )
