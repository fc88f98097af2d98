"""Paths in a settings file: by its own folder, wherever the appliance is started."""

from pathlib import Path
from typing import Any

import pytest

from appliance.settings import load_settings

TEXT = """
engine: {model: ./weights, cost_cache: costs}
detector: {model: yolo.pt, gate: device.sock}
events: {path: events.db}
outputs: {mqtt: {url: "mqtts://broker", ca_file: ca.pem}}
redis: {url: "rediss://box", ca_file: ca.pem, cert_file: ca.pem, key_file: ca.pem}
cameras:
  lobby: {source: clips/lobby.mp4}
  hall: {ffmpeg: {inputs: [{path: hall.mp4, roles: [detect]}]}}
  drawn: {source: "synthetic://street"}
  gate: {source: "rtsp://10.0.0.5/main"}
  desk: {source: /dev/video0}
"""


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file in a folder beside the one that everything is started in."""
    folder, elsewhere = tmp_path / "box", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.delenv("APPLIANCE_ENGINE__COST_CACHE", raising=False)
    (folder / "ca.pem").touch()
    return folder / "box.yaml"


def loaded(path: Path, text: str, **overrides: Any) -> Any:
    path.write_text(text)
    return load_settings(path, overrides)


def test_every_path_goes_by_the_folder_of_the_file(box: Path) -> None:
    settings, folder = loaded(box, TEXT), box.parent

    assert settings.engine.model == str(folder / "weights")
    assert settings.engine.cost_cache == str(folder / "costs")
    assert settings.detector.model == str(folder / "yolo.pt")
    assert settings.detector.gate == str(folder / "device.sock")
    assert settings.events.path == folder / "events.db"
    assert settings.outputs.mqtt.ca_file == str(folder / "ca.pem")
    assert {settings.redis.ca_file, settings.redis.cert_file, settings.redis.key_file} == {folder / "ca.pem"}
    assert {name: camera.source for name, camera in settings.cameras.items()} == {
        "lobby": str(folder / "clips/lobby.mp4"),
        "hall": str(folder / "hall.mp4"),
        "drawn": "synthetic://street",
        "gate": "rtsp://10.0.0.5/main",
        "desk": "/dev/video0",
    }


def test_a_file_that_is_named_from_beside_it(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box.write_text("cameras: {lobby: {source: lobby.mp4}}")
    monkeypatch.chdir(box.parent)

    assert load_settings(Path("box.yaml")).cameras["lobby"].source == "lobby.mp4"
    monkeypatch.chdir(box.parent.parent)
    assert load_settings(Path("box/box.yaml")).cameras["lobby"].source == "box/lobby.mp4"


@pytest.mark.parametrize("name", ["Qwen/Qwen3-VL-2B-Instruct", "gpt2"])
def test_names_of_a_hub_are_no_paths(box: Path, name: str) -> None:
    assert loaded(box, f"engine: {{model: {name}}}").engine.model == name


def test_a_folder_beside_the_file_goes_before_a_hub(box: Path) -> None:
    (box.parent / "models" / "mine").mkdir(parents=True)

    settings = loaded(box, "engine: {model: models/mine}")

    assert settings.engine.model == str(box.parent / "models/mine")


def test_names_that_mean_no_file(box: Path) -> None:
    settings = loaded(box, "detector: {model: yolo26n.yaml}\nengine: {cost_cache: 'off'}")

    assert settings.detector.model == "yolo26n.yaml"
    assert settings.engine.cost_cache == "off"


def test_environment_and_command_line_go_by_the_working_directory(
    box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPLIANCE_EVENTS__PATH", "here.db")

    settings = loaded(box, "events: {path: there.db}", detector={"model": "here.pt"})

    assert settings.events.path == Path("here.db")
    assert settings.detector.model == "here.pt"


def test_the_users_own_folder(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")

    assert loaded(box, "events: {path: ~/events.db}").events.path == Path("/home/me/events.db")


@pytest.mark.parametrize(
    "text",
    [
        "cameras: 3",
        "cameras: {a: 3}",
        "cameras: {a: {ffmpeg: {inputs: {path: x}}}}",
        "redis: [url]",
        "events: {path: 3}",
    ],
)
def test_mistakes_are_told_as_such(box: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"(cameras|redis|events)"):
        loaded(box, text)
