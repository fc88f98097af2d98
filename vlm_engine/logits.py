"""What a request changes in the model's logits before a token is drawn.

The formulas are those of vLLM and OpenAI (https://platform.openai.com/docs/api-reference): bias, then
penalties, then tokens that may not come.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from vlm_engine.sampling_params import SamplingParams
from vlm_engine.sequence import Sequence


class LogitEditor:
    """The changes that one sequence wants; keeps count of its tokens from step to step.

    Args:
        sequence: The sequence; its tokens are read at each step.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        params = sequence.request.sampling
        self._penalties = _Penalties(params) if params.has_penalty else None
        self._bias = _Bias(params.logit_bias) if params.logit_bias else None
        # why: where an answer must have a form, that decides when it ends
        has_least = params.min_tokens > 0 and params.structured is None
        self._ends = sorted(sequence.stop_token_ids) if has_least else []

    @staticmethod
    def is_needed(params: SamplingParams) -> bool:
        """Whether a request with these settings changes any logit."""
        return params.has_penalty or bool(params.logit_bias) or params.min_tokens > 0

    def edit(self, row: Tensor, run: Many[int] = ()) -> None:
        """Change the logits of the sequence's next token, float ``[vocab_size]``, in place.

        Args:
            row: Logits after the sequence's tokens and `run`.
            run: Tokens that this step has chosen already.
        """
        sequence = self._sequence
        if self._bias is not None:
            self._bias.edit(row)
        if self._penalties is not None:
            token_ids = [*sequence.token_ids, *run] if run else sequence.token_ids
            self._penalties.edit(row, token_ids, sequence.num_prompt_tokens)
        if self._ends and sequence.num_output_tokens + len(run) < sequence.request.sampling.min_tokens:
            # why: a checkpoint's end token need not be in its vocabulary
            row[_ids((each for each in self._ends if each < len(row)), row)] = -torch.inf


class _Bias:
    def __init__(self, values: Mapping[int, float]) -> None:
        self._ids = torch.tensor(list(values), dtype=torch.long)
        self._values = torch.tensor(list(values.values()), dtype=torch.float32)

    def edit(self, row: Tensor) -> None:
        self._ids, self._values = self._ids.to(row.device), self._values.to(row.device)
        row.index_add_(0, self._ids, self._values.to(row.dtype))


class _Penalties:
    """Tokens seen so far, each once, and how often the output holds them."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._seen: dict[int, None] = {}
        self._counts: Counter[int] = Counter()
        self._num_read = 0

    def edit(self, row: Tensor, token_ids: list[int], num_prompt_tokens: int) -> None:
        self._seen.update(dict.fromkeys(token_ids[self._num_read :]))
        self._counts.update(token_ids[max(self._num_read, num_prompt_tokens) :])
        self._num_read = len(token_ids)
        if self._params.repetition_penalty != 1:
            self._repetition(row)
        if self._counts:
            self._count(row)

    def _repetition(self, row: Tensor) -> None:
        ids, factor = _ids(self._seen, row), self._params.repetition_penalty
        seen = row[ids]
        row[ids] = torch.where(seen > 0, seen / factor, seen * factor)

    def _count(self, row: Tensor) -> None:
        counts = torch.tensor(list(self._counts.values()), dtype=row.dtype, device=row.device)
        params = self._params
        row[_ids(self._counts, row)] -= params.frequency_penalty * counts + params.presence_penalty


def _ids(values: Iterable[int], row: Tensor) -> Tensor:
    return torch.tensor(list(values), dtype=torch.long, device=row.device)
