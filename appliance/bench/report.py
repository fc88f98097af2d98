"""Results as text, and in files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from appliance.bench.errors import BenchError

_COLUMNS = ("p50", "p90", "p95", "p99", "max")
_TIMES = (
    ("chat ITL, ms", "chat", "itl_ms"),
    ("chat TTFT, ms", "chat", "ttft_ms"),
    ("frame latency, ms", "frames", "latency_ms"),
    ("frame TTFT, ms", "frames", "ttft_ms"),
)
_COMPARED = (
    ("chat ITL p50, ms", "chat.itl_ms.p50"),
    ("chat ITL p90, ms", "chat.itl_ms.p90"),
    ("chat ITL p99, ms", "chat.itl_ms.p99"),
    ("chat ITL max, ms", "chat.itl_ms.max"),
    ("chat time in stalls, %", "chat.stall_share"),
    ("chat TTFT p50, ms", "chat.ttft_ms.p50"),
    ("chat TTFT p99, ms", "chat.ttft_ms.p99"),
    ("chat TTFT max, ms", "chat.ttft_ms.max"),
    ("chat tokens/s", "chat.tokens_per_s"),
    ("frames sent", "frames.num_sent"),
    ("frames done", "frames.num_done"),
    ("frames/s", "frames.frames_per_s"),
    ("frame latency p50, ms", "frames.latency_ms.p50"),
    ("frame latency p95, ms", "frames.latency_ms.p95"),
    ("errors", "errors.num"),
    ("start, s", "target.start_s"),
)


def latency_text(result: Mapping[str, Any]) -> str:
    """A result of `bench latency` for people."""
    return "\n".join([_about(result), "", *_times(result), "", *_counts(result), *_predictions(result)])


def compare_text(names: Sequence[str], results: Sequence[Mapping[str, Any]]) -> str:
    """Results side by side, with ratios to the first; lines that no result has are left out."""
    rows = [["", *names]]
    for title, path in _COMPARED:
        values = [value_at(result, path) for result in results]
        if any(values):
            factor = 100 if title.endswith("%") else 1
            rows.append([title, *_with_ratios([v if v is None else factor * v for v in values])])
    lines = aligned(rows)
    if differing := _differences(names, results):
        lines += ["", "not the same in all:", *differing]
    return "\n".join(lines)


def value_at(result: Mapping[str, Any], path: str) -> Any:
    """What stands at a path like `chat.itl_ms.p50`; None when there is nothing."""
    value: Any = result
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def shown(value: float | None) -> str:
    """A number with three digits or all before its point; a dash for None."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a result; raises `BenchError`."""
    try:
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: cannot be written: {error.strerror}: choose another file") from None


def check_writable(path: Path) -> None:
    """Raises `BenchError` now rather than after minutes of measuring; an existing file keeps its content."""
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise BenchError(f"{path}: cannot be written: {reason}: choose another file")


def read_result(path: Path) -> dict[str, Any]:
    """A result of `bench latency`; raises `BenchError`."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise BenchError(f"{path}: not JSON: {error}") from None
    if not isinstance(result, dict) or result.get("kind") != "latency":
        raise BenchError(f"{path}: is no result of 'appliance bench latency --json'")
    return result


def _about(result: Mapping[str, Any]) -> str:
    plan, target, machine = result["arguments"], result["target"], result["machine"]
    frames = ""
    if plan["frame_rate"] or plan["frame_concurrency"]:
        width, height = plan["image_size"]
        rate = f"{plan['frame_rate']:g}/s" if plan["frame_rate"] else f"{plan['frame_concurrency']} at once"
        frames = f", frames {rate} of {width}x{height}"
    load = f"{plan['num_chats']} chats{frames}, {plan['seconds']:g} s, seed {plan['seed']}"
    return f"{target['model']} at {target['url']}: {load}\n{machine['cpu']}, {machine['usable_cores']} cores"


def _times(result: Mapping[str, Any]) -> list[str]:
    rows = [["", *_COLUMNS, "n"]]
    for title, part, name in _TIMES:
        times = result[part][name]
        if times["n"]:
            rows.append([title, *(shown(times[column]) for column in _COLUMNS), str(times["n"])])
    return aligned(rows)


def _counts(result: Mapping[str, Any]) -> list[str]:
    plan, chat, frames, errors = (result[part] for part in ("arguments", "chat", "frames", "errors"))
    lines = []
    if plan["num_chats"]:
        limit = plan.get("stall_ms", 100.0)
        share = "-" if chat["stall_share"] is None else f"{100 * chat['stall_share']:.1f} %"
        lines.append(
            f"chat: {chat['tokens_per_s']:.1f} tokens/s, {share} of the time in gaps over {limit:g} ms"
        )
        if not chat["are_tokens_told"]:
            lines.append("chat: the server tells no counts, every chunk of text was taken for one token")
    if plan["frame_rate"] or plan["frame_concurrency"]:
        sent, done = frames["num_sent"], frames["num_done"]
        lines.append(f"frames: {sent} sent, {done} done, {frames['frames_per_s']:.2f} frames/s")
        if frames["num_repeated"]:
            lines.append(f"frames: {frames['num_repeated']} were sent before, and may have come from a cache")
    lines.append(f"errors: {errors['num'] or 'none'}")
    return lines + [f"  {number} x {message}" for message, number in errors["messages"].items()]


def _predictions(result: Mapping[str, Any]) -> list[str]:
    """How well the server knows its own steps, where it tells that."""
    lines = []
    for work, told in ((result.get("server") or {}).get("cost_model") or {}).items():
        error, measured, predicted = (told[key] for key in ("relative_error", "measured_s", "predicted_s"))
        lines.append(
            f"cost model, {work}: median error {100 * error:.1f} %, "
            f"{predicted:.1f} s predicted for {measured:.1f} s measured"
        )
    return lines


def _with_ratios(values: Sequence[float | None]) -> list[str]:
    first = values[0]
    cells = [shown(first)]
    for value in values[1:]:
        ratio = f" (x{value / first:.2f})" if value is not None and first else ""
        cells.append(shown(value) + ratio)
    return cells


def _differences(names: Sequence[str], results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was asked for, or measured on, differently; without what is always another."""
    paths = ["commit", "machine.cpu", "machine.usable_cores", "target.model"]
    paths += [f"arguments.{name}" for name in results[0]["arguments"] if name != "seed"]
    engines = [result["target"].get("engine") or {} for result in results]
    paths += [f"target.engine.{name}" for name in sorted({name for engine in engines for name in engine})]
    rows = [["", *names]]
    for path in paths:
        values = [str(value_at(result, path)) for result in results]
        if len(set(values)) > 1:
            rows.append([path, *values])
    return aligned(rows) if len(rows) > 1 else []
