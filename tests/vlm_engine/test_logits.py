"""Bias, penalties, tokens that may not come yet, and logarithms of probabilities."""

import dataclasses

import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from tests.vlm_engine.builders import make_sequence
from vlm_engine.choosing import Run, TokenChooser, choose
from vlm_engine.logits import LogitEditor
from vlm_engine.sampling_params import SamplingParams
from vlm_engine.sequence import Sequence

VOCAB = 40
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))


def sequence_of(
    prompt: list[int], output: list[int], stop_token_ids: tuple[int, ...] = (), **settings: object
) -> Sequence:
    sequence = make_sequence(len(prompt))
    sampling = SamplingParams(temperature=0.0, **settings)  # type: ignore[arg-type]
    sequence.request = dataclasses.replace(sequence.request, sampling=sampling)
    sequence.stop_token_ids = frozenset(stop_token_ids)
    sequence.token_ids = [*prompt, *output]
    return sequence


def edited(sequence: Sequence) -> torch.Tensor:
    row = LOGITS.clone()
    LogitEditor(sequence).edit(row)
    return row


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_is_penalized_as_by_transformers(penalty: float) -> None:
    prompt, output = [3, 3, 5, 8], [9, 9, 1]
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), LOGITS[None].clone())
    ours = edited(sequence_of(prompt, output, repetition_penalty=penalty))
    torch.testing.assert_close(ours, theirs[0])
    assert not torch.equal(ours, LOGITS)


def test_counts_of_the_output_are_penalized_by_openais_formula() -> None:
    """The prompt does not count: mu[j] - c[j] * frequency - (c[j] > 0) * presence."""
    wanted = LOGITS.clone()
    for token_id, count in ((9, 2), (3, 1)):
        wanted[token_id] -= count * 0.25 + 0.5
    ours = edited(sequence_of([3, 7], [9, 3, 9], frequency_penalty=0.25, presence_penalty=0.5))
    torch.testing.assert_close(ours, wanted)


def test_counts_go_on_from_step_to_step() -> None:
    sequence = sequence_of([3, 7], [], repetition_penalty=1.5, frequency_penalty=1.0)
    editor = LogitEditor(sequence)
    for token_id in (9, 9, 3, 12):
        row = LOGITS.clone()
        editor.edit(row)
        torch.testing.assert_close(row, edited(sequence))
        sequence.token_ids.append(token_id)


def test_bias_is_added() -> None:
    wanted = LOGITS.clone()
    wanted[[2, 39]] += torch.tensor([1.5, -100.0])
    torch.testing.assert_close(edited(sequence_of([1], [], logit_bias={2: 1.5, 39: -100})), wanted)


def test_no_end_before_the_least_tokens_as_in_transformers() -> None:
    ends = [4, 6]
    for num_output in range(4):
        sequence = sequence_of([1, 2], [9] * num_output, (*ends, VOCAB + 3), min_tokens=2)
        processor = MinNewTokensLengthLogitsProcessor(2, 2, ends)
        theirs = processor(torch.tensor([sequence.token_ids]), LOGITS[None].clone())
        torch.testing.assert_close(edited(sequence), theirs[0])


def test_who_wants_nothing_has_no_editor() -> None:
    plain = SamplingParams(temperature=0.4, top_k=3, top_p=0.5, min_p=0.1, seed=3, stop=("x",), n=2)
    assert not LogitEditor.is_needed(plain)
    assert TokenChooser(sequence_of([1], [])).is_plain
    for settings in ({"logit_bias": {1: 1}}, {"min_tokens": 1}, {"repetition_penalty": 1.1}, {"logprobs": 0}):
        assert not TokenChooser(sequence_of([1], [], **settings)).is_plain


def chosen(sequences: list[Sequence]) -> list[Run]:
    runs = [Run() for _ in sequences]
    choose(LOGITS.repeat(len(runs), 1), [TokenChooser(each) for each in sequences], runs)
    return runs


def test_rows_are_edited_each_for_itself() -> None:
    best = int(LOGITS.argmax())
    sequences = [
        sequence_of([1], []),
        sequence_of([1], [], logit_bias={best: -100}),
        sequence_of([1], [], logit_bias={7: 100}),
    ]
    runs = chosen(sequences)
    second = int(LOGITS.topk(2).indices[1])
    assert [run.token_ids for run in runs] == [[best], [second], [7]]
    assert not any(run.logprobs for run in runs)


def test_logprobs_are_the_models_own() -> None:
    """Of the raw logits, whatever temperature and bias make of them."""
    sequences = [
        sequence_of([1], [], logprobs=3, logit_bias={7: 100}),
        sequence_of([1], []),
        sequence_of([1], [], logprobs=0),
    ]
    first, second, third = (run.logprobs for run in chosen(sequences))
    wanted = LOGITS.log_softmax(-1)
    assert (len(first), len(second), len(third)) == (1, 0, 1)
    assert first[0].logprob == pytest.approx(float(wanted[7]))
    values, ids = wanted.topk(3)
    assert [i for i, _ in first[0].top] == ids.tolist()
    assert [value for _, value in first[0].top] == pytest.approx(values.tolist())
    assert third[0].logprob == pytest.approx(float(wanted.max()))
    assert third[0].top == ()
