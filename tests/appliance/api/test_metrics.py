"""`/metrics`, read by Prometheus' own parser, beside a real engine."""

from collections.abc import Callable, Iterator

import httpx
import pytest
from msgspec.structs import replace
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from queues.types import QueueStatus
from tests.appliance.api.serving import MODEL, Running, Servers, is_idle, wait_until
from tests.appliance.pictures import data_uri, encoded, quadrants

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
Value = Callable[..., float]
KEY = "s3cret"


async def a_queue() -> QueueStatus:
    return QueueStatus(
        3, 1, 2, 999, 9, 5, 4, 6, 1.5, {"overflow": 7, "expired": 8, "replaced": 9}, longest_wait_s=0.5
    )


@pytest.fixture
def watched(servers: Servers) -> Iterator[Running]:
    running = servers.start(queue_status=a_queue, api_key=KEY)
    yield running
    servers.stop(running)


def scrape(running: Running) -> tuple[str, Value]:
    """The text, and a function from name and labels to value."""
    reply = httpx.get(f"{running.url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain")
    samples: Samples = {}
    for family in text_string_to_metric_families(reply.text):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, "a series is there twice"
            samples[key] = sample.value

    def value(name: str, **labels: str) -> float:
        labels = {name.removesuffix("_"): text for name, text in labels.items()}
        return samples[f"appliance_{name}", frozenset(labels.items())]

    return reply.text, value


def ask(running: Running, *, with_image: bool) -> int:
    """A chat of five tokens; returns the tokens of its prompt."""
    text = {"type": "text", "text": "What is there?"}
    image = {"type": "image_url", "image_url": {"url": data_uri(encoded(quadrants(96, 64)))}}
    with OpenAI(base_url=running.base_url, api_key=KEY, max_retries=0) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": [text, image] if with_image else [text]}],  # type: ignore[list-item,misc]
            max_tokens=5,
            extra_body={"ignore_eos": True},
        )
    assert answer.usage is not None
    wait_until(lambda: is_idle(running.engine), "an idle engine")
    return answer.usage.prompt_tokens


def test_without_the_event_file_the_rest_is_told(servers: Servers) -> None:
    running = servers.start(queue_status=a_queue, api_key=KEY)
    try:
        assert "appliance_output_waiting" in scrape(running)[0]
        running.events.close()
        text, value = scrape(running)
        assert "appliance_output_waiting" not in text
        assert value("cameras", state="running") == 1
    finally:
        servers.stop(running)


def test_two_chats_are_counted(watched: Running) -> None:
    _, before = scrape(watched)
    num_prompt = ask(watched, with_image=False) + ask(watched, with_image=True)
    _, after = scrape(watched)

    def grown(name: str, **labels: str) -> float:
        return after(name, **labels) - before(name, **labels)

    assert grown("request_success_total", class_="chat", finished_reason="length") == 2
    assert grown("prompt_tokens_total", class_="chat") == num_prompt
    assert grown("generation_tokens_total", class_="chat") == 10
    assert grown("inter_token_latency_seconds_count", class_="chat") == 8
    assert grown("time_to_first_token_seconds_count", class_="chat") == 2
    assert grown("e2e_request_latency_seconds_count", class_="chat") == 2
    assert grown("request_queue_time_seconds_count", class_="chat") == 2
    assert grown("request_prefill_time_seconds_count", class_="chat") == 2
    assert grown("request_decode_time_seconds_count", class_="chat") == 2
    assert grown("prefix_cache_queries_total", class_="chat") == num_prompt
    assert grown("request_encode_time_seconds_count", class_="chat") == 1
    assert grown("inter_token_latency_seconds_count", class_="frame") == 0
    assert grown("engine_steps_total") >= 10
    assert grown("work_seconds_total", work="step", source="measured") > 0
    assert grown("work_seconds_total", work="step", source="predicted") > 0
    whole = grown("e2e_request_latency_seconds_sum", class_="chat")
    assert whole > grown("inter_token_latency_seconds_sum", class_="chat") > 0


