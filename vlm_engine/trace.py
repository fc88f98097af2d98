"""What each step did and for how long, kept for the newest steps when asked for; pure Python."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from vlm_engine.cost_model import CostModel
from vlm_engine.plan import StepPlan

Kind = Literal["turn", "encode", "prefill", "decode"]

MAX_STEPS_AT_ONCE = 512
"""Steps of one `Tracer.since`: the engine tells them between two steps, and nobody may notice."""


@dataclass(frozen=True, slots=True)
class TracePart:
    """What a step did for one request, or for a detector.

    Args:
        kind: ``decode`` and ``prefill`` are tokens, ``encode`` slices of an image, ``turn``
            pieces of a detector.
        request_id: Empty for a detector.
        is_chat: Whether a person waits for the request.
        amount: Tokens, slices or pieces.
        ms: Its share of the measured time; parts of one forward pass share it as the cost model says.
        samples: Whether the request got a token.
    """

    kind: Kind
    request_id: str
    is_chat: bool
    amount: int
    ms: float
    samples: bool = False


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a step's phases ended, in seconds on the engine's clock, and what was measured inside.

    Args:
        start_s: The plan was begun.
        planned_s: The plan was made.
        lent_s: The detector's turn, if there was one, was over.
        end_s: Tokens were sampled.
    """

    start_s: float
    planned_s: float
    lent_s: float
    end_s: float
    encode_ms: float = 0.0
    forward_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step: its number, its times, what was expected of it, and what it did in the order of time.

    Args:
        predicted_ms: What encoding and forward pass were to take.
        allowance_ms: What the step could take; None where steps are counted in tokens.
        is_aside: The side thread ran it, beside others.
    """

    number: int
    times: StepTimes
    predicted_ms: float
    allowance_ms: float | None
    parts: tuple[TracePart, ...]
    is_aside: bool = False


class Tracer:
    """The newest steps, in a ring.

    Args:
        capacity: How many steps are kept.
        model: Says how the parts of a forward pass share its time.
    """

    def __init__(self, capacity: int, model: CostModel) -> None:
        self._steps: deque[StepTrace] = deque(maxlen=capacity)
        self._model = model
        self._num_added = 0

    def add(
        self,
        plan: StepPlan,
        times: StepTimes,
        predicted_ms: float,
        allowance_ms: float | None,
        *,
        is_aside: bool = False,
    ) -> None:
        """Record a step that ran; before its sequences are moved on."""
        parts = *self._turn(plan, times), *self._encodes(plan, times), *self._chunks(plan, times)
        self._steps.append(StepTrace(self._num_added, times, predicted_ms, allowance_ms, parts, is_aside))
        self._num_added += 1

    def since(self, number: int) -> list[StepTrace]:
        """The oldest steps from `number` on that are still there, at most `MAX_STEPS_AT_ONCE`."""
        first = self._num_added - len(self._steps)
        begin = max(0, number - first)
        return list(islice(self._steps, begin, begin + MAX_STEPS_AT_ONCE))

    def _turn(self, plan: StepPlan, times: StepTimes) -> Iterator[TracePart]:
        if plan.turn is not None:
            yield TracePart("turn", "", False, plan.turn.num_pieces, 1e3 * (times.lent_s - times.planned_s))

    def _encodes(self, plan: StepPlan, times: StepTimes) -> Iterator[TracePart]:
        shares = _shares([self._model.slice_ms(item.work) for item in plan.encodes], times.encode_ms)
        for item, ms in zip(plan.encodes, shares, strict=True):
            owner = item.sequence
            yield TracePart("encode", owner.request_id, owner.is_interactive, item.last - item.first, ms)

    def _chunks(self, plan: StepPlan, times: StepTimes) -> Iterator[TracePart]:
        shares = _shares([self._model.step_ms(chunk.work) for chunk in plan.chunks], times.forward_ms)
        for chunk, ms in zip(plan.chunks, shares, strict=True):
            owner = chunk.sequence
            kind: Kind = "decode" if owner.is_decoding else "prefill"
            yield TracePart(
                kind, owner.request_id, owner.is_interactive, chunk.num_tokens, ms, samples=chunk.samples
            )


def _shares(weights: list[float], total: float) -> list[float]:
    """`total` in parts that are to each other as the weights."""
    weight = sum(weights)
    return [total * w / weight if weight else total / len(weights) for w in weights]
