"""The start of an engine: warm kernels and known costs before the first request comes."""

import logging
import time
from collections.abc import Callable, Iterable

from vlm_engine.calibration import DECODES, VariedBudget, cost_cache, full_requests, short_requests
from vlm_engine.engine import Engine
from vlm_engine.errors import RequestError
from vlm_engine.request import GenerationRequest

log = logging.getLogger(__name__)

CALIBRATION_S = 4.0
"""How long made-up requests may run on a first start; what is not measured by then is learned later."""

NEAR = 3.0
"""Steps that take so many times longer, or shorter, than the stored costs say were measured elsewhere."""

WORTH_KEEPING = 500
"""Steps after which what was learned online is better than what was measured at the start."""


def warm_up(engine: Engine, tell: Callable[[str], object] = lambda text: None) -> None:
    """Run a few made-up requests, so that the first real one meets warm kernels and known costs.

    `tell` hears of it, in words, when that takes longer than usual.

    Takes less than a second of a fast machine where the costs are known from an earlier start, and else at
    most some seconds (`CALIBRATION_S`); leaves nothing behind but what the cost model learned.
    """
    costs = engine.cost_model
    _rehearse(engine, short_requests())
    costs.reset()
    cache = cost_cache(engine.config, engine.model.spec)
    if cache.load_into(costs):
        stored_ms = costs.step_ms(DECODES)
        _rehearse(engine, short_requests())
        ratio = costs.step_ms(DECODES) / max(stored_ms, 1e-6)
        if 1 / NEAR < ratio < NEAR:
            return
        log.warning("steps take %.1f times what %s says: measured anew", ratio, cache.path)
        costs.reset()
    tell("measuring what steps take on this machine, some seconds …")
    _rehearse(engine, full_requests())
    cache.store(costs)


def keep_costs(engine: Engine) -> None:
    """Store what the cost model has learned for the next start."""
    if engine.num_steps >= WORTH_KEEPING:
        cost_cache(engine.config, engine.model.spec).store(engine.cost_model)


def _rehearse(engine: Engine, requests: Iterable[GenerationRequest]) -> None:
    """Run requests in steps of many shapes, as far as the time for it goes."""
    ends_s = time.monotonic() + CALIBRATION_S
    engine.scheduler.budget = VariedBudget(engine.config.max_num_batched_tokens)
    engine.scheduler.side_budget = None
    for request in requests:
        try:
            engine.add(request)
        except RequestError as error:
            log.info("%s does not fit this model: %s", request.request_id, error)
    while engine.has_work and time.monotonic() < ends_s:
        engine.step()
    engine.start_over()
