"""The next tokens of every sequence of a step, with whatever its request wants around them.

A step whose requests want nothing but a draw goes straight to the sampler. Proposed tokens are checked in
the order of the text: what a request wants sees each position as it would without proposals, and so do its
random numbers, so that no token changes.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from vlm_engine.grammar import GrammarError, GrammarMatcher
from vlm_engine.logits import LogitEditor
from vlm_engine.sampler import make_generator, sample, skip
from vlm_engine.sequence import Sequence

NOT_FINITE = "the model gave no finite number for the next token; check the weights and the dtype"


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Natural logarithms of probabilities in the model's own distribution.

    Args:
        logprob: That of the token taken.
        top: Ids and values of the best tokens, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Run:
    """What a sequence says next: a token, and behind it the proposed ones that it said itself, one more last.

    Args:
        token_ids: At least one unless it failed.
        logprobs: One for each, if the request wants them.
        ended: Whether the text is complete with the last one, because its form is.
        failed: Why there is no next token.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    ended: bool = False
    failed: str | None = None


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

    def renewed(self, sequence: Sequence) -> "TokenChooser":
        """One that stands behind the tokens of the sequence, wherever this one has come to."""
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        if self.matcher is not None:
            self.matcher.start_over(output)
        chooser = TokenChooser(sequence, self.matcher)
        skip(chooser.generator, len(output))
        return chooser


def choose_runs(logits: Tensor, choosers: Many[TokenChooser], proposals: Many[tuple[int, ...]]) -> list[Run]:
    """Choose the tokens of each sequence, one position at a time as long as its proposed tokens are right.

    Args:
        logits: Float ``[num_rows, vocab_size]``, of each sequence a row and one for each proposed token; rows
            may be changed in place.
        choosers: One for each sequence.
        proposals: Of each sequence, what it may say next.
    """
    is_sound = logits.amax(dim=-1).isfinite().tolist()
    if not all(is_sound):
        # why: a row that nothing can be drawn from must not fail its neighbours
        logits[[row for row, sound in enumerate(is_sound) if not sound]] = 0
    first_rows = list(accumulate((1 + len(proposed) for proposed in proposals[:-1]), initial=0))
    runs = [Run(failed=None if is_sound[row] else NOT_FINITE) for row in first_rows]
    if any(proposals):
        greedy = [index for index, each in enumerate(choosers) if each.is_plain and each.params.is_greedy]
        best = logits.argmax(dim=-1).tolist() if greedy else []
        for index in greedy:
            row = first_rows[index]
            runs[index].token_ids = _agreed(best[row:], proposals[index], is_sound[row:])
    alive, depth = [index for index, run in enumerate(runs) if not run.token_ids], 0
    while alive:
        rows = [first_rows[index] + depth for index in alive]
        own = logits if len(rows) == len(logits) else logits[rows]
        choose(own, [choosers[i] for i in alive], [runs[i] for i in alive])
        alive = [
            i for i in alive if _goes_on(runs[i], proposals[i], depth) and is_sound[first_rows[i] + depth + 1]
        ]
        depth += 1
    return runs


def _agreed(best: Many[int], proposed: tuple[int, ...], is_sound: Many[bool]) -> list[int]:
    """The best tokens of a sequence's rows as far as they count, without anything to be done on the way."""
    count = 0
    while count < len(proposed) and best[count] == proposed[count] and is_sound[count + 1]:
        count += 1
    return list(best[: count + 1])


def _goes_on(run: Run, proposed: tuple[int, ...], depth: int) -> bool:
    """Whether the token at `depth` is the proposed one, so that the row behind it counts."""
    has_token = len(run.token_ids) == depth + 1 and not run.failed and not run.ended
    return has_token and depth < len(proposed) and run.token_ids[depth] == proposed[depth]


def choose(logits: Tensor, choosers: Many[TokenChooser], runs: Many[Run]) -> None:
    """Choose a token for each row and add it to its run, or tell there why there is none.

    Args:
        logits: Float ``[num_seqs, vocab_size]``; rows may be changed in place.
        choosers: One for each row.
        runs: What each has chosen in this step already.
    """
    told = [row for row, each in enumerate(choosers) if each.params.logprobs is not None]
    # why: taken before anything is edited, so that they are the model's own, as in vLLM
    before = logits[told].float().log_softmax(dim=-1) if told else logits
    failed = {} if all(each.is_plain for each in choosers) else _edit(logits, choosers, runs)
    token_ids = _sample(logits, choosers)
    logprobs = _logprobs(before, told, token_ids, choosers) if told else {}
    for row, (each, run) in enumerate(zip(choosers, runs, strict=True)):
        if row in failed:
            # why: behind a token that is right the next step will find the same, and then there is none
            run.failed = None if run.token_ids else run.failed or failed[row]
            continue
        run.token_ids.append(token_ids[row])
        run.ended = each.matcher is not None and each.matcher.accept(token_ids[row])
        if row in logprobs:
            run.logprobs.append(logprobs[row])


def _edit(logits: Tensor, choosers: Many[TokenChooser], runs: Many[Run]) -> dict[int, str]:
    """Change the rows of those who want it, in place; returns why some cannot go on."""
    failed = {}
    for index, (row, each, run) in enumerate(zip(logits, choosers, runs, strict=True)):
        if each.editor is not None:
            each.editor.edit(row, run.token_ids)
        if each.matcher is not None:
            try:
                each.matcher.edit(row)
            except GrammarError as error:
                failed[index] = f"the answer's form cannot be kept to any further: {error}"
        if index not in failed and not bool(row.amax().isfinite()):
            failed[index] = NOT_FINITE
        if index in failed:
            row.zero_()
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
