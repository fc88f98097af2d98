"""Models, health, cameras, the page, and errors of the server itself."""

import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from appliance.api.views import ASSETS
from appliance.board import ShownFrame
from appliance.events import EventStoreError
from appliance.jobs import CameraStatus
from queues.errors import QueueUnavailable
from queues.types import QueueStatus
from tests.appliance.api.serving import MODEL, Running, Servers, is_idle, wait_until
from tests.appliance.descriptions import description

CLOSED = "the engine is not running"


def test_models(client: OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names == [MODEL, "other-name", "organisation/model"]
    assert client.models.retrieve("organisation/model").model_extra == {"root": MODEL}
    assert client.models.retrieve(MODEL).owned_by == "vision-appliance"


def test_an_unknown_model(http: httpx.Client) -> None:
    reply = http.get("/v1/models/gpt-5")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"


def test_a_models_folder_is_not_told(http: httpx.Client, server: Running) -> None:
    folder = str(Path(server.engine.model_name).parent)
    assert folder.startswith("/")
    for path in ("/v1/models", "/health"):
        assert folder not in http.get(path).text


def test_cameras_without_addresses(http: httpx.Client) -> None:
    """A5: neither URL nor secret, not even in a camera's error."""
    reply = http.get("/v1/cameras")
    body = reply.json()
    assert body["object"] == "list"
    assert [(camera["name"], camera["state"]) for camera in body["data"]] == [
        ("street", "running"),
        ("yard", "stalled"),
    ]
    assert body["data"][0]["fps"] == 5.0
    assert "rtsp" not in reply.text
    assert "john.doe" not in reply.text
    assert "rtsp" not in http.get("/health").text


def test_a_cameras_frame(http: httpx.Client, server: Running) -> None:
    reply = http.get("/v1/cameras/street/frame.jpg")
    assert reply.content == server.cameras.frames["street"]
    assert reply.headers["content-type"] == "image/jpeg"
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["x-frame-age"] == "0.4"


@pytest.mark.parametrize(
    ("state", "frame_age_s", "age_s", "is_shown"),
    [
        ("running", 0.1, 2.9, True),
        ("running", 0.1, 8.0, False),
        ("running", 7.0, 8.0, True),
        ("stalled", 2.5, 2.9, False),
        ("stopped", None, 1.0, False),
    ],
)
def test_an_old_frame_is_not_what_a_camera_shows(
    http: httpx.Client, server: Running, monkeypatch, state, frame_age_s, age_s, is_shown
) -> None:
    """It is stalled or paused, or its worker is gone; one that gives few frames is neither."""
    status = CameraStatus(name="street", state=state, frame_age_s=frame_age_s)
    monkeypatch.setattr(server.cameras, "known", [status])
    monkeypatch.setattr(server.cameras, "frame_age_s", age_s)
    reply = http.get("/v1/cameras/street/frame.jpg")
    assert reply.status_code == (200 if is_shown else 503)
    assert is_shown or reply.json()["error"]["code"] == "camera_not_ready"


def test_who_looks_at_last_waits_for_a_frame_of_now(http: httpx.Client, server: Running, monkeypatch) -> None:
    """Its worker shows a frame that nobody looks at now and then only."""
    shown = iter([ShownFrame(b"before", 8.0), ShownFrame(b"before", 8.1), ShownFrame(b"now", 0.1)])

    async def frame(name: str) -> ShownFrame:
        return next(shown)

    status = CameraStatus(name="street", state="running", frame_age_s=0.1)
    monkeypatch.setattr(server.cameras, "known", [status])
    monkeypatch.setattr(server.cameras, "frame", frame)
    reply = http.get("/v1/cameras/street/frame.jpg")
    assert (reply.status_code, reply.content, reply.headers["x-frame-age"]) == (200, b"now", "0.1")


def test_cameras_without_a_frame(http: httpx.Client) -> None:
    unknown = http.get("/v1/cameras/garden/frame.jpg")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == "there is no camera 'garden'; cameras: street, yard"
    empty = http.get("/v1/cameras/yard/frame.jpg")
    assert empty.status_code == 503
    assert empty.headers["retry-after"] == "1"


def test_a_description_may_be_asked_for(http: httpx.Client, server: Running) -> None:
    """202 with the event's id; a camera that comes back is 503, one that does not is 409."""
    reply = http.post("/v1/cameras/street/describe")
    assert reply.status_code == 202
    assert reply.json() == {
        "id": "street-asked-1",
        "object": "event",
        "camera": "street",
        "url": "/v1/events/street-asked-1",
    }
    away = http.post("/v1/cameras/yard/describe")
    assert (away.status_code, away.json()["error"]["code"]) == (503, "camera_not_ready")
    server.cameras.is_asked_too_often = True
    busy = http.post("/v1/cameras/street/describe")
    server.cameras.is_asked_too_often = False
    assert (busy.status_code, busy.json()["error"]["code"]) == (503, "overloaded")
    unknown = http.post("/v1/cameras/garden/describe")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "camera_not_found")
    server.cameras.known.append(CameraStatus(name="attic", state="stopped"))
    try:
        paused = http.post("/v1/cameras/attic/describe")
    finally:
        server.cameras.known.pop()
    assert (paused.status_code, paused.json()["error"]["code"]) == (409, "camera_not_running")


