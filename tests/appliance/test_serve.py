"""`serve` end to end: the real command, its cameras, its chat, and what is left when it ends (nothing)."""

import base64
import json
import re
import signal
import socket
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner, Result

from appliance.cli import app
from appliance.client import ApplianceClient, ClientError, user_message
from tests.appliance.outputs.receiver import Receiver, receiving
from tests.appliance.running import START_S, Running, running, until

pytestmark = pytest.mark.e2e

CAMERAS = {
    "street": {"source": "synthetic://street?seed=3&fps=5&live=1"},
    "yard": {"source": "synthetic://yard?seed=5&fps=5&live=1"},
}


def write_config(folder: Path, checkpoint: Path, **parts: object) -> str:
    engine = {"model": str(checkpoint), "device": "cpu", "kv_cache_tokens": 4096, "num_threads": 1}
    config = {
        "engine": engine,
        "detector": {"device": "cpu", "imgsz": 320},
        "describe": {"max_tokens": 4, "cooldown_s": 1},
        "server": {"port": 0},
        "cameras": CAMERAS,
        **parts,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def ready_url(command: Running) -> str:
    def url() -> str:
        assert command.process.poll() is None, command.stderr
        return command.stdout.partition("page ")[2].partition("/ ")[0]

    return until(url, START_S)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def appliance(
    qwen3_vl_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, receiver: Receiver
) -> Iterator[tuple[Running, str]]:
    """One appliance for the tests of this module, with two good cameras and one whose file is missing."""
    folder = tmp_path_factory.mktemp("serve")
    broken = {"source": str(folder / "missing.mp4")}
    parts = {
        "cameras": {**CAMERAS, "broken": broken},
        "events": {"path": str(folder / "events.db")},
        "outputs": {"webhooks": [{"url": receiver.url, "secret": "hush", "send": ["described", "end"]}]},
    }
    config = write_config(folder, qwen3_vl_checkpoint, **parts)
    with running(folder, "serve", "--config", config) as command:
        yield command, ready_url(command)


@pytest.fixture
def client(appliance: tuple[Running, str]) -> Iterator[ApplianceClient]:
    with ApplianceClient(appliance[1]) as client:
        yield client


STATES = {"street": "running", "yard": "running", "broken": "not_found"}


def states_of(client: ApplianceClient) -> dict[str, str]:
    return {camera["name"]: camera["state"] for camera in client.cameras()}


def frame_of(client: ApplianceClient, camera: str) -> bytes | None:
    try:
        return client.newest_frame(camera)
    except ClientError:
        return None


def test_cameras_are_described_and_a_broken_one_is_told_apart(client):
    """V2: one camera without a source, the others run."""
    until(lambda: client.health()["queue"]["num_done"] >= 2, START_S)
    until(lambda: states_of(client) == STATES)
    assert client.health()["status"] == "ok"
    with pytest.raises(ClientError, match="no frame"):
        client.newest_frame("broken")


def test_a_start_tells_its_steps_and_what_is_not_there_yet(appliance, client):
    told = appliance[0].stderr

    for step in (
        r"starting: torch alone takes some seconds …",
        r"the embedded Valkey is up after \d+\.\d s",
        r"loading the model \w+ …",
        r"the model is loaded after \d+\.\d s",
        r"measuring what steps take on this machine, some seconds …",
        r"loading the detector yolo26n-scenes\.pt …",
        r"the detector is loaded after \d+\.\d s",
        r"the engine is ready after \d+\.\d s",
        r"all is up after \d+\.\d s",
        r"\S+: cameras\.broken\.source: no file or folder \S+/missing\.mp4: .*",
    ):
        assert re.search(rf"^appliance: {step}$", told, re.MULTILINE), step


def test_descriptions_are_streamed_as_events(client):
    course: dict[str, list[Any]] = {}
    for event in client.events():
        course.setdefault(event["id"], []).append(event)
        if event["description"] and len(course[event["id"]]) > 1:
            break

    assert event["camera"] in CAMERAS
    assert course[event["id"]][0]["description"] is None, "it was told when it began"
    assert event["prompt"].startswith("Describe this camera frame")


def test_a_camera_is_described_when_asked(appliance, client):
    """On demand: an event of its own, through the queue like every other."""
    url = f"{appliance[1]}/v1/cameras"
    asked = httpx.post(f"{url}/street/describe")
    assert asked.status_code == 202
    event = until(lambda: _described(f"{appliance[1]}{asked.json()['url']}"), START_S)
    assert (event["id"], event["camera"], event["reason"]) == (asked.json()["id"], "street", "on_demand")
    assert httpx.post(f"{url}/broken/describe").status_code == 503
    unknown = httpx.post(f"{url}/roof/describe")
    assert unknown.status_code == 404
    assert "cameras: broken, street, yard" in unknown.json()["error"]["message"]


def _described(url: str) -> dict[str, Any] | None:
    event = httpx.get(url)
    return event.json() if event.status_code == 200 and event.json()["described_at"] else None


def test_events_are_posted_to_a_webhook_and_found_again(appliance, client, receiver):
    post = until(lambda: next((post for post in receiver.posts if post.data["description"]), None), START_S)
    event = httpx.get(f"{appliance[1]}/v1/events/{post.data['id']}").json()

    assert event["description"] == post.data["description"]
    assert post.headers["webhook-signature"].startswith("v1,")
    found = httpx.get(f"{appliance[1]}/v1/events", params={"q": event["label"], "limit": 1000}).json()
    assert event["id"] in [other["id"] for other in found["data"]]
    assert metrics(appliance[1])['appliance_output_sent_total{output="webhook"}'] >= 1


def test_chat_about_what_a_camera_sees_now(client):
    picture = ("image/jpeg", until(lambda: frame_of(client, "street")))
    message = user_message("Who is there?", picture)

    answer = "".join(client.stream_chat([message], model=client.model_name(), max_tokens=5))

    assert answer


def test_the_queue_command_finds_the_embedded_server(appliance, client):
    result = CliRunner().invoke(app, ["queue", "status", "--json", "--url", appliance[1]])

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_put"] >= 1


def chat(url: str, *arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["chat", "--url", url, "--max-tokens", "4", *arguments], input=typed)


def test_the_chat_command_asks_about_a_camera(appliance, client):
    until(lambda: frame_of(client, "street"))
    result = chat(appliance[1], "--camera", "street", "--stats", "Who is there?")

    assert result.exit_code == 0
    assert result.stdout.strip()
    assert re.fullmatch(r"first text after \d+ ms, then every \d+ ms \(p99 .*\)\n", result.stderr)


def test_the_chat_command_holds_a_conversation(appliance, tmp_path):
    """Questions from standard input, a picture with the first."""
    picture = tmp_path / "picture.png"
    Image.new("RGB", (64, 64), "red").save(picture)

    result = chat(appliance[1], "--image", str(picture), typed="What colour is it?\nAre you sure?\n")

    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) >= 2


