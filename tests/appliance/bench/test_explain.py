"""Explanations: real engines brought into the situations that show each symptom, and events made by hand."""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest

from appliance.api.metrics import _Families
from appliance.bench.accounts import Account, Accounts, Device, accounts_of
from appliance.bench.explain import explain_run, explain_text
from appliance.bench.exposition import Exposition, Growth
from appliance.bench.load import Recording
from appliance.bench.symptoms import Facts, Finding, findings
from appliance.bench.target import Exchange
from appliance.metrics import engine_families
from tests.appliance.bench.test_latency import SHORT, refusal, run
from tests.vlm_engine.test_engine import ask, picture
from vlm_engine import Engine, EngineConfig, GenerationRequest, StepTimes, StepTrace, TracePart
from vlm_engine.models import VisionLanguageModel, load_model

# why: processor time, so that a busy machine changes nothing.
now = time.process_time
TIGHT = (0.01, 0.01)
EASY = (1e6, 1e6)


@pytest.fixture(scope="module")
def model(qwen3_vl_checkpoint: Path) -> VisionLanguageModel:
    return load_model(EngineConfig(str(qwen3_vl_checkpoint), dtype="float32", device="cpu"))


@pytest.fixture(autouse=True)
def processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("runner", "engine"):
        monkeypatch.setattr(f"vlm_engine.{module}.time", SimpleNamespace(perf_counter=now, monotonic=now))


def exposition(engine: Engine) -> Exposition:
    text = generate_latest(_Families(engine_families(engine.stats(), is_up=True))).decode()
    told = Exposition.parse(text)
    assert told is not None
    assert told.is_ours
    return told


def record(
    model: VisionLanguageModel, requests: Sequence[GenerationRequest], *, first: int = 0, **config: object
) -> Recording:
    """What happens when an engine gets `requests`, those from `first` on once the others have begun."""
    settings = {"kv_cache_tokens": 4096, "trace_steps": 10_000} | config
    engine = Engine(EngineConfig(model.spec.name, **settings), model=model, clock=now)  # type: ignore[arg-type]
    prompts = {request.request_id: engine.prepare(request)[0] for request in requests}
    recording = Recording(begin=now())
    before = exposition(engine)
    exchanges: dict[str, Exchange] = {}

    def send(request: GenerationRequest) -> None:
        exchange = exchanges[request.request_id] = Exchange(now(), answer_id=request.request_id)
        (recording.chats if request.priority == "interactive" else recording.frames).append(exchange)
        engine.submit(request, prompts[request.request_id])

    late = list(requests[first:]) if first else []
    for request in requests[:first] if first else requests:
        send(request)
    for step in itertools.count():
        if step == 6:
            for request in late:
                send(request)
        if not engine.has_work:
            break
        for event in engine.step():
            exchange = exchanges[event.request_id]
            if event.token_ids:
                exchange.chunks.append((now(), len(event.token_ids)))
            if event.is_last:
                exchange.ended_at = now()
                exchange.timings = {name: getattr(event.timings, name) for name in event.timings.__slots__}
    recording.end = now()
    recording.steps = engine.trace()
    recording.growth = Growth(before, exposition(engine))
    return recording


def chats(number: int, **more: object) -> list[GenerationRequest]:
    return [ask(f"chat {i}", f"hello {i}", **({"max_tokens": 20} | more)) for i in range(number)]  # type: ignore[arg-type]


def frames(number: int) -> list[GenerationRequest]:
    return [
        ask(f"frame {i}", picture(i, (320, 320)), max_tokens=4, priority="background") for i in range(number)
    ]


def longest_ms(recording: Recording) -> float:
    """The longest time between two chunks of a chat."""
    pairs = [pair for chat in recording.chats for pair in itertools.pairwise(chat.chunks)]
    return max(1e3 * (later - earlier) for (earlier, _), (later, _) in pairs)


def found(told: dict[str, object], symptom: str) -> Finding:
    """The largest cause of a symptom."""
    return next(Finding(**f) for f in told["findings"] if f["symptom"] == symptom)


def explained(tell: Callable[[], dict[str, object]], symptom: str, cause: str) -> Finding:
    """Times are real, and another program may hold up a step: one of a few recordings shows the cause."""
    for _ in range(4):
        told = tell()
        if any(f["symptom"] == symptom and f["cause"] == cause for f in told["findings"]):
            break
    finding = found(told, symptom)
    assert finding.cause == cause
    return finding


def test_too_few_places(model: VisionLanguageModel) -> None:
    recording = record(model, chats(4), max_num_seqs=1)
    told = explain_run(recording, None, TIGHT, 1e6)
    cause = found(told, "slow first token")
    assert cause.cause == "all places were taken"
    assert cause.share > 0.5
    assert "engine.max_num_seqs" in cause.advice


