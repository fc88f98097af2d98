"""The scheduler that an engine's settings ask for, at its start and whenever it starts over."""

from vlm_engine.block_pool import BlockPool
from vlm_engine.budget import LatencyTargets, StepBudget, TimeBudget, WorkBudget
from vlm_engine.config import EngineConfig
from vlm_engine.cost_model import CostModel
from vlm_engine.encoder_cache import EncoderCache
from vlm_engine.scheduler import Scheduler
from vlm_engine.side_budget import SideBudget
from vlm_engine.speculation import Speculator
from vlm_engine.static_budget import StaticBudget


def make_scheduler(config: EngineConfig, model: CostModel, num_blocks: int) -> Scheduler:
    """A scheduler without any sequence, cached block or image, or count.

    Args:
        config: Limits and targets.
        model: Predicts what steps take; goes on learning.
        num_blocks: KV blocks of the runner.
    """
    budget, side_budget = _budgets(config, model)
    return Scheduler(
        BlockPool(num_blocks, config.block_size),
        EncoderCache(config.encoder_cache_tokens),
        budget,
        max_num_seqs=config.max_num_seqs,
        num_chat_blocks=int(config.chat_kv_reserve * num_blocks),
        enable_prefix_caching=config.enable_prefix_caching,
        side_budget=side_budget,
        speculator=Speculator(config.speculative) if config.speculative else None,
    )


def _budgets(config: EngineConfig, model: CostModel) -> tuple[StepBudget, WorkBudget | None]:
    """How much goes into a step, and into a piece of work for the side thread if there is one."""
    most, patience_ms = config.max_num_batched_tokens, config.background_ttft_ms
    if config.scheduler == "static":
        return StaticBudget(most), None
    targets = LatencyTargets(config.chat_itl_ms, config.chat_ttft_ms, config.background_share, patience_ms)
    budget = TimeBudget(model, targets, most)
    return budget, SideBudget(model, patience_ms, most, budget.floor) if model.has_side else None
