"""Where the time of chats went: waits for a first or a next token, split by what it was spent on."""

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from appliance.bench.load import Recording
from appliance.bench.target import Exchange
from appliance.bench.timeline import use_of
from vlm_engine.trace import StepTrace

HELD_UP = 3.0
"""A step that takes so many times longer than predicted was held up by the machine."""

LEAST_HELD_UP_MS = 20.0
OUR_TIMINGS = frozenset({"queue_ms", "preprocess_ms", "encode_ms", "prefill_ms"})
QUEUED = ("in the queue",)


@dataclass(slots=True)
class Account:
    """Some waits: how many, their time in milliseconds, and what it went into, as far as is known.

    `queued_ms` is how much of the time requests had no place in the steps, whatever these did.
    """

    num: int = 0
    total_ms: float = 0.0
    parts_ms: dict[str, float] = field(default_factory=dict)
    queued_ms: float = 0.0

    def add(self, wait_ms: float, parts_ms: dict[str, float], queued_ms: float = 0.0) -> None:
        """Book one wait."""
        self.queued_ms += queued_ms
        self.num += 1
        self.total_ms += wait_ms
        for part, ms in parts_ms.items():
            self.parts_ms[part] = self.parts_ms.get(part, 0.0) + ms

    def share(self, *parts: str) -> float:
        """The share of the time that went into some parts, or (`QUEUED`) that was spent in the queue."""
        if parts == QUEUED:
            return self.queued_ms / self.total_ms if self.total_ms else 0.0
        return sum(self.parts_ms.get(part, 0.0) for part in parts) / self.total_ms if self.total_ms else 0.0


class Device:
    """What the engine's device did, by its recorded steps."""

    def __init__(self, steps: Sequence[StepTrace]) -> None:
        self._aside = [step for step in steps if step.is_aside]
        self._steps = steps = [step for step in steps if not step.is_aside]
        self._ends = [step.times.end_s for step in steps]
        self.first_s = steps[0].times.start_s if steps else float("inf")

    def between(self, begin_s: float, end_s: float, owner: str, *, is_answering: bool) -> dict[str, float]:
        """Milliseconds by use between two times, as the request `owner` sees it.

        What runs aside delays nobody; a request whose own picture does waits for that, whatever steps do.
        """
        parts = self._in_steps(begin_s, end_s, owner, is_answering=is_answering)
        own_ms = sum(self._own_aside_ms(step, begin_s, end_s, owner) for step in self._aside)
        if own_ms:
            rest = max(0.0, 1.0 - own_ms / (1e3 * (end_s - begin_s)))
            parts = {use: rest * ms for use, ms in parts.items()}
            parts["own picture"] = parts.get("own picture", 0.0) + own_ms
        parts["between steps"] = max(0.0, 1e3 * (end_s - begin_s) - sum(parts.values()))
        return parts

    @staticmethod
    def _own_aside_ms(step: StepTrace, begin_s: float, end_s: float, owner: str) -> float:
        start_s, last_s = step.times.start_s, step.times.end_s
        inside = (min(last_s, end_s) - max(start_s, begin_s)) / max(last_s - start_s, 1e-9)
        return max(0.0, inside) * sum(part.ms for part in step.parts if part.request_id == owner)

    def _in_steps(self, begin_s: float, end_s: float, owner: str, *, is_answering: bool) -> dict[str, float]:
        parts: defaultdict[str, float] = defaultdict(float)
        for step in self._steps[bisect_right(self._ends, begin_s) :]:
            start_s, last_s = step.times.start_s, step.times.end_s
            if start_s >= end_s:
                break
            length_s = max(last_s - start_s, 1e-9)
            inside = (min(last_s, end_s) - max(start_s, begin_s)) / length_s
            for use, ms in _uses(step, owner, is_answering=is_answering):
                parts[use] += ms * inside
        return parts

    def token_times(self, owner: str) -> list[float]:
        """When a request got its tokens."""
        return [
            step.times.end_s
            for step in self._steps
            if any(part.samples and part.request_id == owner for part in step.parts)
        ]


