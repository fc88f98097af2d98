"""One run: a server (or an engine of one's own), a load, a result."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from appliance.bench.load import Recording, run_load
from appliance.bench.machine import environment
from appliance.bench.metrics import measurements
from appliance.bench.own_engine import own_engine
from appliance.bench.plan import LoadPlan
from appliance.bench.target import Target
from appliance.settings import Settings

FORMAT = 1
"""Raised when a key of the results changes its meaning."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Server:
    """A server that somebody else started; `model` None takes the first that it serves."""

    url: str
    model: str | None = None
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured, ready for JSON, and all that it was made from."""

    result: dict[str, Any]
    recording: Recording


def measure_server(server: Server, plan: LoadPlan, say: Say) -> Run:
    """A run against `server`; raises `BenchError`."""
    say(f"measuring {plan.warm_up_s + plan.seconds:.0f} s …")
    return asyncio.run(_measure(server, plan, {}))


def measure_own_engine(settings: Settings, plan: LoadPlan, say: Say) -> Run:
    """A run against a fresh engine with `settings`; raises `BenchError`."""
    with engine_to_measure(settings, say) as measure:
        say(f"measuring {plan.warm_up_s + plan.seconds:.0f} s …")
        return measure(plan)


@contextmanager
def engine_to_measure(settings: Settings, say: Say) -> Iterator[Callable[[LoadPlan], Run]]:
    """A fresh engine with `settings`, as what runs a load against it; raises `BenchError`."""
    say("starting the engine …")
    with own_engine(settings) as engine:
        say(f"it is up after {engine.start_s:.0f} s")
        target = {"start_s": engine.start_s, "engine": asdict(settings.engine)}
        yield lambda plan: asyncio.run(_measure(Server(engine.url), plan, target))


async def _measure(server: Server, plan: LoadPlan, told: dict[str, Any]) -> Run:
    started_at = time.time()
    target = Target(server.url, server.api_key)
    try:
        model = await target.model_name(server.model)
        where = environment()
        recording = await run_load(target, plan, model)
    finally:
        await target.close()
    about = {"url": target.shown_url, "model": model, "engine": None, "start_s": None} | told
    return Run(_head(started_at, plan, about) | where | measurements(recording, plan.stall_ms), recording)


def _head(started_at: float, plan: LoadPlan, about: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "latency",
        "format": FORMAT,
        "measured_at": datetime.fromtimestamp(started_at, UTC).isoformat(timespec="seconds"),
        "target": about,
        "arguments": asdict(plan),
    }
