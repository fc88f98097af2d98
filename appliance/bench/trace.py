"""A run's steps as a trace for Perfetto (https://ui.perfetto.dev) or Chrome, and as a picture."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.bench.errors import BenchError
from appliance.bench.latency import Run
from appliance.bench.metrics import STALL_MS
from appliance.bench.timeline import USES, longest_gap, spans, token_times
from vlm_engine.trace import StepTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ONE_PASS_TOKENS = 8192
"""A budget that holds every prompt and picture whole: what engines without chunks do."""

_COLORS = {
    "chat text": "#1f5fbf",
    "chat prompt": "#5b9bf0",
    "chat picture": "#a9cdfb",
    "frame picture": "#e8590c",
    "frame prompt": "#f59f00",
    "frame text": "#c9a66b",
    "detector": "#2b8a3e",
}
_GAP_COLOR = "#e03131"
_ASIDE = len(USES) + 2


@dataclass(frozen=True, slots=True)
class Traced:
    """The steps of one run under a name for people."""

    name: str
    steps: Sequence[StepTrace]
    result: Mapping[str, Any]


def traced(name: str, run: Run) -> Traced:
    """The part of a run that was measured; raises `BenchError` when the server recorded no steps."""
    begin, end = run.recording.begin, run.recording.end
    steps = [step for step in run.recording.steps or () if begin <= step.times.start_s < end]
    if not steps:
        raise BenchError(
            "the server tells no steps: it has to be an appliance with engine.trace_steps set, "
            "as in APPLIANCE_ENGINE__TRACE_STEPS=20000"
        )
    return Traced(name, steps, run.result)


def perfetto(runs: Sequence[Traced]) -> dict[str, Any]:
    """All runs in Chrome's trace event format, each a process, with a track for every use of the time."""
    events = [event for pid, run in enumerate(runs, 1) for event in _events(pid, run)]
    about = {run.name: {key: run.result[key] for key in _ABOUT} for run in runs}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


_ABOUT = ("measured_at", "target", "arguments", "machine", "versions", "commit")


