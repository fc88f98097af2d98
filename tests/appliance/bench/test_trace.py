"""Traces: spans of real steps, the file for Perfetto, the picture, and mistakes."""

import json
from pathlib import Path

import pytest

from appliance.bench.errors import BenchError
from appliance.bench.latency import Run
from appliance.bench.load import Recording
from appliance.bench.timeline import USES, longest_gap, spans, token_times
from appliance.bench.trace import Traced, draw_trace, perfetto, traced, write_trace
from tests.appliance.bench.test_latency import refusal
from tests.vlm_engine.test_engine import ask, drain, picture
from vlm_engine import Engine, EngineConfig, StepTimes, StepTrace, TracePart
from vlm_engine.models import load_model

RESULT = {
    "measured_at": "2026-11-29T21:00:00+00:00",
    "target": {"model": "tiny", "url": "http://here", "engine": {"chat_itl_ms": 60}},
    "arguments": {"num_chats": 1, "image_size": [96, 64]},
    "machine": {"cpu": "a processor", "usable_cores": 2},
    "versions": {},
    "commit": "abc",
}


@pytest.fixture(scope="module")
def run(qwen3_vl_checkpoint: Path) -> Traced:
    model = load_model(EngineConfig(str(qwen3_vl_checkpoint), dtype="float32", device="cpu"))
    engine = Engine(EngineConfig(model.spec.name, kv_cache_tokens=2048, trace_steps=500), model=model)
    engine.add(ask("chat", "hello", max_tokens=8))
    engine.add(ask("frame", picture(0, (160, 160)), max_tokens=3, priority="background"))
    drain(engine)
    return Traced("chunked", engine.trace() or [], RESULT)


def test_spans_lie_in_their_steps(run: Traced) -> None:
    told = list(spans(run.steps))
    assert {span.use for span in told} == {
        "chat text",
        "chat prompt",
        "frame picture",
        "frame prompt",
        "frame text",
    }
    steps = {step.number: step.times for step in run.steps}
    for span in told:
        assert steps[span.step].start_s <= span.begin_s <= span.end_s
        assert span.end_s <= steps[span.step].end_s + 1e-3
    assert len(token_times(run.steps)["chat"]) == 8
    begin, end = longest_gap(run.steps)
    assert begin < end


def test_the_file_says_what_perfetto_wants(run: Traced, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [run, Traced("one pass", run.steps, RESULT)])
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i", "C"}
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"chunked", "one pass"}
    assert tracks == {"steps", *USES, "chat tokens"}
    spans_of_steps = [e for e in events if e["ph"] == "X" and e["pid"] == 1 and e["tid"] == 0]
    assert len(spans_of_steps) == len(run.steps)
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in events if e["ph"] == "X")
    assert sum(e["name"] == "token" and e["pid"] == 1 for e in events) == 8
    assert content["otherData"]["chunked"]["commit"] == "abc"


def test_the_picture(run: Traced, tmp_path: Path) -> None:
    path = tmp_path / "trace.png"
    draw_trace([run, run], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    draw_trace([run], path, window_s=0.01)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_detector_has_a_lane() -> None:
    turn = TracePart("turn", "", False, 5, 30.0)
    step = StepTrace(0, StepTimes(1.0, 1.001, 1.031, 1.031), 0.0, 50.0, (turn,))
    (span,) = spans([step])
    assert (span.use, span.begin_s, round(span.end_s, 4)) == ("detector", 1.001, 1.031)
    events = perfetto([Traced("turns", [step], RESULT)])["traceEvents"]
    assert [e["dur"] for e in events if e["name"] == "detector"] == [30000.0]


def test_what_ran_aside_has_tracks_of_its_own() -> None:
    """It overlaps the steps, which no track may."""
    chat = TracePart("decode", "c", True, 1, 20.0, samples=True)
    frame = TracePart("encode", "f", False, 9, 100.0)
    steps = [StepTrace(i, StepTimes(*[1 + i / 50] * 3, 1.02 + i / 50), 20.0, 50.0, (chat,)) for i in range(5)]
    steps.append(StepTrace(5, StepTimes(1.0, 1.0, 1.0, 1.1), 100.0, 50.0, (frame,), is_aside=True))
    events = perfetto([Traced("aside", steps, RESULT)])["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    where = {e["name"]: tracks[e["tid"]] for e in events if e["ph"] == "X" and e["dur"] == 100000.0}
    assert where == {"step": "aside", "frame picture": "aside: what for"}
    assert sum(e["ph"] == "C" for e in events) == 5


def test_only_what_was_measured_is_shown(run: Traced) -> None:
    middle = run.steps[len(run.steps) // 2].times.start_s
    recording = Recording(begin=middle, end=middle + 99, steps=list(run.steps))
    assert len(traced("half", Run(RESULT, recording)).steps) == len(run.steps) - len(run.steps) // 2
    with pytest.raises(BenchError, match=r"engine\.trace_steps"):
        traced("none", Run(RESULT, Recording(begin=0, end=9)))


def test_a_server_that_records_nothing(server, tmp_path: Path) -> None:
    files = ("--out", str(tmp_path / "a.json"), "--no-png")
    load = (
        "--seconds",
        "0.5",
        "--warm-up",
        "0",
        "--image",
        "64x64",
        "--frame-rate",
        "0",
        "--chat-tokens",
        "4",
    )
    assert "engine.trace_steps" in refusal("trace", "--url", server.url, *load, *files)
