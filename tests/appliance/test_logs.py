"""A2: what is logged shows no password, whoever logs it."""

import json
import logging
import threading

import pytest
from typer.testing import CliRunner

from appliance.camera import Camera
from appliance.cli import app
from appliance.logs import Complaints, RedactingFormatter
from appliance.settings import load_settings

URL = "rtsp://john.doe:p@s/w?o#r:d@10.0.0.5:554/live/key"


def test_addresses_are_cut_in_messages_and_tracebacks():
    try:
        raise ValueError(f"cannot open {URL}")
    except ValueError as error:
        caught = (type(error), error, error.__traceback__)
    record = logging.LogRecord("a", logging.ERROR, "a.py", 1, "camera %s failed", (URL,), caught)
    text = RedactingFormatter("%(levelname)s %(message)s").format(record)

    assert "ERROR camera rtsp://10.0.0.5:554/… failed" in text
    assert "ValueError: cannot open rtsp://10.0.0.5:554/…" in text
    for secret in ("john", "w?o", "key"):
        assert secret not in text


@pytest.mark.parametrize(
    "password", ["my secret word", "12 secret\nword", "see http://secret word", "'secret \" word"]
)
def test_an_address_of_the_settings_is_shown_nowhere(password, tmp_path):
    """Whatever its password holds: in logs, jobs, states and by `config check`."""
    uri = f"rtsp://john:{password}@10.0.0.5/live key?token=open sesame"
    file = tmp_path / "settings.yaml"
    file.write_text(json.dumps({"cameras": {"gate": {"source": uri}}}))
    checked = CliRunner().invoke(app, ["config", "check", str(file)]).output
    camera = Camera("gate", load_settings(file).cameras["gate"], threading.Event())
    camera.fail(OSError(5, "I/O error", uri))
    record = logging.LogRecord("a", logging.ERROR, "a.py", 1, "no %s: %r %s", (uri, uri, "refused"), None)
    logged = RedactingFormatter("%(message)s").format(record)

    for text in (checked, camera.shown_source, str(camera.status({}).error), logged):
        assert "rtsp://10.0.0.5/…" in text
        assert not [part for part in ("john", "secret", "word", "http:", "key", "sesame") if part in text]
    assert logged == "no rtsp://10.0.0.5/…: 'rtsp://10.0.0.5/…' refused"


def test_the_same_is_not_warned_of_again_and_again(caplog):
    now_s = 0.0
    complaints = Complaints(logging.getLogger("test"), 10.0, lambda: now_s)
    for now_s in (0.0, 1.0, 9.0, 10.0, 19.0):  # noqa: B007
        complaints.tell("disk", "the disk is %s", "full")
        complaints.tell("net", "no net")
    assert caplog.messages == ["the disk is full", "no net"] * 2
