"""What the status page's script asks of a server, and of the person before it."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from appliance.api.views import ASSETS

HARNESS = Path(__file__).with_name("page.js")

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None, reason="runs the page's script with node, which is not here"
)


def run_page(cameras: list[dict[str, Any]], keys: list[str], shown: str = "gate") -> dict[str, Any]:
    """What it asked for, and each dialog for the key, while it looked at the cameras' states four times."""
    answers = {"cameras": cameras, "keys": keys, "key": "right", "shown": f"/{shown}/"}
    command = ["node", str(HARNESS), str(ASSETS / "app.js"), json.dumps(answers)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


def state(name: str, state: str) -> dict[str, Any]:
    return {"name": name, "state": state, "num_frames": 9, "fps": 5.0}


def test_a_wrong_key_is_said_to_be_wrong() -> None:
    """One dialog a key that was tried, however many calls were refused with it."""
    told = run_page([state("gate", "running")], ["wrong", "", "wrong too", "right"])

    assert told["dialogs"] == [
        {"isWrong": False, "text": ""},
        {"isWrong": True, "text": ""},
        {"isWrong": False, "text": ""},
        {"isWrong": True, "text": ""},
    ]


def test_pictures_are_asked_of_cameras_that_run() -> None:
    """One that runs and has none is asked again when its state is told again, not in between."""
    away = [state(name, name) for name in ("stalled", "connecting", "not_found", "stopped", "ended")]
    asked = run_page([state("gate", "running"), state("bare", "running"), *away], ["right"])["asked"]
    frames = [path.split("/")[2] for path in asked if path.endswith("frame.jpg")]

    assert set(frames) == {"gate", "bare"}
    assert frames.count("bare") <= asked.count("v1/cameras")
