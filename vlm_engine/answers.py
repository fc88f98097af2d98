"""From sampled tokens to what a request's readers are told."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vlm_engine.choosing import RowLogprobs
from vlm_engine.detokenizer import Detokenizer
from vlm_engine.grammar import CompiledForm
from vlm_engine.models import PreparedPrompt
from vlm_engine.request import FinishReason, GenerationRequest, PositionLogprobs, TokenEvent, TokenLogprob
from vlm_engine.sampling_params import SamplingParams
from vlm_engine.sequence import Placeholder, Sequence
from vlm_engine.token_bytes import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class Answers:
    """The answers that one request wants.

    Args:
        request: As it was asked for.
        prompt: Shared by all of them.
        placeholders: The prompt's images with the encoder's work on each.
        form: What each of them must keep to.
        running: The sequences that have not ended, by the id they have in the engine.
    """

    request: GenerationRequest
    prompt: PreparedPrompt
    placeholders: tuple[Placeholder, ...]
    form: CompiledForm | None = None
    running: dict[str, Sequence] = field(default_factory=dict)

    def part(self, index: int, name: str) -> GenerationRequest:
        """The request of answer `index` alone, by the id `name`."""
        # why: work on the request has begun when its later answers start, so that they cannot expire
        expires_at = None if index else self.request.expires_at
        sampling = self.request.sampling.of_choice(index)
        return replace(self.request, request_id=name, sampling=sampling, expires_at=expires_at)


class AnswerText:
    """What readers of one answer are told of its tokens.

    Args:
        tokenizer: The checkpoint's tokenizer.
        token_bytes: The same tokenizer's bytes.
        sampling: The settings of the request.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", token_bytes: TokenBytes, sampling: SamplingParams
    ) -> None:
        self._text = Detokenizer(tokenizer, sampling.stop, sampling.min_tokens)
        self._bytes = token_bytes

    def tell(
        self, sequence: Sequence, reason: FinishReason | None, logprobs: RowLogprobs | None
    ) -> TokenEvent:
        """News of the sequence's newest token, with which it ends for `reason` or goes on."""
        token_id = sequence.token_ids[-1]
        # why: the token that ends an answer is no part of its text
        is_text = token_id not in sequence.stop_token_ids or reason != "stop"
        delta = self._text.push([token_id]) if is_text else ""
        reason = "stop" if self._text.stopped else reason
        return TokenEvent(
            sequence.parent_id,
            delta if reason is None else delta + self._text.finish(),
            (token_id,),
            reason,
            sequence.usage(),
            index=sequence.index,
            logprobs=(self._position(token_id, logprobs),) if logprobs and is_text else (),
        )

    def _position(self, token_id: int, told: RowLogprobs) -> PositionLogprobs:
        taken = TokenLogprob(token_id, self._bytes(token_id), told.logprob)
        return PositionLogprobs(taken, tuple(TokenLogprob(i, self._bytes(i), value) for i, value in told.top))
