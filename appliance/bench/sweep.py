"""Several loads one after the other: every number of chats with every rate and size of frames."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from appliance.bench.errors import BenchError
from appliance.bench.latency import FORMAT, Run
from appliance.bench.plan import LoadPlan, parse_size
from appliance.bench.report import aligned, shown, value_at

_COLUMNS = (
    ("ITL p50", "chat.itl_ms.p50"),
    ("p90", "chat.itl_ms.p90"),
    ("p99", "chat.itl_ms.p99"),
    ("max, ms", "chat.itl_ms.max"),
    ("stalls, %", "chat.stall_share"),
    ("TTFT p50", "chat.ttft_ms.p50"),
    ("p99, ms", "chat.ttft_ms.p99"),
    ("tokens/s", "chat.tokens_per_s"),
    ("frames/s", "frames.frames_per_s"),
    ("frame p50", "frames.latency_ms.p50"),
    ("p95, ms", "frames.latency_ms.p95"),
    ("errors", "errors.num"),
)


def plans_of(plan: LoadPlan, chats: str, frame_rates: str, images: str) -> list[LoadPlan]:
    """`plan` with every combination of the lists like `1,2,4`, each with a seed of its own.

    Raises `BenchError` that names the option.
    """
    sizes = [parse_size(text.strip()) for text in images.split(",")]
    combinations = product(_counts(chats), _rates(frame_rates), sizes)
    plans: dict[object, LoadPlan] = {}
    for num_chats, rate, size in combinations:
        made = replace(
            plan, num_chats=num_chats, frame_rate=rate, image_size=size, seed=plan.seed + len(plans)
        )
        # why: without frames their size means nothing, once is enough
        plans.setdefault((num_chats, rate, size if made.has_frames else None), made)
    return list(plans.values())


def run_sweep(
    plans: Sequence[LoadPlan], measure: Callable[[LoadPlan], Run], say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """The sweep after every plan, so that what is interrupted leaves what it has."""
    results: list[dict[str, Any]] = []
    for index, plan in enumerate(plans):
        name = _name(plan.num_chats, plan.frame_rate, plan.image_size, plan.has_frames)
        say(f"{name} ({index + 1} of {len(plans)})")
        results.append(measure(plan).result)
        yield {"kind": "sweep", "format": FORMAT, "results": results}


def sweep_text(sweep: Mapping[str, Any]) -> str:
    """A line for every load."""
    rows = [["", *(title for title, _ in _COLUMNS)]]
    for result in sweep["results"]:
        plan = result["arguments"]
        has_frames = bool(plan["frame_rate"] or plan["frame_concurrency"])
        name = _name(plan["num_chats"], plan["frame_rate"], plan["image_size"], has_frames)
        rows.append([name, *(_cell(result, title, path) for title, path in _COLUMNS)])
    return "\n".join(aligned(rows))


def _cell(result: Mapping[str, Any], title: str, path: str) -> str:
    value = value_at(result, path)
    return shown(100 * value if value is not None and title.endswith("%") else value)


def _name(num_chats: int, rate: float, size: Sequence[int], has_frames: bool) -> str:
    if not has_frames:
        return f"{num_chats} chats"
    width, height = size
    return f"{num_chats} chats, {f'{rate:g}/s' if rate else 'frames'} of {width}x{height}"


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise BenchError(f"--chats {text}: write whole numbers with commas between, as in 1,2,4")
    return [int(part) for part in parts]


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [-1.0]
    if not all(0 <= rate < 1e6 for rate in rates):
        raise BenchError(f"--frame-rate {text}: write numbers of 0 or more with commas between, as in 0,0.3")
    return rates
