"""Builders that make a scheduler test a few lines."""

import hashlib
from itertools import count

from vlm_engine.block_pool import BlockPool
from vlm_engine.encoder_cache import EncoderCache
from vlm_engine.plan import StepPlan
from vlm_engine.request import GenerationRequest, Priority
from vlm_engine.sampling_params import SamplingParams
from vlm_engine.scheduler import Scheduler
from vlm_engine.sequence import Placeholder, Sequence
from vlm_engine.static_budget import StaticBudget

_ids = count()


def image(start: int, length: int, content: str, *, both_ways: bool = False) -> Placeholder:
    digest = hashlib.sha256(content.encode()).digest()
    return Placeholder(start, length, digest, attends_both_ways=both_ways)


def make_sequence(
    num_prompt: int,
    *,
    max_tokens: int = 4,
    priority: Priority = "interactive",
    images: tuple[Placeholder, ...] = (),
    arrival_s: float | None = None,
    expires_at: float | None = None,
    text: int | None = None,
    tenant: str = "",
) -> Sequence:
    number = next(_ids)
    sampling = SamplingParams(max_tokens=max_tokens)
    request = GenerationRequest(f"r{number}", (), sampling, priority, expires_at, tenant)
    first_token = 1000 * (number if text is None else -1 - text)
    is_image = {i for p in images for i in range(p.start, p.end)}
    return Sequence(
        request=request,
        token_ids=[7 if i in is_image else first_token + i for i in range(num_prompt)],
        num_prompt_tokens=num_prompt,
        placeholders=images,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        arrival_s=float(number) if arrival_s is None else arrival_s,
    )


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    encoder_tokens: int = 200,
    budget: int = 32,
    max_num_seqs: int = 8,
    num_chat_blocks: int = 0,
) -> Scheduler:
    pool = BlockPool(num_blocks, block_size)
    cache = EncoderCache(encoder_tokens)
    return Scheduler(
        pool, cache, StaticBudget(budget), max_num_seqs=max_num_seqs, num_chat_blocks=num_chat_blocks
    )


def finish_step(scheduler: Scheduler, plan: StepPlan) -> list[Sequence]:
    """Do to the books what the engine does after a step; returns the sequences that ended."""
    scheduler.commit(plan)
    ended = []
    for chunk in plan.chunks:
        if not chunk.samples:
            continue
        reason = chunk.sequence.append(5000 + chunk.sequence.num_output_tokens)
        if reason:
            scheduler.finish(chunk.sequence, reason)
            ended.append(chunk.sequence)
    return ended


def run(scheduler: Scheduler, *, max_steps: int = 2000) -> list[StepPlan]:
    """Step until nothing is left; the plans made."""
    plans = []
    while scheduler.has_work:
        assert len(plans) < max_steps, "the scheduler makes no progress"
        plan = scheduler.plan(float(len(plans)))
        finish_step(scheduler, plan)
        scheduler.check_integrity()
        plans.append(plan)
    return plans
