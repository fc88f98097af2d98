"""The next token of every sequence of a step, with whatever its request wants around it.

A step whose requests want nothing but a draw goes straight to the sampler.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vlm_engine.grammar import GrammarError, GrammarMatcher
from vlm_engine.logits import LogitEditor
from vlm_engine.sampler import make_generator, sample
from vlm_engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Natural logarithms of probabilities in the model's own distribution.

    Args:
        logprob: That of the token taken.
        top: Ids and values of the best tokens, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Choices:
    """What was chosen, by row.

    Args:
        token_ids: One for each row.
        logprobs: For the rows that want them.
        ended: Rows whose text is complete with this token, because its grammar is.
        failed: Why a row has no token to choose from.
    """

    token_ids: list[int]
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    ended: frozenset[int] = frozenset()
    failed: dict[int, str] = field(default_factory=dict)


class TokenChooser:
    """How one sequence's tokens are chosen: settings, random numbers, and what is kept between steps.

    Args:
        sequence: The sequence.
        matcher: What its text must keep to, at its start.
    """

    def __init__(self, sequence: Sequence, matcher: GrammarMatcher | None = None) -> None:
        self.matcher = matcher
        self.params = sequence.request.sampling
        self.generator = make_generator(self.params)
        self.editor = LogitEditor(sequence) if LogitEditor.is_needed(self.params) else None
        self.is_plain = self.editor is None and matcher is None and self.params.logprobs is None


def choose(logits: Tensor, choosers: Many[TokenChooser]) -> Choices:
    """Choose a token for each row.

    Args:
        logits: Float ``[num_seqs, vocab_size]``; rows may be changed in place.
        choosers: One for each row.
    """
    if all(each.is_plain for each in choosers):
        return Choices(_sample(logits, choosers))
    told = [row for row, each in enumerate(choosers) if each.params.logprobs is not None]
    # why: taken before anything is edited, so that they are the model's own, as in vLLM
    logprobs = logits[told].float().log_softmax(dim=-1)
    failed = _edit(logits, choosers)
    token_ids = _sample(logits, choosers)
    return Choices(
        token_ids,
        _logprobs(logprobs, told, token_ids, choosers) if told else {},
        frozenset(
            row
            for row, each in enumerate(choosers)
            if each.matcher is not None and row not in failed and each.matcher.accept(token_ids[row])
        ),
        failed,
    )


def _edit(logits: Tensor, choosers: Many[TokenChooser]) -> dict[int, str]:
    """Change the rows of those who want it, in place; returns why some cannot go on."""
    failed = {}
    for index, (row, each) in enumerate(zip(logits, choosers, strict=True)):
        if each.editor is not None:
            each.editor.edit(row)
        if each.matcher is not None:
            try:
                each.matcher.edit(row)
            except GrammarError as error:
                failed[index] = f"the answer's form cannot be kept to any further: {error}"
    return failed


def _sample(logits: Tensor, choosers: Many[TokenChooser]) -> list[int]:
    params, generators = [each.params for each in choosers], [each.generator for each in choosers]
    return sample(logits, params, generators).tolist()


def _logprobs(
    logprobs: Tensor, rows: list[int], token_ids: list[int], choosers: Many[TokenChooser]
) -> dict[int, RowLogprobs]:
    """Of each row in `rows`, to which ``logprobs[i]`` belongs in order."""
    counts = [choosers[row].params.logprobs or 0 for row in rows]
    taken = torch.tensor([token_ids[row] for row in rows], device=logprobs.device)
    own = logprobs.gather(-1, taken[:, None])[:, 0].tolist()
    values, ids = (part.tolist() for part in logprobs.topk(max(counts), dim=-1))
    return {
        row: RowLogprobs(own[i], tuple(zip(ids[i][:count], values[i][:count], strict=True)))
        for i, (row, count) in enumerate(zip(rows, counts, strict=True))
    }
