"""From what was recorded to numbers; times are in milliseconds, shares from 0 to 1."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from appliance.bench.exposition import server_report
from appliance.bench.load import Recording
from appliance.bench.target import Exchange

STALL_MS = 100.0
"""A gap that is longer is one that a reader notices."""

_PERCENTILES = (50, 90, 95, 99)


def summary(values_ms: Sequence[float]) -> dict[str, Any]:
    """Count, mean, largest and percentiles, linear between two ranks; None for each without values."""
    names = [f"p{percentile}" for percentile in _PERCENTILES]
    if not values_ms:
        return {"n": 0} | dict.fromkeys([*names, "max", "mean"])
    values = np.asarray(values_ms, dtype=np.float64)
    told = dict(zip(names, np.percentile(values, _PERCENTILES), strict=True))
    told |= {"max": values.max(), "mean": values.mean()}
    return {"n": len(values_ms)} | {name: round(float(value), 2) for name, value in told.items()}


def stall_share(gaps_ms: Sequence[float], above_ms: float = STALL_MS) -> float | None:
    """The share of the gaps' time that lies in gaps longer than `above_ms`; None without gaps."""
    total = sum(gaps_ms)
    return round(sum(gap for gap in gaps_ms if gap > above_ms) / total, 4) if total else None


def gaps_ms(chats: Sequence[Exchange], begin: float, end: float) -> list[float]:
    """The gaps before every chunk but an answer's first, by when they ended.

    A gap that is still open at `end` counts when it is longer than all others: a server that stops
    in the middle of an answer must not look quick.
    """
    ended, still_open = list[float](), list[float]()
    for chat in chats:
        times = [time for time, _ in chat.chunks if time < end]
        ended += [later - earlier for earlier, later in itertools.pairwise(times) if later >= begin]
        if times and (chat.ended_at is None or chat.ended_at >= end):
            still_open.append(end - max(times[-1], begin))
    return _in_ms(ended, still_open)


def ttfts_ms(exchanges: Sequence[Exchange], begin: float, end: float) -> list[float]:
    """From when a request was due to its first token, for those due in the window; open ones as for gaps."""
    ended, still_open = list[float](), list[float]()
    for exchange in _due_within(exchanges, begin, end):
        if exchange.chunks:
            ended.append(exchange.chunks[0][0] - exchange.due_at)
        elif exchange.ended_at is None:
            still_open.append(end - exchange.due_at)
    return _in_ms(ended, still_open)


def measurements(recording: Recording, stall_ms: float = STALL_MS) -> dict[str, Any]:
    """`chat`, `frames` and `errors` of a run, and what the `server` says of it (None: nothing)."""
    return {
        "server": server_report(recording.growth) if recording.growth else None,
        "chat": _chat(recording, stall_ms),
        "frames": _frames(recording),
        "errors": _errors([*recording.chats, *recording.frames]),
    }


def _chat(recording: Recording, stall_ms: float) -> dict[str, Any]:
    begin, end = recording.begin, recording.end
    gaps = gaps_ms(recording.chats, begin, end)
    news = [num for chat in recording.chats for time, num in chat.chunks if begin <= time < end]
    answered = [chat for chat in recording.chats if chat.is_done and begin <= _end_of(chat) < end]
    return {
        "num_answers": len(answered),
        "num_tokens": sum(news),
        "tokens_per_s": round(sum(news) / (end - begin), 2),
        "tokens_per_chunk": round(sum(news) / len(news), 3) if news else None,
        "are_tokens_told": all(chat.has_counts for chat in answered),
        "prompt_tokens": _mean([chat.prompt_tokens for chat in answered if chat.prompt_tokens]),
        "itl_ms": summary(gaps),
        "ttft_ms": summary(ttfts_ms(recording.chats, begin, end)),
        "stall_share": stall_share(gaps, stall_ms),
    }


def _frames(recording: Recording) -> dict[str, Any]:
    """Frames are counted by when they were due, frames a second by when they were answered."""
    begin, end = recording.begin, recording.end
    sent = _due_within(recording.frames, begin, end)
    done = [frame for frame in sent if frame.is_done]
    in_window = [frame for frame in recording.frames if frame.is_done and begin <= _end_of(frame) < end]
    return {
        "num_sent": len(sent),
        "num_done": len(done),
        "num_open_at_end": sum(1 for frame in sent if frame.ended_at is None or frame.ended_at >= end),
        "num_repeated": max(0, len(recording.frames) - recording.num_pictures),
        "frames_per_s": round(len(in_window) / (end - begin), 3),
        "prompt_tokens": _mean([frame.prompt_tokens for frame in done if frame.prompt_tokens]),
        "latency_ms": summary([1000 * (_end_of(frame) - frame.due_at) for frame in done]),
        "ttft_ms": summary(ttfts_ms(sent, begin, end)),
        "server_ms": _server_times(done),
    }


def _errors(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    messages = Counter(exchange.error for exchange in exchanges if exchange.error)
    return {"num": messages.total(), "messages": dict(messages.most_common(5))}


def _server_times(done: Sequence[Exchange]) -> dict[str, float | None]:
    """Means of what the server itself tells about where the time went; empty when it tells nothing."""
    told = [frame.timings for frame in done if frame.timings]
    names = told[0] if told else ()
    return {name: _mean([times[name] for times in told if name in times]) for name in names}


def _due_within(exchanges: Sequence[Exchange], begin: float, end: float) -> list[Exchange]:
    return [exchange for exchange in exchanges if begin <= exchange.due_at < end]


def _end_of(exchange: Exchange) -> float:
    assert exchange.ended_at is not None
    return exchange.ended_at


def _in_ms(ended: list[float], still_open: list[float]) -> list[float]:
    longest = max(still_open, default=0.0)
    waits = [*ended, longest] if longest > max(ended, default=0.0) and still_open else ended
    return [1000 * wait for wait in waits]


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 1) if values else None
