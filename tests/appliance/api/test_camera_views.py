"""`/v1/cameras` that changes cameras, over HTTP with a real control behind it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from appliance.jobs import CameraStatus
from tests.appliance.api.serving import PATIENCE_S, Running, Servers
from tests.appliance.test_camera_control import URL, Told
from vlm_engine import StructuredOutput, trial

SECRETS = ("john", "s3cret", "10.0.0.5", "/srv/")


@pytest.fixture
def told(tmp_path: Path, servers: Servers) -> Iterator[Told]:
    told = Told(tmp_path / "told", {"file": {"source": "/srv/street.mp4"}})
    yield told
    servers.thread.call(told.control.stop())
    servers.thread.call(told.board.close())


@pytest.fixture
def running(servers: Servers, told: Told) -> Iterator[Running]:
    running = servers.start(camera_changes=told.control)
    running.cameras.known = [CameraStatus(name="file", state="running"), CameraStatus(name="gate", state="x")]
    yield running
    servers.stop(running)


def test_a_camera_comes_changes_and_goes(running, told):
    """A5: its address goes in, and never comes out."""
    with httpx.Client(base_url=running.base_url) as client:
        added = client.post("/cameras", json={"name": "gate", "source": URL, "fps": 5})
        paused = client.patch("/cameras/gate", json={"enabled": False})
        shown = client.get("/cameras/gate")
        assert told.cameras(3)["gate"]["enabled"] is False
        again = client.post("/cameras", json={"name": "gate", "source": URL})
        removed = client.delete("/cameras/gate")
        gone = client.delete("/cameras/gate")

    codes = [answer.status_code for answer in (added, paused, shown, again, removed, gone)]
    assert codes == [201, 200, 200, 409, 200, 404]
    assert shown.json()["name"] == "gate"
    assert set(told.cameras(4)) == {"file"}
    for answer in (added, paused, shown, again, removed, gone):
        assert not [secret for secret in SECRETS if secret in answer.text]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "bad", "source": "exec:ls"}, "source"),
        ({"name": "bad", "source": "file:///etc/passwd"}, "source"),
        ({"name": "bad", "source": URL, "detect": {"fps": "x"}}, "detect.fps"),
        ({"source": URL}, "name"),
        ([], None),
    ],
)
def test_what_cannot_be_is_a_400_that_names_the_key(running, told, body, param):
    """A4."""
    answer = httpx.post(f"{running.base_url}/cameras", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not [secret for secret in SECRETS if secret in answer.text]
    assert told.control.names == ("file",)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" * 100_000, "recursion"),
        (b'{"name": "a", "name": "b"}', "the key 'name' stands twice"),
        (b'{"name": "gate", "fps": NaN}', "NaN is no number"),
        (b'{"name": "gate", "fps": -Infinity}', "-Infinity is no number"),
        (b'{"name": "\xff"}', "can't decode"),
        (b"\x00", "not valid JSON"),
    ],
)
def test_a_body_that_is_no_json(running, body, message):
    answer = httpx.post(f"{running.base_url}/cameras", content=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert message in answer.json()["error"]["message"]


def test_settings_have_a_size(running):
    answer = httpx.post(f"{running.base_url}/cameras", content=b" " * (2**20 + 1))

    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_a_schema_is_tried_out_beside_everything_else(running, told, monkeypatch):
    """While that takes its time, the server answers others."""
    begun, answered, check = threading.Event(), threading.Event(), trial.check_grammar

    def take_long(wanted: StructuredOutput) -> None:
        begun.set()
        assert answered.wait(PATIENCE_S)
        check(wanted)

    monkeypatch.setattr("appliance.describe_settings.check_grammar", take_long)
    keys = {"describe": {"schema": {"type": "object", "properties": {"a": {"pattern": "^[a-z]{1,40}$"}}}}}
    with httpx.Client(base_url=running.base_url, timeout=PATIENCE_S) as client, ThreadPoolExecutor(1) as pool:
        changed = pool.submit(client.patch, "/cameras/file", json=keys)
        assert begun.wait(PATIENCE_S)
        assert client.get("/models", timeout=PATIENCE_S / 2).status_code == 200
        assert not changed.done()
        answered.set()
        assert changed.result().status_code == 200, changed.result().text
        bad = {"describe": {"schema": {"type": "object", "properties": {"a": {"pattern": "(?=a)b"}}}}}
        refused = client.patch("/cameras/file", json=bad)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "describe.schema")


def test_what_holds_for_a_camera_is_told(running):
    """Under the names by which it can be changed again, with its name for people, and why it does not run."""
    running.cameras.known = [
        CameraStatus(name="file", state="stopped", updated_at=1.0),
        CameraStatus(name="gate", state="stalled", updated_at=1.0, error=f"OSError: {URL} refused"),
    ]
    url = f"{running.base_url}/cameras"
    gate = {
        "name": "gate",
        "source": URL,
        "friendly_name": "Front gate",
        "describe": {"cooldown": {"track": 9}},
    }
    assert httpx.post(url, json=gate).status_code == 201
    httpx.patch(f"{url}/file", json={"enabled": False})
    shown, listed = httpx.get(f"{url}/gate"), httpx.get(url)

    assert shown.json()["friendly_name"] == "Front gate"
    assert (shown.json()["enabled"], shown.json()["state"]) == (True, "stalled")
    assert shown.json()["reason"] == "OSError: its source refused"
    settings = shown.json()["settings"]
    assert settings["describe"]["cooldown"] == {"object": 10.0, "camera": 0.0, "track": 9.0}
    assert not {"source", "ffmpeg"} & settings.keys()
    file = listed.json()["data"][0]
    assert (file["enabled"], file["reason"]) == (False, 'it is paused: set "enabled": true')
    assert not [secret for secret in SECRETS if secret in shown.text + listed.text]
    again = httpx.patch(f"{url}/gate", json=settings)
    assert (again.status_code, again.json()["settings"]) == (200, settings)


def test_an_address_without_a_path_is_not_half_shown(running):
    url, error = f"{running.base_url}/cameras", "http://10.0.0.9:81/… sends no video"
    running.cameras.known = [CameraStatus(name="far", state="unsupported", updated_at=1.0, error=error)]
    assert httpx.post(url, json={"name": "far", "source": "http://10.0.0.9:81/"}).status_code == 201

    assert httpx.get(f"{url}/far").json()["reason"] == "its source sends no video"


def test_a_file_is_not_named_by_its_error(running):
    running.cameras.known = [
        CameraStatus(name="file", state="not_found", updated_at=1.0, error="/srv/street.mp4: no such file")
    ]
    answer = httpx.get(f"{running.base_url}/cameras/file")

    assert answer.json()["reason"] == "its source: no such file"
    assert "/srv/" not in answer.text


def test_where_cameras_are_fixed(servers):
    running = servers.start()
    answer = httpx.post(f"{running.base_url}/cameras", json={"name": "gate", "source": URL})
    servers.stop(running)

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "cameras_fixed"