def test_the_chat_command_says_what_is_wrong(appliance, tmp_path):
    assert "cameras: broken, street, yard" in chat(appliance[1], "--camera", "attic", "What?").stderr
    assert "check --image" in chat(appliance[1], "--image", str(tmp_path / "none.jpg"), "What?").stderr
    junk = tmp_path / "junk.jpg"
    junk.write_text("no picture")
    assert chat(appliance[1], "--image", str(junk), "What?").exit_code == 2
    assert chat(f"{appliance[1]}/nowhere", "What?").exit_code == 2


def test_any_openai_client_can_talk_to_it(appliance, client):
    jpeg = base64.b64encode(until(lambda: frame_of(client, "yard"))).decode()
    sdk = openai.OpenAI(base_url=f"{appliance[1]}/v1", api_key="none", max_retries=0)
    content = [
        {"type": "text", "text": "What is there?"},
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{jpeg}"}},
    ]
    with sdk:
        answer = sdk.chat.completions.create(
            model=client.model_name(),
            messages=[{"role": "user", "content": content}],  # type: ignore[list-item]
            max_tokens=4,
        )

    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def metrics(url: str) -> dict[str, float]:
    """Values by name and labels, as they are written."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def test_metrics_of_cameras_queue_and_engine(appliance, client):
    until(lambda: client.health()["queue"]["num_done"] >= 2, START_S)
    values = until(
        lambda: (
            (m := metrics(appliance[1]))['appliance_e2e_request_latency_seconds_count{class="frame"}'] and m
        )
    )

    assert values['appliance_descriptions_total{outcome="described"}'] >= 2
    assert values["appliance_detections_total"] > 0
    assert values["appliance_jobs_total"] >= 2
    assert values['appliance_cameras{state="not_found"}'] == 1
    assert values['appliance_request_encode_time_seconds_sum{class="frame"}'] > 0


def test_the_detector_takes_turns_with_the_engine(appliance, client):
    """On one device: asked for, granted, given back, beside chat and descriptions."""
    wanted = metrics(appliance[1])["appliance_detector_batches_total"] + 3
    assert "".join(client.stream_chat([user_message("Hello")], model=client.model_name(), max_tokens=20))
    values = until(
        lambda: (m := metrics(appliance[1]))["appliance_detector_batches_total"] >= wanted and m, START_S
    )

    assert values["appliance_detectors_connected"] == 1
    assert values["appliance_detector_turns_total"] >= values["appliance_detector_batches_total"]
    assert values["appliance_detector_turn_seconds_sum"] > 0
    assert values['appliance_detector_turns_lost_total{reason="died"}'] == 0


def test_a_camera_does_what_was_just_asked(appliance, client):
    """The answer to a change is of the change, not of what was before."""
    url = f"{appliance[1]}/v1/cameras/yard"
    paused = httpx.patch(url, json={"enabled": False}).json()
    assert (paused["enabled"], paused["state"]) == (False, "stopped")
    assert "paused" in paused["reason"]
    resumed = httpx.patch(url, json={"enabled": True}).json()
    assert (resumed["enabled"], resumed["state"], resumed["reason"]) == (
        True,
        "connecting",
        "it is being opened",
    )
    until(lambda: httpx.get(url).json()["state"] == "running")


def test_a_dead_vision_worker_is_started_again(appliance, client):
    """A crash stays in its process: chat goes on, and the cameras come back."""
    (worker,) = appliance[0].find("appliance.ingest")

    worker.kill()

    told = until(lambda: [c for c in client.cameras() if "is being started again" in (c["reason"] or "")])
    assert {(camera["state"], camera["fps"]) for camera in told} == {("connecting", 0)}
    health = client.health()
    assert health["status"] == "degraded"
    assert "is being started again" in str(health["reasons"])
    assert "".join(client.stream_chat([user_message("Hello")], model=client.model_name(), max_tokens=4))
    until(lambda: [p for p in appliance[0].find("appliance.ingest") if p.pid != worker.pid], START_S)
    num_before = client.health()["queue"]["num_done"]
    until(lambda: client.health()["queue"]["num_done"] > num_before, START_S)
    assert "vision worker ended with code -9" in appliance[0].stderr
    until(lambda: "appliance: the vision worker is up again after " in appliance[0].stderr)
    until(lambda: states_of(client) == STATES)


def test_a_dead_engine_is_started_again(appliance, client):
    """Chat and descriptions come back, and no description is an error of the engine's."""
    (engine,) = appliance[0].find("-m vlm_engine.process")
    before = metrics(appliance[1])

    engine.kill()

    until(lambda: client.health()["status"] != "ok")
    until(lambda: client.health()["status"] == "ok", START_S)
    num_before = client.health()["queue"]["num_done"]
    until(lambda: client.health()["queue"]["num_done"] > num_before, START_S)
    assert client.health()["queue"]["dead"] == 0
    assert "appliance: the engine is up again after " in appliance[0].stderr
    after = metrics(appliance[1])
    assert after["appliance_engine_restarts_total"] == 1
    assert not [
        name for name in before if name.partition("{")[0].endswith("_total") and after[name] < before[name]
    ]


