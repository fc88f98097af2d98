"""The frontier: what chat pays for frames, for both of the engine's schedulers at several settings each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from appliance.bench.errors import BenchError
from appliance.bench.latency import FORMAT
from appliance.bench.report import aligned, shown

Engine = TypeVar("Engine")
_LABELS = {"latency": ("chat_itl_ms", "latency scheduler", "o-"), "static": ("budget", "token budget", "s--")}


@dataclass(frozen=True, slots=True)
class Point:
    """One setting to measure: the scheduler and its number, milliseconds or tokens."""

    scheduler: str
    value: float

    @property
    def overrides(self) -> dict[str, Any]:
        """The engine's settings that make this point."""
        if self.scheduler == "latency":
            return {"scheduler": "latency", "chat_itl_ms": self.value}
        return {"scheduler": "static", "max_num_batched_tokens": int(self.value)}

    @property
    def name(self) -> str:
        """For people: `chat_itl_ms 60` or `budget 512`."""
        return f"{_LABELS[self.scheduler][0]} {self.value:g}"


def points_of(chat_itl_ms: Sequence[float], token_budgets: Sequence[float]) -> list[Point]:
    """The points of both lists in order; raises `BenchError` when there is none."""
    points = [Point("latency", value) for value in chat_itl_ms]
    points += [Point("static", value) for value in token_budgets]
    if not points:
        raise BenchError("nothing to measure: give --chat-itl-ms or --token-budgets")
    return points


def check_can_draw() -> None:
    """Raises `BenchError` when matplotlib is missing: better before the runs than after."""
    if find_spec("matplotlib") is None:
        raise BenchError("drawing needs matplotlib: pip install -e '.[bench]', or give --no-png")


def run_frontier(
    points: Sequence[Point],
    engines: Sequence[Engine],
    measure: Callable[[Engine], Mapping[str, Any]],
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """The frontier after every point and its engine, so that what is interrupted leaves what it has."""
    measured: list[dict[str, Any]] = []
    for point, engine in zip(points, engines, strict=True):
        say(f"{point.name} ({len(measured) + 1} of {len(points)})")
        measured.append({"scheduler": point.scheduler, "value": point.value, "result": dict(measure(engine))})
        yield {"kind": "frontier", "format": FORMAT, "points": measured}


def frontier_text(frontier: Mapping[str, Any]) -> str:
    """A line for every point."""
    rows = [["", "chat ITL p50", "p99", "max, ms", "> 100 ms, %", "frames/s", "frame p95, s", "errors"]]
    rows += [_row(point) for point in frontier["points"]]
    return "\n".join(aligned(rows))


def draw_frontier(frontier: Mapping[str, Any], path: Path) -> None:
    """ITL p99 in milliseconds against frames a second, as a PNG; points without chat are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for scheduler, (_, label, style) in _LABELS.items():
        places = _places(frontier, scheduler)
        if places:
            axes.plot([x for x, _, _ in places], [y for _, y, _ in places], style, label=label)
        for x, y, name in places:
            axes.annotate(name, (x, y), textcoords="offset points", xytext=(8, -11), fontsize=8)
    axes.set(xlabel="frames/s", ylabel="chat ITL p99, ms", yscale="log", title=_title(frontier))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.margins(x=0.22, y=0.15)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, format="png")


def _row(point: Mapping[str, Any]) -> list[str]:
    chat, frames = point["result"]["chat"], point["result"]["frames"]
    itl, p95 = chat["itl_ms"], frames["latency_ms"]["p95"]
    share = chat["stall_share"]
    return [
        Point(point["scheduler"], point["value"]).name,
        *(shown(itl[name]) for name in ("p50", "p99", "max")),
        shown(None if share is None else 100 * share),
        f"{frames['frames_per_s']:.2f}",
        shown(None if p95 is None else p95 / 1000),
        str(point["result"]["errors"]["num"]),
    ]


def _places(frontier: Mapping[str, Any], scheduler: str) -> list[tuple[float, float, str]]:
    places = []
    for point in frontier["points"]:
        p99 = point["result"]["chat"]["itl_ms"]["p99"]
        if point["scheduler"] == scheduler and p99:
            name = Point(scheduler, point["value"]).name
            places.append((point["result"]["frames"]["frames_per_s"], p99, name))
    return places


def _title(frontier: Mapping[str, Any]) -> str:
    result = frontier["points"][0]["result"]
    plan, machine = result["arguments"], result["machine"]
    width, height = plan["image_size"]
    model = result["target"]["model"]
    load = f"{plan['num_chats']} chats beside frames of {width}x{height}, {plan['seconds']:g} s each"
    return f"{model}: {load}\n{machine['cpu']}, {machine['usable_cores']} cores"