def test_health(http: httpx.Client, server: Running) -> None:
    wait_until(lambda: is_idle(server.engine), "an idle engine")
    reply = http.get("/health")
    assert reply.status_code == 200
    assert reply.json() == {
        "status": "ok",
        "reasons": ["camera yard is stalled: its source refused"],
        "engine": {
            "status": "ok",
            "model": MODEL,
            "num_running": 0,
            "num_waiting": 0,
            "kv_cache_usage": 0.0,
        },
        "queue": {"status": "none"},
        "cameras": {"street": "running", "yard": "stalled"},
        "outputs": {},
        "describe": {"level": 2, "max_level": 6, "rung": "picture", "wait_s": 1.23},
    }


def test_health_of_an_engine_that_is_frozen(http: httpx.Client, server: Running, monkeypatch: Any) -> None:
    """A7: 503 with the reason; here the engine's own watch says that its loop died."""
    monkeypatch.setattr(server.engine, "_death", "the engine's loop died")
    reply = http.get("/health")
    assert reply.status_code == 503
    assert reply.json()["status"] == "unhealthy"
    assert reply.json()["engine"] == {
        "status": "unhealthy",
        "model": MODEL,
        "reason": "the engine's loop died",
        "num_running": 0,
        "num_waiting": 0,
        "kv_cache_usage": 0.0,
    }
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    refused = http.post("/v1/chat/completions", json=chat)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_unavailable"


async def a_queue() -> QueueStatus:
    return QueueStatus(3, 1, 2, 999, 9, 5, 0, 0, 1.5, {"dead": 2})


async def a_full_queue() -> QueueStatus:
    return QueueStatus(3, 1, 0, 999, 9, 5, 0, 0, 1.5, refusal="OOM command not allowed")


async def no_queue() -> QueueStatus:
    raise QueueUnavailable("the queue at redis://10.0.0.1 cannot be used now: BUSY")


async def broken_queue() -> QueueStatus:
    raise OSError("redis://john.doe:p@ss@10.0.0.1 refused")


def test_health_says_why_and_what_to_do(servers: Servers) -> None:
    """A sentence for each part that is not well, and none of an address."""
    running = servers.start(queue_status=a_full_queue)
    running.events.outbox.connect({"hook": lambda kind, body: True})
    running.events.add(description("1"))
    running.events.outbox.give_up("hook", math.inf, "410 Gone")
    health = httpx.get(f"{running.url}/health").json()
    servers.stop(running)
    assert health["reasons"] == [
        "queue: takes no jobs: OOM command not allowed: see that its Redis runs (redis.url)",
        "camera yard is stalled: its source refused",
        "output hook: 1 messages were given up: see 'appliance outputs dead'",
    ]
    assert health["outputs"]["hook"]["num_dead"] == 1