def test_frames_that_fill_steps_up_to_the_target(model: VisionLanguageModel) -> None:
    def tell() -> dict[str, object]:
        requests = [*chats(1, max_tokens=12), *frames(12)]
        limits = {"chat_itl_ms": 60.0, "background_ttft_ms": 1.0, "encode": "between"}
        recording = record(model, requests, first=1, **limits)
        return explain_run(recording, None, (0.01, 1e6), 1e6)

    cause = explained(tell, "slow next token", "frames were computed in the same steps")
    assert "a lower engine.chat_itl_ms" in cause.advice


def test_frames_in_one_pass_stall_chats(model: VisionLanguageModel) -> None:
    def tell() -> dict[str, object]:
        requests = [*chats(1, max_tokens=30), *frames(3)]
        recording = record(model, requests, first=1, scheduler="static", max_num_batched_tokens=4096)
        return explain_run(recording, None, EASY, longest_ms(recording) - 0.01)

    cause = explained(tell, "stalls", "frames were computed in the same steps")
    assert "engine.scheduler: latency" in cause.advice


def test_a_target_that_the_model_cannot_keep(model: VisionLanguageModel) -> None:
    def tell() -> dict[str, object]:
        told = explain_run(record(model, chats(3), chat_itl_ms=0.01), None, (0.01, 1e6), 1e6)
        assert not [f for f in told["findings"] if f["symptom"] == "slow first token"]
        return told

    cause = explained(tell, "slow next token", "the chats' own decoding")
    assert "engine.chat_itl_ms" in cause.advice


def test_a_cache_that_is_too_small(model: VisionLanguageModel) -> None:
    def tell() -> dict[str, object]:
        recording = record(model, chats(3, max_tokens=90), kv_cache_tokens=160, enable_prefix_caching=False)
        return explain_run(recording, None, EASY, longest_ms(recording) - 0.01)

    cause = explained(tell, "stalls", "prompts were computed again")
    assert "engine.kv_cache_tokens" in cause.advice


def test_its_own_picture(model: VisionLanguageModel) -> None:
    recording = record(model, [ask("one", picture(0, (640, 640)), max_tokens=3)])
    parts = explain_run(recording, None, TIGHT, 1e6)["waits"]["first"]["parts_ms"]
    assert parts["own picture"] > 0
    assert parts["own prompt"] > 0
    assert sum(parts.values()) == pytest.approx(accounts_of(recording, 1e6).first.total_ms, rel=0.05)


def test_all_is_as_wanted(model: VisionLanguageModel) -> None:
    told = explain_run(record(model, chats(1)), None, EASY, 1e6)
    assert told["findings"] == []
    text = explain_text(told)
    assert "no symptom shows" in text
    assert "chat text" in text


# -- by hand ------------------------------------------------------------------------------------------


def step(number: int, start_s: float, ms: float, *parts: TracePart, predicted_ms: float = 0.0) -> StepTrace:
    times = StepTimes(start_s, start_s, start_s, start_s + ms / 1e3, 0.0, ms)
    return StepTrace(number, times, predicted_ms or ms, 50.0, parts)


def decode(ms: float) -> TracePart:
    return TracePart("decode", "c", True, 1, ms, samples=True)


def made(steps: list[StepTrace], delay_s: float = 0.0) -> Recording:
    """One chat whose tokens come `delay_s` after their steps."""
    chat = Exchange(0.0, [(s.times.end_s + delay_s, 1) for s in steps], 9.0, answer_id="c")
    return Recording(0.0, 10.0, [chat], steps=steps)


def parts_of(recording: Recording) -> dict[str, float]:
    return accounts_of(recording, 100.0).following.parts_ms


def test_a_step_that_the_machine_held_up() -> None:
    steps = [step(0, 0.0, 10, decode(10)), step(1, 0.01, 510, decode(510), predicted_ms=10)]
    assert parts_of(made(steps)) == pytest.approx(
        {"chat text": 10, "held up": 500, "between steps": 0, "stream": 0}
    )


def test_a_detector_and_a_pause() -> None:
    turn = TracePart("turn", "", False, 3, 40.0)
    steps = [step(0, 0.0, 10, decode(10)), step(1, 0.02, 50, turn, decode(10))]
    assert parts_of(made(steps)) == pytest.approx(
        {"chat text": 10, "detector": 40, "between steps": 10, "stream": 0}
    )


def aside(start_s: float, ms: float, *parts: TracePart) -> StepTrace:
    return replace(step(9, start_s, ms, *parts), is_aside=True)


def test_frames_aside_delay_nobody() -> None:
    frame = TracePart("encode", "f", False, 9, 100.0)
    steps = [step(i, i * 0.02, 20, decode(20)) for i in range(4)]
    recording = made(steps)
    recording.steps = [*steps, aside(0.0, 100, frame)]
    assert parts_of(recording) == pytest.approx({"chat text": 60, "between steps": 0, "stream": 0})


