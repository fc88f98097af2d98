"""Sampling: the distributions of transformers, repeatable by seed in any company."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vlm_engine.errors import RequestError
from vlm_engine.sampler import distribution, make_generator, sample
from vlm_engine.sampling_params import SamplingParams

SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5, top_k=7),
    SamplingParams(top_k=1),
    SamplingParams(top_k=5000),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.01),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    SamplingParams(temperature=5.0, top_p=0.95),
    SamplingParams(temperature=1.5, min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.3),
    SamplingParams(top_p=0.9, min_p=0.2),
]


def _probabilities(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    mass, candidates = distribution(logits, params)
    if candidates is not None:
        mass = torch.zeros_like(logits).scatter(-1, candidates, mass)
    return mass / mass.sum(dim=-1, keepdim=True)


def _by_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    warped: torch.Tensor = warpers(torch.zeros(len(logits), 1, dtype=torch.long), logits)
    return warped.softmax(dim=-1)


def _by_hand(logits: list[float], params: SamplingParams) -> list[float]:
    weights = [math.exp(each / params.temperature) for each in logits]
    ranked = sorted(range(len(logits)), key=lambda token: -weights[token])[: params.top_k or len(logits)]
    total, before, kept = sum(weights[token] for token in ranked), 0.0, []
    for token in ranked:
        if kept and before >= params.top_p:
            break
        kept.append(token)
        before += weights[token] / total
    kept = [token for token in kept if weights[token] >= params.min_p * weights[ranked[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_distribution_is_that_of_transformers(params: SamplingParams, spread: float) -> None:
    logits = spread * torch.randn(4, 3000, generator=torch.Generator().manual_seed(3))
    ours, theirs = _probabilities(logits, [params] * 4), _by_transformers(logits, params)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)
    assert torch.equal(ours > 0, theirs > 0)


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_distribution_worked_out_by_hand(params: SamplingParams) -> None:
    logits = [0.5, -1.0, 2.0, 1.9, 0.0, -3.0, 1.0]
    ours = _probabilities(torch.tensor([logits]), [params])[0]
    torch.testing.assert_close(ours, torch.tensor(_by_hand(logits, params)), rtol=1e-5, atol=1e-7)


def test_rows_of_one_kind_keep_their_own_settings() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(5))
    params = [
        SamplingParams(top_k=k, top_p=p, temperature=t)
        for k, p, t in [(3, 1, 1), (40, 0.5, 2), (9, 0.9, 0.5)]
    ]
    together = _probabilities(logits, params)
    alone = [_probabilities(logits[row : row + 1], [each]) for row, each in enumerate(params)]
    torch.testing.assert_close(together, torch.cat(alone))


def test_tokens_that_tie_with_the_last_kept_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0, 0.0]])
    params = SamplingParams(top_k=3)
    assert (_probabilities(logits, [params]) > 0).sum() == 5
    torch.testing.assert_close(_probabilities(logits, [params]), _by_transformers(logits, params))


def test_fewer_tokens_may_come_than_top_k_keeps() -> None:
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, [3, 17]] = torch.tensor([0.0, 1.0])
    mass, candidates = distribution(logits, [SamplingParams(top_k=10)])
    assert candidates is not None
    assert candidates.tolist() == [[17, 3]]
    torch.testing.assert_close(mass[0, 0] / mass[0, 1], torch.tensor(1.0).exp())


@pytest.mark.parametrize("params", [SETTINGS[0], SETTINGS[5], SETTINGS[7]], ids=str)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    num_draws = 20_000
    logits = 2 * torch.randn(1, 30, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(9)
    drawn = sample(logits.expand(num_draws, -1), [params] * num_draws, [generator] * num_draws)
    counts = torch.bincount(drawn, minlength=30) / num_draws
    wanted = _probabilities(logits, [params])[0]
    assert not counts[wanted == 0].any()
    assert (counts - wanted).abs().sum() < 0.03


def test_greedy_rows_take_the_best_whatever_is_beside_them() -> None:
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    greedy, hot = SamplingParams(temperature=0, top_k=5, top_p=0.1), SamplingParams(temperature=9.0)
    mixed = sample(logits, [greedy, hot] * 3, [None] * 6)
    alone = sample(logits, [greedy] * 6, [None] * 6)
    assert torch.equal(alone, logits.float().argmax(dim=-1))
    assert torch.equal(mixed[::2], alone[::2])
    assert mixed.dtype == torch.int64


def _draw_series(params: list[SamplingParams], steps: int, row: int) -> list[int]:
    """What `row` draws when rows of these settings run together; the logits of a row are its own."""
    generators = [make_generator(each) for each in params]
    source = torch.Generator().manual_seed(77)
    own = 2 * torch.randn(steps, 200, generator=source)
    tokens = []
    for step in range(steps):
        logits = torch.randn(len(params), 200)
        logits[row] = own[step]
        tokens.append(int(sample(logits, params, generators)[row]))
    return tokens


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    mine = SamplingParams(seed=5, temperature=1.2)
    others = [
        SamplingParams(temperature=0),
        SamplingParams(seed=6),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.5),
    ]
    alone = _draw_series([mine], 20, 0)
    assert len(set(alone)) > 5
    assert _draw_series([*others, mine], 20, 4) == alone
    assert _draw_series([mine, mine, *others], 20, 1) == alone
    assert _draw_series([SamplingParams(seed=6, temperature=1.2)], 20, 0) != alone


def test_without_a_seed_the_global_generator_decides() -> None:
    logits, params = torch.zeros(1, 1000), [SamplingParams()]
    draws = Counter(int(sample(logits, params, [None])) for _ in range(20))
    assert len(draws) > 10


def test_the_largest_random_number_draws_a_possible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = torch.tensor(1 - 2**-53, dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: largest)
    logits = torch.full((1, 50), -torch.inf)
    logits[0, [3, 17]] = torch.tensor([0.1, 0.3])
    assert int(sample(logits, [SamplingParams()], [None])) == 17
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.zeros((), dtype=torch.float64))
    assert int(sample(logits, [SamplingParams()], [None])) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", None),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", "0"),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 1e300),
        ("temperature", 10**400),
        ("top_k", 2**70),
        ("max_tokens", 2**70),
        ("logit_bias", {1: 101}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"1": 1}),
        ("logit_bias", [1]),
        ("logprobs", 21),
        ("logprobs", True),
        ("n", 0),
        ("n", 129),
        ("stop_token_ids", [1]),
        ("stop_token_ids", (-1,)),
        ("min_tokens", -1),
        ("seed", "7"),
        ("seed", 2**64),
        ("stop", "text"),
        ("stop", ("",)),
        ("stop", (1,)),
        ("ignore_eos", 1),
    ],
)
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_no_more_tokens_can_be_wanted_than_allowed() -> None:
    with pytest.raises(RequestError, match=r"min_tokens must be at most max_tokens \(3\)"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_each_answer_has_random_numbers_of_its_own() -> None:
    params = SamplingParams(n=3, seed=2**64 - 1, top_k=4)
    assert [params.of_choice(i).seed for i in range(3)] == [2**64 - 1, 0, 1]
    assert {params.of_choice(i).n for i in range(3)} == {1}
    assert SamplingParams(n=3).of_choice(2).seed is None


def test_values_at_the_edge_are_fine() -> None:
    params = SamplingParams(max_tokens=1, temperature=0, top_p=1, top_k=0, seed=-(2**63), stop=("a", "b"))
    assert params.is_greedy
    assert make_generator(SamplingParams(seed=2**64 - 1)) is not None
    assert make_generator(params) is None
    assert not SamplingParams().is_greedy
