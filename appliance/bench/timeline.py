"""Recorded steps as spans of time, by what they were for: the stuff that traces are drawn from."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from vlm_engine.trace import StepTrace, TracePart

USES = (
    "chat text",
    "chat prompt",
    "chat picture",
    "frame picture",
    "frame prompt",
    "frame text",
    "detector",
)
"""Every part of a step has one of these uses; the order is that of the lanes in a picture."""
_NOUNS = {"encode": "picture", "prefill": "prompt", "decode": "text"}


@dataclass(frozen=True, slots=True)
class Span:
    """One part of a step in time; seconds of `time.perf_counter`.

    Parts of one forward pass run together; here they stand one behind the other, each as long as its share.
    What `is_aside` ran on the side thread, beside the steps.
    """

    begin_s: float
    end_s: float
    use: str
    part: TracePart
    step: int
    is_aside: bool = False


def use_of(part: TracePart) -> str:
    """Which of `USES` a part has."""
    if part.kind == "turn":
        return "detector"
    return f"{'chat' if part.is_chat else 'frame'} {_NOUNS[part.kind]}"


def spans(steps: Iterable[StepTrace]) -> Iterator[Span]:
    """The parts of all steps in the order of time."""
    for step in steps:
        now_s = step.times.planned_s
        for part in step.parts:
            if part.kind != "turn":
                now_s = max(now_s, step.times.lent_s)
            end_s = now_s + part.ms / 1e3
            yield Span(now_s, end_s, use_of(part), part, step.number, is_aside=step.is_aside)
            now_s += part.ms / 1e3


def token_times(steps: Iterable[StepTrace]) -> dict[str, list[float]]:
    """By chat, when it got its tokens, in the order of the first ones."""
    times: dict[str, list[float]] = {}
    for step in steps:
        for part in step.parts:
            if part.samples and part.is_chat:
                times.setdefault(part.request_id, []).append(step.times.end_s)
    return times


def longest_gap(steps: Sequence[StepTrace]) -> tuple[float, float]:
    """Begin and end of the longest time between two tokens of a chat; without any, of all the steps."""
    gaps = [pair for times in token_times(steps).values() for pair in itertools.pairwise(times)]
    if not gaps:
        return steps[0].times.start_s, steps[-1].times.end_s
    return max(gaps, key=lambda gap: gap[1] - gap[0])
