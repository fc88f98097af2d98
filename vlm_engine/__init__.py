"""A vision-language engine that prefills image prompts in chunks beside interactive chat.

The names below are the public interface. Those that need torch are imported when they are first
used, so that settings and schedulers can be read without it.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vlm_engine.books import HistogramSnapshot, WorkStats
from vlm_engine.config import EngineConfig, TurnConfig
from vlm_engine.errors import (
    EngineBroken,
    EngineBusy,
    EngineError,
    EngineStopped,
    GateError,
    ImageRejected,
    ModelLoadError,
    NotEnoughMemory,
    PromptTooLong,
    RequestError,
    UnsupportedModel,
)
from vlm_engine.gate_client import GateClient
from vlm_engine.metrics import ClassStats, EngineStats
from vlm_engine.request import GenerationRequest, Timings, TokenEvent, Usage
from vlm_engine.sampling_params import SamplingParams, StructuredOutput
from vlm_engine.trace import StepTimes, StepTrace, TracePart
from vlm_engine.turn import TurnStats

if TYPE_CHECKING:
    from vlm_engine.async_engine import AsyncEngine
    from vlm_engine.client import EngineProcess
    from vlm_engine.engine import Engine

_LATE = {
    "AsyncEngine": "vlm_engine.async_engine",
    "Engine": "vlm_engine.engine",
    "EngineProcess": "vlm_engine.client",
}

__all__ = [
    "AsyncEngine",
    "ClassStats",
    "Engine",
    "EngineBroken",
    "EngineBusy",
    "EngineConfig",
    "EngineError",
    "EngineProcess",
    "EngineStats",
    "EngineStopped",
    "GateClient",
    "GateError",
    "GenerationRequest",
    "HistogramSnapshot",
    "ImageRejected",
    "ModelLoadError",
    "NotEnoughMemory",
    "PromptTooLong",
    "RequestError",
    "SamplingParams",
    "StepTimes",
    "StepTrace",
    "StructuredOutput",
    "Timings",
    "TokenEvent",
    "TracePart",
    "TurnConfig",
    "TurnStats",
    "UnsupportedModel",
    "Usage",
    "WorkStats",
]


# why: transformers imports torchao where it is installed, and torch complains of torchao on standard error.
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)