def write_trace(path: Path, runs: Sequence[Traced]) -> None:
    """Writes `perfetto` of the runs; raises `BenchError`."""
    try:
        path.write_text(json.dumps(perfetto(runs)), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: cannot be written: {error.strerror}: choose another file") from None


def _events(pid: int, run: Traced) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": run.name}}
    aside = ("aside", "aside: what for") if any(step.is_aside for step in run.steps) else ()
    for tid, track in enumerate(("steps", *USES, "chat tokens", *aside)):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": track}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
    zero_s = run.steps[0].times.start_s
    for step in run.steps:
        yield from _step_events(pid, step, zero_s)
    for span in spans(run.steps):
        args = {"request": span.part.request_id, "amount": span.part.amount, "step": span.step}
        tid = _ASIDE + 1 if span.is_aside else 1 + USES.index(span.use)
        yield _event(pid, tid, span.use, span.begin_s - zero_s, span.end_s - span.begin_s) | {"args": args}
    for request_id, times in token_times(run.steps).items():
        for time_s in times:
            at = {
                "ph": "i",
                "s": "t",
                "pid": pid,
                "tid": 1 + len(USES),
                "ts": round(1e6 * (time_s - zero_s), 1),
            }
            yield at | {"name": "token", "args": {"request": request_id}}


def _step_events(pid: int, step: StepTrace, zero_s: float) -> Iterator[dict[str, Any]]:
    """The step itself, and its time beside what was predicted and allowed."""
    times = step.times
    measured_ms = times.encode_ms + times.forward_ms
    args = {
        "number": step.number,
        "plan_ms": round(1e3 * (times.planned_s - times.start_s), 3),
        "turn_ms": round(1e3 * (times.lent_s - times.planned_s), 3),
        "encode_ms": round(times.encode_ms, 3),
        "forward_ms": round(times.forward_ms, 3),
        "predicted_ms": round(step.predicted_ms, 3),
        "allowance_ms": step.allowance_ms and round(step.allowance_ms, 3),
    }
    tid = _ASIDE if step.is_aside else 0
    yield _event(pid, tid, "step", times.start_s - zero_s, times.end_s - times.start_s) | {"args": args}
    if step.is_aside:
        return
    told = {"measured": round(measured_ms, 3), "predicted": round(step.predicted_ms, 3)}
    ts = round(1e6 * (times.start_s - zero_s), 1)
    yield {"ph": "C", "pid": pid, "name": "step, ms", "ts": ts, "args": told}


def _event(pid: int, tid: int, name: str, begin_s: float, length_s: float) -> dict[str, Any]:
    ts, dur = round(1e6 * begin_s, 1), round(1e6 * max(0.0, length_s), 1)
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": dur}


def draw_trace(runs: Sequence[Traced], path: Path, window_s: float | None = None) -> None:
    """The runs under each other on one scale of time, each around its longest gap in a chat, as a PNG.

    Without `window_s` the picture is three times as long as the longest gap of all, half a second at least.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    gaps = [longest_gap(run.steps) for run in runs]
    length_s = window_s or max(0.5, 3 * max(end - begin for begin, end in gaps))
    figure = Figure(figsize=(13, 1.2 + 3.1 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axes, run, (begin_s, end_s) in zip(rows, runs, gaps, strict=True):
        first_s = max(run.steps[0].times.start_s, (begin_s + end_s - length_s) / 2)
        _draw_run(axes, run, first_s, length_s)
    rows[-1].set_xlabel("milliseconds")
    figure.suptitle(_title(runs[0].result), fontsize=11)
    figure.savefig(path, dpi=140, format="png")


def _draw_run(axes: "Axes", run: Traced, first_s: float, length_s: float) -> None:
    """One run: a lane for the tokens of every chat, then one for every use that the time had."""
    shown = [
        span for span in spans(run.steps) if first_s <= span.end_s and span.begin_s <= first_s + length_s
    ]
    uses = [use for use in USES if any(span.use == use for span in shown)]
    answers = [[1e3 * (t - first_s) for t in times] for times in token_times(run.steps).values()]
    longest_ms = _draw_tokens(axes, _rows(answers, 1e3 * length_s))
    for row, use in enumerate(uses, 1):
        bars = [(1e3 * (s.begin_s - first_s), 1e3 * (s.end_s - s.begin_s)) for s in shown if s.use == use]
        axes.broken_barh(bars, (row - 0.42, 0.84), facecolors=_COLORS[use], edgecolor="white", linewidth=0.3)
    axes.set_yticks([0, *range(1, len(uses) + 1)], ["tokens that\nchats get", *uses])
    axes.set_ylim(len(uses) + 0.6, -0.7)
    axes.set_xlim(0, 1e3 * length_s)
    axes.grid(visible=True, axis="x", alpha=0.25)
    axes.set_title(f"{run.name}: longest wait for a chat's next token here {longest_ms:.0f} ms", loc="left")


def _rows(answers: Sequence[list[float]], length_ms: float) -> list[list[list[float]]]:
    """Answers that reach into the picture, on as few rows as there are chats at once."""
    rows: list[list[list[float]]] = []
    for times in sorted(answers):
        inside = [time for time in times if 0 <= time <= length_ms]
        if not inside:
            continue
        free = next((row for row in rows if row[-1][-1] < inside[0]), None)
        if free is None:
            rows.append([inside])
        else:
            free.append(inside)
    return rows


def _draw_tokens(axes: "Axes", rows: Sequence[Sequence[Sequence[float]]]) -> float:
    """A tick for every token, a bar with its length for every gap that is felt; returns the longest gap."""
    gaps = [b - a for row in rows for times in row for a, b in itertools.pairwise(times)]
    longest_ms, height = max(gaps, default=0.0), 0.9 / max(1, len(rows))
    for index, row in enumerate(rows):
        middle = -0.45 + (index + 0.5) * height
        for times in row:
            axes.eventplot(
                times, lineoffsets=middle, linelengths=0.7 * height, colors="black", linewidths=0.8
            )
            for begin, end in itertools.pairwise(times):
                if end - begin > STALL_MS or end - begin == longest_ms:
                    _draw_gap(axes, begin, end, middle, height)
    return longest_ms


def _draw_gap(axes: "Axes", begin: float, end: float, middle: float, height: float) -> None:
    axes.broken_barh(
        [(begin, end - begin)], (middle - 0.3 * height, 0.6 * height), color=_GAP_COLOR, alpha=0.3
    )
    text = f"{end - begin:.0f} ms"
    axes.text((begin + end) / 2, middle, text, ha="center", va="center", fontsize=8, color=_GAP_COLOR)


def _title(result: Mapping[str, Any]) -> str:
    plan, machine = result["arguments"], result["machine"]
    width, height = plan["image_size"]
    load = f"{plan['num_chats']} chats beside frames of {width}x{height}"
    return f"{result['target']['model']}: {load}; {machine['cpu']}, {machine['usable_cores']} cores"