def test_a_port_in_use_is_said_at_once(qwen3_vl_checkpoint, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = write_config(tmp_path, qwen3_vl_checkpoint, server={"port": port})
        with running(tmp_path, "serve", "-c", config) as command:
            assert command.process.wait(START_S) == 2

    assert f"cannot listen on 127.0.0.1:{port}" in command.stderr
    assert len(command.stderr.splitlines()) == 1


def test_an_unknown_class_ends_the_start(qwen3_vl_checkpoint, tmp_path):
    """V18: a start-up error that lists the names that are known."""
    config = write_config(tmp_path, qwen3_vl_checkpoint, describe={"labels": ["unicorn"]})
    with running(tmp_path, "serve", "-c", config) as command:
        assert command.process.wait(START_S) == 2
        command.assert_nothing_is_left()

    assert "has no class 'unicorn'. It knows: person," in command.stderr
    assert "Traceback" not in command.stderr


def test_a_signal_ends_everything(appliance, client, receiver):
    """V6: also with an open stream of events; the last test of the shared appliance.

    The events that go on end with it: stored and sent, so that the next start has nothing to say of them.
    """
    reading = threading.Thread(target=lambda: [None for _ in client.events()], daemon=True)
    reading.start()
    family = appliance[0].family()
    body = {
        "model": client.model_name(),
        "messages": [user_message("Hello")],
        "max_tokens": 3500,
        "stream": True,
    }
    chatting = ThreadPoolExecutor(1).submit(
        lambda: httpx.post(f"{appliance[1]}/v1/chat/completions", json=body, timeout=120).text
    )
    until(lambda: client.health()["engine"]["num_running"])
    path = Path(appliance[0].process.args[-1]).parent / "events.db"  # type: ignore[index,arg-type]
    with closing(sqlite3.connect(path)) as database:
        until(lambda: database.execute("SELECT 1 FROM events WHERE is_open").fetchall(), START_S)

    assert appliance[0].stop(signal.SIGINT) == 0

    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT id FROM events WHERE is_open").fetchall() == []
        assert database.execute("SELECT kind FROM outbox").fetchall() == []

    said = chatting.result(120).strip().split("data: ")[-1]
    assert said == "[DONE]" or json.loads(said)["error"]["code"] == "shutting_down"
    assert "ERROR" not in appliance[0].stderr.partition("appliance: stopping")[2]
    assert receiver.posts[-1].data["state"] == "end"
    assert len(family) >= 4
    appliance[0].assert_nothing_is_left()
    assert "Traceback" not in appliance[0].stderr
    reading.join(120)
    assert not reading.is_alive()


def test_a_second_signal_ends_it_at_once(qwen3_vl_checkpoint, tmp_path):
    config = write_config(tmp_path, qwen3_vl_checkpoint)
    with running(tmp_path, "serve", "-c", config) as command:
        until(lambda: command.find("appliance.ingest") and command.find("-m vlm_engine.process"), START_S)

        command.process.send_signal(signal.SIGTERM)
        until(lambda: "appliance: stopping" in command.stderr)
        assert command.stop(signal.SIGINT) == -signal.SIGINT

        command.assert_nothing_is_left()


def test_nothing_is_left_after_a_hard_kill(qwen3_vl_checkpoint, tmp_path):
    config = write_config(tmp_path, qwen3_vl_checkpoint)
    with running(tmp_path, "serve", "-c", config) as command:
        until(lambda: command.find("appliance.ingest"), START_S)

        command.stop(signal.SIGKILL)

        command.assert_nothing_is_left()