def _uses(step: StepTrace, owner: str, *, is_answering: bool) -> Iterable[tuple[str, float]]:
    measured_ms = sum(part.ms for part in step.parts if part.kind != "turn")
    excess_ms = measured_ms - step.predicted_ms
    is_held_up = excess_ms > LEAST_HELD_UP_MS and measured_ms > HELD_UP * step.predicted_ms
    scale = step.predicted_ms / measured_ms if is_held_up else 1.0
    if is_held_up:
        yield "held up", excess_ms
    for part in step.parts:
        ms = part.ms if part.kind == "turn" else part.ms * scale
        if part.request_id != owner or part.kind == "decode":
            yield use_of(part), ms
        elif is_answering:
            yield "computed again", ms
        else:
            yield "own picture" if part.kind == "encode" else "own prompt", ms


@dataclass(frozen=True, slots=True)
class Accounts:
    """The waits of a run's chats: for first tokens, for next tokens, and those of these that are stalls."""

    first: Account
    following: Account
    stalls: Account


def accounts_of(recording: Recording, stall_ms: float) -> Accounts:
    """The waits of a run; split by the engine's steps where they are known, else by what can be seen."""
    told = Accounts(Account(), Account(), Account())
    device = Device(recording.steps or ())
    # why: timings come with the last chunk, which what was cut off at the end of the run never got
    is_told = any(chat.timings for chat in recording.chats)
    for chat in recording.chats:
        if chat.chunks and chat.due_at >= recording.begin and (chat.timings or not is_told):
            queued_ms = (chat.timings or {}).get("queue_ms", 0.0)
            wait_ms = 1e3 * (chat.chunks[0][0] - chat.due_at)
            told.first.add(wait_ms, _first_parts(chat, recording, device), queued_ms)
        for wait_ms, parts in _gaps(chat, recording, device):
            told.following.add(wait_ms, parts)
            if wait_ms > stall_ms:
                told.stalls.add(wait_ms, parts)
    return told


def _first_parts(chat: Exchange, recording: Recording, device: Device) -> dict[str, float]:
    """The wait for a first token."""
    begin, end = chat.due_at, chat.chunks[0][0]
    timings = chat.timings or {}
    if not timings.keys() >= OUR_TIMINGS:
        # why: other servers tell timings too, of other things
        return _seen_from_outside(begin, end, recording)
    times = device.token_times(chat.answer_id or "")
    inside_ms = sum(timings[name] for name in ("queue_ms", "encode_ms", "prefill_ms"))
    outside = {
        "preprocessing": timings["preprocess_ms"],
        "stream": max(0.0, 1e3 * (end - begin) - inside_ms - timings["preprocess_ms"]),
    }
    if not times or times[0] - inside_ms / 1e3 < device.first_s:
        named = {"queue": "queue_ms", "own picture": "encode_ms", "own prompt": "prefill_ms"}
        return outside | {part: timings[name] for part, name in named.items()}
    started_s = times[0] - inside_ms / 1e3
    parts = device.between(started_s, times[0], chat.answer_id or "", is_answering=False)
    return outside | parts


def _gaps(chat: Exchange, recording: Recording, device: Device) -> Iterable[tuple[float, dict[str, float]]]:
    """The waits between the chunks of one answer that end within the run."""
    times = device.token_times(chat.answer_id or "")
    is_told = len(times) >= len(chat.chunks) > 0
    done = 0
    for (earlier, num), (later, more) in itertools.pairwise(chat.chunks):
        done += num
        if not recording.begin <= later < recording.end:
            continue
        wait_ms = 1e3 * (later - earlier)
        if not is_told or done + more > len(times):
            yield wait_ms, _seen_from_outside(earlier, later, recording)
            continue
        begin_s, end_s = times[done - 1], times[done + more - 1]
        parts = device.between(begin_s, end_s, chat.answer_id or "", is_answering=True)
        # why: a chunk that comes late shortens the next wait, so that only the sum says something
        yield wait_ms, parts | {"stream": wait_ms - 1e3 * (end_s - begin_s)}


def _seen_from_outside(begin: float, end: float, recording: Recording) -> dict[str, float]:
    """A wait by whether a frame was on its way to its first token meanwhile."""
    covered, at = 0.0, begin
    spans = sorted((f.due_at, f.chunks[0][0] if f.chunks else f.ended_at or end) for f in recording.frames)
    for sent, read in spans:
        start, stop = max(at, sent), min(end, read)
        if stop > start:
            covered += stop - start
            at = stop
    return {"while a frame was read": 1e3 * covered, "without a frame": 1e3 * (end - begin - covered)}
