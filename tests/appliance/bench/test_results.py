"""Comparing results, and the frontier: its points, its picture, and a run with an engine of its own."""

import json

import pytest

from appliance.bench.frontier import (
    Point,
    check_can_draw,
    draw_frontier,
    frontier_text,
    points_of,
    run_frontier,
)
from appliance.bench.latency import Run
from appliance.bench.load import Recording
from appliance.bench.metrics import measurements
from appliance.bench.overrides import overrides_of
from appliance.bench.plan import LoadPlan
from appliance.bench.sweep import plans_of, run_sweep, sweep_text
from appliance.bench.target import Exchange
from tests.appliance.bench.test_latency import refusal, run


def result_of(gap_s: float, **arguments: object) -> dict[str, object]:
    """A result in which one chat got a token every `gap_s`, and one frame was answered."""
    recording = Recording(begin=0, end=10, num_pictures=1)
    recording.chats = [Exchange(0, [(index * gap_s, 1) for index in range(5)], 9, has_counts=True)]
    recording.frames = [Exchange(1, [(2, 1)], 3)]
    plan = {"num_chats": 1, "frame_rate": 1.0, "frame_concurrency": 0, "image_size": [64, 64], "seconds": 10}
    about = {
        "kind": "latency",
        "target": {"url": "http://here", "model": "m", "engine": None, "start_s": None},
        "arguments": plan | {"seed": 1} | arguments,
        "machine": {"cpu": "a processor", "usable_cores": 2},
        "commit": "abc",
    }
    return about | measurements(recording)


@pytest.fixture
def write(tmp_path):
    def write_result(name: str, content: object) -> str:
        path = tmp_path / f"{name}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write_result


def test_results_side_by_side(write):
    told = run("compare", write("ours", result_of(0.02)), write("peer", result_of(0.2, num_chats=2)))

    lines = {line.split("  ")[0]: line.split() for line in told.stdout.splitlines()}
    assert told.exit_code == 0, told.output
    assert told.stdout.split()[:2] == ["ours", "peer"]
    assert lines["chat ITL p50, ms"][-3:] == ["20", "200", "(x10.00)"]
    assert lines["chat time in stalls, %"][-2:] == ["0", "100"]
    assert lines["arguments.num_chats"][-2:] == ["1", "2"]
    assert "arguments.seed" not in lines


def test_what_is_no_result(write, tmp_path):
    assert "No such file" in refusal("compare", str(tmp_path / "none.json"))
    assert "not JSON" in refusal("compare", write("text", "hello"))
    assert "is no result of 'appliance bench latency" in refusal("compare", write("list", "[]"))


def test_points_set_the_engine():
    points = points_of([60.0], [512.0])

    assert [point.overrides for point in points] == [
        {"scheduler": "latency", "chat_itl_ms": 60.0},
        {"scheduler": "static", "max_num_batched_tokens": 512},
    ]
    assert [point.name for point in points] == ["chat_itl_ms 60", "budget 512"]


def test_a_frontier_is_told_and_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="drawing needs the bench extra")
    points = points_of([40.0, 90.0], [512.0])
    said: list[str] = []
    seen = list(run_frontier(points, [0.04, 0.09, 0.512], result_of, said.append))
    path = tmp_path / "frontier.png"

    draw_frontier(seen[-1], path)

    assert len(seen) == 3
    assert said[-1] == "budget 512 (3 of 3)"
    assert path.read_bytes().startswith(b"\x89PNG")
    rows = [line.split() for line in frontier_text(seen[-1]).splitlines()]
    assert [row[:3] for row in rows[1:]] == [
        ["chat_itl_ms", "40", "40"],
        ["chat_itl_ms", "90", "90"],
        ["budget", "512", "512"],
    ]


def test_a_frontier_without_matplotlib_is_refused_first(monkeypatch):
    monkeypatch.setattr("appliance.bench.frontier.find_spec", lambda name: None)

    with pytest.raises(Exception, match=r"pip install -e '\.\[bench\]'"):
        check_can_draw()


def test_mistakes_in_a_frontier_are_told_before_an_engine_starts(tmp_path):
    png = ("--png", str(tmp_path / "a.png"), "--no-png")

    assert "--chat-itl-ms soon: write numbers" in refusal("frontier", "--chat-itl-ms", "soon", *png)
    assert "nothing to measure" in refusal("frontier", "--chat-itl-ms", "", "--token-budgets", "", *png)
    assert "max_num_batched_tokens" in refusal("frontier", "--token-budgets", "0.5", *png)


def test_assignments_are_nested_and_read_as_yaml():
    assert overrides_of(["engine.chat_itl_ms=60", "engine.model=a=b", "describe.labels=[car, dog]"]) == {
        "engine": {"chat_itl_ms": 60, "model": "a=b"},
        "describe": {"labels": ["car", "dog"]},
    }
    assert Point("static", 256.0).overrides["max_num_batched_tokens"] == 256


def test_a_sweep_has_every_combination_once() -> None:
    plans = plans_of(LoadPlan(seed=7), "1,2", "0,0.5", "64x64,128x64")

    loads = [(plan.num_chats, plan.frame_rate, plan.image_size[0]) for plan in plans]
    assert loads == [(n, rate, w) for n in (1, 2) for rate, w in ((0, 64), (0.5, 64), (0.5, 128))]
    assert len({plan.seed for plan in plans}) == 6


def test_a_sweep_is_told_in_a_table() -> None:
    plans = plans_of(LoadPlan(), "1,2", "1", "64x64")
    results = iter([result_of(0.02, num_chats=1), result_of(0.2)])
    said: list[str] = []

    *_, sweep = run_sweep(plans, lambda plan: Run(next(results), Recording()), said.append)

    assert said == ["1 chats, 1/s of 64x64 (1 of 2)", "2 chats, 1/s of 64x64 (2 of 2)"]
    rows = [line.split() for line in sweep_text(sweep).splitlines()]
    assert rows[1][:7] == ["1", "chats,", "1/s", "of", "64x64", "20", "20"]
    assert rows[2][5:10] == ["200", "200", "200", "200", "100"]


def test_mistakes_in_a_sweep() -> None:
    assert "--chats two: write whole numbers" in refusal("latency", "--chats", "two")
    assert "--frame-rate -1: write numbers" in refusal("latency", "--frame-rate=-1")
    assert "--image big" in refusal("latency", "--image", "64x64,big")


@pytest.mark.e2e
def test_one_command_gives_a_number(qwen3_vl_checkpoint, tmp_path):
    """The engine is started behind the API in a child, measured, and gone afterwards."""
    import psutil

    path = tmp_path / "own.json"
    engine = (
        "--vlm",
        str(qwen3_vl_checkpoint),
        "--set",
        "engine.scheduler=static",
        "--set",
        "engine.num_threads=1",
    )
    load = ("--frame-concurrency", "1", "--image", "64x64", "--seconds", "2", "--warm-up", "0.2")
    before = set(psutil.Process().children(recursive=True))

    told = run("latency", *engine, *load, "--chat-tokens", "8", "--frame-tokens", "2", "--json", str(path))

    assert told.exit_code == 0, told.output
    result = json.loads(path.read_text())
    assert result["target"]["engine"]["scheduler"] == "static"
    assert result["target"]["start_s"] > 0
    assert result["chat"]["num_tokens"] > 0
    assert result["frames"]["num_done"] > 0
    assert set(psutil.Process().children(recursive=True)) <= before