def test_buckets_add_up(watched: Running) -> None:
    ask(watched, with_image=False)
    text, value = scrape(watched)
    for name in ("inter_token_latency", "time_to_first_token", "request_encode_time"):
        bounds = [
            line.split('le="')[1].split('"')[0]
            for line in text.splitlines()
            if f"{name}_seconds_bucket" in line
        ]
        counts = [value(f"{name}_seconds_bucket", class_="chat", le=le) for le in dict.fromkeys(bounds)]
        assert counts == sorted(counts)
        assert counts[-1] == value(f"{name}_seconds_count", class_="chat")


def test_gauges(watched: Running) -> None:
    _, value = scrape(watched)
    assert value("engine_up") == 1
    assert value("engine_restarts_total") == 0
    assert value("num_requests_running", class_="chat") == value("num_requests_waiting", class_="frame") == 0
    assert value("kv_cache_usage_perc") == 0
    assert value("kv_cache_blocks") == watched.engine.stats().num_blocks
    assert 0 <= value("encoder_cache_usage_perc") <= 1
    assert 0 <= value("step_allowance_seconds") <= 0.5
    assert value("num_preemptions_total", reason="memory") >= 0
    assert value("cost_model_relative_error", work="step") >= 0


def test_the_queue_and_what_became_of_jobs(watched: Running) -> None:
    _, value = scrape(watched)
    assert (value("queue_depth"), value("queue_pending"), value("queue_dead")) == (3, 1, 2)
    assert value("queue_dropped_total", reason="overflow") == 7
    assert value("queue_dropped_total", reason="expired") == 8
    assert (value("queue_put_total"), value("queue_retried_total")) == (9, 4)
    assert value("queue_dropped_total", reason="replaced") == 9
    assert value("queue_longest_wait_seconds") == 0.5
    assert value("descriptions_total", outcome="described") == 3
    assert value("failures_total", work="output webhook") == 2
    assert value("descriptions_made_total", rung="picture") == 1
    assert (value("describe_level"), value("describe_max_level")) == (2, 6)
    assert value("describe_wait_seconds") == 1.234
    assert value("capture_to_description_seconds_bucket", le="5.0") == 2
    assert value("capture_to_description_seconds_count") == 3
    assert value("capture_to_description_seconds_sum") == 9.5


def test_cameras_are_not_told_apart(watched: Running) -> None:
    """A2, A5: neither a camera's URL nor the key, whatever a camera's error says."""
    text, value = scrape(watched)
    assert value("cameras", state="running") == value("cameras", state="stalled") == 1
    assert value("cameras", state="ended") == 0
    for secret in ("rtsp", "john.doe", "p@ss", "10.0.0.1", KEY, "street", watched.engine.model_name):
        assert secret not in text


def test_cameras_are_told_apart_on_demand(servers: Servers) -> None:
    """A2, A5."""
    running = servers.start(metrics_per_camera=True)
    street, yard = running.cameras.known
    running.cameras.known = [
        replace(street, num_frames=10, num_detections=4, num_jobs=2, updated_at=1.0),
        replace(
            yard,
            num_frames=5,
            num_detections=1,
            num_dropped=3,
            dropped={"late": 2, "damaged": 1},
            updated_at=1.0,
        ),
    ]
    text, value = scrape(running)
    servers.stop(running)
    assert value("detections_total", camera="street") == 4
    assert value("frames_dropped_total", camera="yard", reason="late") == 2
    assert value("frames_dropped_total", camera="yard", reason="damaged") == 1
    assert (value("camera_up", camera="street"), value("camera_up", camera="yard")) == (1, 0)
    assert value("camera_fps", camera="street") == 5
    assert value("capture_to_description_seconds_bucket", camera="street", le="1.0") == 1
    assert value("capture_to_description_seconds_sum", camera="yard") == 7
    for secret in ("rtsp", "john.doe", "p@ss", "10.0.0.1"):
        assert secret not in text


def test_an_engine_that_is_away(watched: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A7: the numbers stay, and say so."""
    monkeypatch.setattr(watched.engine, "_death", "the engine's loop died")
    _, value = scrape(watched)
    assert value("engine_up") == 0
    assert value("engine_steps_total") > 0


def test_parts_that_do_not_answer_are_left_out(watched: Running) -> None:
    watched.cameras.failure = ConnectionError("redis://john.doe:p@ss@10.0.0.1 refused")
    text, value = scrape(watched)
    assert value("engine_up") == 1
    assert "appliance_cameras" not in text
    assert "john.doe" not in text