def test_health_tells_of_an_event_file_without_room(servers: Servers) -> None:
    """By the name of what could not be stored, and what to do; the rest goes on."""
    running = servers.start()
    database = running.events._database
    (num_pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {num_pages}")
    with pytest.raises(EventStoreError):
        running.events.add(description("big"), bytes(100_000))
    reply = httpx.get(f"{running.url}/health")
    servers.stop(running)
    assert (reply.status_code, reply.json()["status"]) == (200, "degraded")
    problem = "the event big cannot be stored: database or disk is full"
    assert reply.json()["reasons"][-1] == f"events: {problem}: make room on the disk of events.path"


def test_health_with_a_queue(servers: Servers) -> None:
    """Q3: dead letters are told where people look first."""
    running = servers.start(queue_status=a_queue)
    health = httpx.get(f"{running.url}/health").json()
    queue = health["queue"]
    assert health["reasons"][0] == "queue: 2 jobs were given up: see 'appliance queue dead'"
    assert (queue["status"], queue["depth"], queue["pending"], queue["dead"]) == ("ok", 3, 1, 2)
    servers.stop(running)


@pytest.mark.parametrize(
    ("queue_status", "reason"),
    [(a_full_queue, "takes no jobs: OOM command not allowed"), (broken_queue, "does not answer")],
)
def test_health_says_what_is_wrong_with_the_queue(servers: Servers, queue_status: Any, reason: str) -> None:
    running = servers.start(queue_status=queue_status)
    health = httpx.get(f"{running.url}/health").json()
    assert (health["status"], health["queue"]["error"]) == ("degraded", reason)
    servers.stop(running)


def test_a_queue_that_is_away_does_not_end_chat(servers: Servers) -> None:
    running = servers.start(queue_status=no_queue)
    reply = httpx.get(f"{running.url}/health")
    assert reply.status_code == 200
    assert reply.json()["status"] == "degraded"
    assert reply.json()["queue"] == {"error": "the queue at redis://10.0.0.1 cannot be used now: BUSY"}
    running.cameras.failure = QueueUnavailable("redis://john.doe:p@ss@10.0.0.1 refused")
    assert httpx.get(f"{running.url}/health").json()["cameras"] == {"error": "unknown"}
    cameras = httpx.get(f"{running.url}/v1/cameras")
    assert cameras.status_code == 503
    assert "john.doe" not in cameras.text
    servers.stop(running)


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v1/nothing", 404, "unknown request URL: GET /v1/nothing"),
        ("POST", "/v1/embeddings", 404, "unknown request URL: POST /v1/embeddings"),
        ("GET", "/v1/chat/completions", 405, "GET is not allowed on /v1/chat/completions"),
        ("DELETE", "/v1/events", 405, "DELETE is not allowed"),
        ("POST", "/v1/responses", 404, "use chat completions"),
        ("GET", "/docs", 404, "unknown request URL"),
        ("GET", "/assets/nothing.js", 404, "unknown request URL"),
    ],
)
def test_unknown_urls_and_methods(
    http: httpx.Client, method: str, path: str, status: int, message: str
) -> None:
    reply = http.request(method, path)
    assert reply.status_code == status
    assert message in reply.json()["error"]["message"]
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert status != 405 or reply.headers["allow"]


def test_an_error_of_our_own(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    """A 500 tells nothing, the log tells all."""
    running = servers.start()
    running.cameras.failure = ZeroDivisionError("the secret reason")
    reply = httpx.get(f"{running.url}/v1/cameras")
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "secret" not in reply.text
    servers.stop(running)
    assert "the secret reason" in caplog.text


def test_the_page_needs_nothing_from_elsewhere(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(links) >= 3
    for link in links:
        assert link.startswith("data:") or http.get(f"/{link}").status_code == 200
    for name in ("index.html", "app.js", "style.css"):
        assert not re.search(r"https?://", (ASSETS / name).read_text())


def test_the_pages_script_finds_what_it_looks_for() -> None:
    page, script = (ASSETS / "index.html").read_text(), (ASSETS / "app.js").read_text()
    wanted = set(re.findall(r'byId\("([\w-]+)"\)', script))
    assert len(wanted) > 10
    assert wanted <= set(re.findall(r'id="([\w-]+)"', page))
    assert "innerHTML" not in script


@pytest.mark.skipif(
    shutil.which("node") is None, reason="checks the page's script with node, which is not here"
)
def test_the_pages_script_is_valid() -> None:
    checked = subprocess.run(
        ["node", "--check", ASSETS / "app.js"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
