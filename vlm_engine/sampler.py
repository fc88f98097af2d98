"""Choose the next token of every sequence of a step.

The order is that of `transformers.generate`: temperature, then top-k, then top-p, then min-p, each on
what the one before left over.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vlm_engine.sampling_params import SamplingParams

NUCLEUS = 1024


def make_generator(params: SamplingParams) -> torch.Generator | None:
    """The random numbers of one sequence, on the CPU; None if it is greedy or has no seed."""
    if params.seed is None or params.is_greedy:
        return None
    return torch.Generator().manual_seed(params.seed)


def skip(generator: torch.Generator | None, num_tokens: int) -> None:
    """Have a sequence's random numbers stand where they stand after so many tokens."""
    if generator is not None:
        _uniform([generator] * num_tokens)


def sample(
    logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
) -> Tensor:
    """Next token of each sequence.

    Args:
        logits: [num_seqs, vocab_size], any float type, on any device.
        params: Settings, one for each row.
        generators: CPU generators, one for each row; None draws from torch's global one. A row that
            is not greedy takes exactly one number from its generator, so that its text depends on its
            seed and not on its neighbours.

    Returns:
        Token ids, int64 [num_seqs], on the device of `logits`.
    """
    scores = logits.float()
    token_ids = scores.argmax(dim=-1)
    for rows in _groups(params):
        mass, candidates = distribution(scores[rows], [params[row] for row in rows])
        drawn = _draw(mass, [generators[row] for row in rows])
        token_ids[rows] = (drawn if candidates is None else candidates.gather(-1, drawn)).squeeze(-1)
    return token_ids


def distribution(scores: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor | None]:
    """What rows of one kind (see `_groups`) are drawn from.

    Args:
        scores: Logits, float32 [n, vocab_size].
        params: Settings, one for each row; none is greedy.

    Returns:
        Probabilities up to a common factor in each row, float32 [n, m], and the token ids that they
        belong to, int64 [n, m], best first; without ids they are those of all tokens in order.
    """
    scores = scores / _column([each.temperature for each in params], scores)
    top_p, candidates = [each.top_p for each in params], None
    if params[0].top_k:
        probs, candidates = _top_k(scores, [min(each.top_k, scores.shape[-1]) for each in params])
    elif params[0].top_p < 1:
        probs, candidates = _nucleus(scores, max(top_p))
    else:
        probs = scores.softmax(dim=-1)
    if candidates is not None:
        probs = _keep_top_p(probs, top_p)
    return _keep_min_p(probs, [each.min_p for each in params]), candidates


def _groups(params: Sequence[SamplingParams]) -> list[list[int]]:
    """Rows that are not greedy: those with top-k, those with top-p only, those with neither."""
    groups: dict[tuple[bool, bool], list[int]] = {}
    for row, each in enumerate(params):
        if not each.is_greedy:
            groups.setdefault((each.top_k > 0, not each.top_k and each.top_p < 1), []).append(row)
    return list(groups.values())


def _top_k(scores: Tensor, top_k: Sequence[int]) -> tuple[Tensor, Tensor]:
    best = scores.topk(max(top_k), dim=-1).values
    last_kept = best.gather(-1, torch.tensor(top_k, device=scores.device).unsqueeze(-1) - 1)
    # why: where fewer may come than top-k keeps, those that may not would tie with each other
    last_kept = last_kept.clamp(min=torch.finfo(scores.dtype).min)
    # why: tokens that tie with the last one kept stay too, as in transformers; bfloat16 logits tie often.
    num_kept = int((scores >= last_kept).sum(dim=-1).max())
    best, candidates = scores.topk(num_kept, dim=-1)
    return best.masked_fill(best < last_kept, -torch.inf).softmax(dim=-1), candidates


def _nucleus(scores: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Enough of the best tokens to hold `top_p` in every row: most often few, else all of them."""
    log_total = scores.logsumexp(dim=-1, keepdim=True)
    # why: to sort a vocabulary of 150,000 on one core takes 16 ms a row, to find its best 1,024 takes 1 ms.
    best, candidates = scores.topk(min(NUCLEUS, scores.shape[-1]), dim=-1)
    if bool(((best - log_total).exp().sum(dim=-1) < top_p).any()):
        best, candidates = scores.sort(dim=-1, descending=True)
    return (best - log_total).exp(), candidates


def _keep_top_p(probs: Tensor, top_p: Sequence[float]) -> Tensor:
    """Zero for every token that only comes after `top_p` is reached; the best one always stays."""
    mass = probs.double()
    before = mass.cumsum(dim=-1) - mass
    is_out = before >= _column([each if each < 1 else 2.0 for each in top_p], mass)
    is_out[:, 0] = False
    return probs.masked_fill(is_out, 0)


def _keep_min_p(probs: Tensor, min_p: Sequence[float]) -> Tensor:
    """Zero for every token with less than `min_p` of the best one's probability."""
    if not any(min_p):
        return probs
    least = probs.amax(dim=-1, keepdim=True) * _column(min_p, probs)
    return probs.masked_fill(probs < least, 0)


def _draw(mass: Tensor, generators: Sequence[torch.Generator | None]) -> Tensor:
    """One column of each row, [n, 1], by inverting the distribution function at one uniform number."""
    uniform = _uniform(generators)
    cumulative = mass.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # why: a product that rounds up to the total would fall behind the last token that has any probability.
    point = torch.stack(uniform).to(mass.device).unsqueeze(-1) * total
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point, right=True).clamp_(max=mass.shape[-1] - 1)


def _uniform(generators: Sequence[torch.Generator | None]) -> list[Tensor]:
    return [torch.rand((), dtype=torch.float64, generator=generator) for generator in generators]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)