def test_a_picture_of_its_own_that_is_encoded_aside() -> None:
    """While others' steps go on, of which it has nothing."""
    other = TracePart("decode", "d", True, 1, 20.0, samples=True)
    device = Device([*(step(i, i * 0.02, 20, other) for i in range(10)), aside(0.0, 150, own_picture(150))])
    parts = device.between(0.0, 0.2, "c", is_answering=False)
    assert parts == pytest.approx({"own picture": 150, "chat text": 50, "between steps": 0})


def own_picture(ms: float) -> TracePart:
    return TracePart("encode", "c", True, 9, ms)


def test_tokens_that_come_late() -> None:
    steps = [step(i, i * 0.02, 20, decode(20)) for i in range(4)]
    recording = made(steps)
    recording.chats[0].chunks = [(0.02, 1), (0.5, 3)]
    parts = parts_of(recording)
    assert parts["chat text"] == pytest.approx(60)
    assert parts["stream"] == pytest.approx(480 - 60)


def test_from_outside_only_frames_can_be_blamed() -> None:
    chat = Exchange(0.0, [(0.1, 1), (1.1, 1)], 2.0)
    frame = [Exchange(0.2, [(0.6, 1)], 3.0), Exchange(0.5, [(0.8, 1)], 3.0)]
    recording = Recording(0.0, 10.0, [chat], frame)
    told = explain_run(recording, None, (20.0, 1e6), 100.0)
    assert told["waits"]["following"]["parts_ms"] == {
        "while a frame was read": 600.0,
        "without a frame": 400.0,
    }
    assert found(told, "stalls").cause == "frames were read meanwhile"


def test_timings_of_other_servers_are_not_ours() -> None:
    chat = Exchange(0.0, [(0.5, 1)], 2.0, timings={"prompt_ms": 12.0, "predicted_ms": 30.0})
    first = accounts_of(Recording(0.0, 10.0, [chat]), 100.0).first
    assert first.parts_ms == pytest.approx({"while a frame was read": 0.0, "without a frame": 500.0})


@pytest.mark.parametrize(
    ("part", "cause"),
    [
        ("own prompt", "its own prompt"),
        ("own picture", "its own picture"),
        ("preprocessing", "preprocessing"),
        ("stream", "the way to the client"),
        ("detector", "the detector's turns"),
        ("frame picture", "frames were computed meanwhile"),
        ("chat text", "other chats were computed meanwhile"),
    ],
)
def test_causes_of_a_slow_first_token(part: str, cause: str) -> None:
    first = Account(2, 1000.0, {part: 800.0, "between steps": 200.0})
    facts = Facts(Accounts(first, Account(), Account()), 50.0, 300.0, 10.0, 500.0)
    assert [(f.symptom, f.cause, f.share) for f in findings(facts)] == [("slow first token", cause, 0.8)]


def test_what_helps_depends_on_what_was_counted() -> None:
    stalls = Account(1, 1000.0, {"frame prompt": 900.0})
    accounts = Accounts(Account(), Account(9, 2000.0), stalls)

    def advice(**more: object) -> str:
        return findings(Facts(accounts, 50.0, 300.0, 10.0, 20.0, **more))[0].advice  # type: ignore[arg-type]

    assert "engine.chat_itl_ms" in advice(scheduler="latency")
    assert "background_share" in advice(scheduler="latency", overruns={"floor_overruns": 3})
    assert "engine.scheduler: latency" in advice(scheduler="static", overruns={"floor_overruns": 3})


# -- as a user ----------------------------------------------------------------------------------------


def test_a_run_against_a_server(server, tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    told = run("explain", "--url", server.base_url, "--ttft-ms", "0.1", "--json", str(path), *SHORT)
    assert told.exit_code == 0, told.output
    assert "until the first token: " in told.stdout
    assert "slow first token: " in told.stdout
    content = json.loads(path.read_text())
    assert content["kind"] == "explain"
    assert content["explanation"]["waits"]["first"]["num"] > 0
    assert content["machine"]["cpu"]


def test_one_answer(server, tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    picture(0, (64, 64)).save(path)
    told = run(
        "explain", "--url", server.url, "--ask", "What is it?", "--picture", str(path), "--chat-tokens", "4"
    )
    assert told.exit_code == 0, told.output
    assert "until the first token: 1 waits" in told.stdout
    assert "own picture" in told.stdout


def test_mistakes_of_a_question(server, tmp_path: Path) -> None:
    assert "--picture: give the question" in refusal("explain", "--url", server.url, "--picture", "a.png")
    one = ("explain", "--url", server.url, "--ask", "Hm?", "--picture")
    assert "unknown kind of picture" in refusal(*one, str(tmp_path / "a.txt"))
    assert "No such file" in refusal(*one, str(tmp_path / "a.png"))
