"""`/v1/cameras` that changes cameras, over HTTP with a real control behind it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from appliance.jobs import CameraStatus
from tests.appliance.api.serving import Running, Servers
from tests.appliance.test_camera_control import URL, Told

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


def test_where_cameras_are_fixed(servers):
    running = servers.start()
    answer = httpx.post(f"{running.base_url}/cameras", json={"name": "gate", "source": URL})
    servers.stop(running)

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "cameras_fixed"
