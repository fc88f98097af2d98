"""Cameras changed while they run: what is allowed, and what the vision worker is told."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from appliance.board import BoardReader
from appliance.camera_control import CameraControl, CameraExists, CameraRefused, reload_from
from appliance.processes import Child, Supervisor
from appliance.reloading import telling
from appliance.settings import Settings, SettingsError, load_settings
from queues import QueueUnavailable
from tests.appliance.running import until

URL = "rtsp://john.doe:s3cret@10.0.0.5/live"


def record() -> None:
    """The target of a child that writes down what it is told, where its settings keep events."""
    for line in sys.stdin:
        with open(json.loads(line)["events"]["path"], "a") as file:
            file.write(line)


class Told:
    """A control over a child that records, and what it has recorded."""

    def __init__(self, path: Path, cameras: dict[str, Any]) -> None:
        self.path = path
        self.settings = load_settings(None, {"events": {"path": str(path)}, "cameras": cameras})
        self.board = BoardReader("redis://127.0.0.1:1", tuple(cameras))
        self.workers: list[Supervisor] = []
        self.control = CameraControl(self.settings, "redis://127.0.0.1:1", self.board, self._start)

    def _start(self, payload: Any) -> Supervisor:
        target = "tests.appliance.test_camera_control:record"
        self.workers.append(Supervisor("recorder", lambda: Child(target, payload(), is_told_more=True)))
        return self.workers[-1]

    def cameras(self, num_told: int) -> dict[str, Any]:
        """The cameras that the child was told last, once it was told that often."""
        until(lambda: self.path.exists() and len(self.path.read_text().splitlines()) >= num_told)
        return dict(json.loads(self.path.read_text().splitlines()[-1])["cameras"])


@pytest.fixture
async def told(tmp_path: Path) -> Any:
    told = Told(tmp_path / "told", {"file": {"source": "/srv/street.mp4"}})
    yield told
    await told.control.stop()
    await told.board.close()


async def test_a_camera_comes_changes_and_goes(told):
    control = told.control
    await control.add("gate", {"source": URL, "detect": {"width": 640, "fps": 5}})
    gate = told.cameras(2)["gate"]
    assert (gate["source"], gate["detect"]["fps"], gate["enabled"]) == (URL, 5, True)
    assert set(told.board.names) == {"file", "gate"}

    await control.change("gate", {"enabled": False, "detect": {"fps": 2}})
    gate = told.cameras(3)["gate"]
    assert (gate["source"], gate["enabled"]) == (URL, False)
    assert (gate["detect"]["width"], gate["detect"]["fps"]) == (640, 2)

    await control.change("gate", {"source": "synthetic://yard"})
    assert told.cameras(4)["gate"]["source"] == "synthetic://yard"
    await control.remove("gate")
    assert set(told.cameras(5)) == {"file"} == set(told.board.names)


@pytest.mark.parametrize(
    "source",
    ["exec:rm -rf /", "file:///etc/passwd", "/etc/passwd", "street.mp4", "/dev/video0", "v4l2:///dev/video0",
     "concat:a|b", "gopher://x/", "rtsp://", "data:,x", "pipe:0", "FILE:///etc/passwd"],
)  # fmt: skip
async def test_the_api_names_no_files_of_this_machine(told, source):
    """A4."""
    with pytest.raises(CameraRefused) as refused:
        await told.control.add("bad", {"source": source})
    assert refused.value.field == "source"
    with pytest.raises(CameraRefused):
        await told.control.add("bad", {"ffmpeg": {"inputs": [{"path": source, "roles": ["detect"]}]}})
    with pytest.raises(CameraRefused):
        await told.control.change("file", {"source": source})

    assert told.control.names == ("file",)


async def test_other_keys_of_a_camera_on_a_file_may_change(told):
    await told.control.change("file", {"enabled": False})

    assert told.cameras(2)["file"]["source"] == "/srv/street.mp4"


@pytest.mark.parametrize(
    ("name", "keys", "field"),
    [
        ("gate", {"source": URL, "colour": "red"}, "colour"),
        ("gate", {"source": URL, "detect": {"fps": -1}}, "detect.fps"),
        ("gate", {}, "source"),
        ("a/b", {"source": URL}, None),
        ("gate", {"source": URL, "zones": {"z": {"coordinates": "0,0,9,0,9,9"}}}, "zones.z.coordinates"),
        ("gate", {"source": URL, "describe": {"required_zones": ["z"]}}, "describe.required_zones"),
        (
            "gate",
            {"source": URL, "lines": {"kerb": {"coordinates": "0.5,0.5,0.5,0.5"}}},
            "lines.kerb.coordinates",
        ),
        (
            "gate",
            {"source": URL, "lines": {"kerb": {"coordinates": "0,0,0,1,1,1"}}},
            "lines.kerb.coordinates",
        ),
        ("gate", {"source": "synthetic://["}, "source"),
        ("gate", {"source": "synthetic://moon"}, "source"),
        ("gate", {"source": URL, "friendly_name": "Gate \ud83d"}, "friendly_name"),
        (
            "gate",
            {"source": URL, "describe": {"object_prompts": {"car": "\ud83d"}}},
            "describe.object_prompts.car",
        ),
        (
            "gate",
            {"source": URL, "zones": {"\ud83d": {"coordinates": "0,0,1,0,1,1"}}},
            "zones.\ufffd\ufffd\ufffd.[key]",
        ),
    ],
)
async def test_what_cannot_be_names_its_key_and_no_secret(told, name, keys, field):
    with pytest.raises(CameraRefused) as refused:
        await told.control.add(name, keys)

    assert refused.value.field == field
    assert "s3cret" not in str(refused.value)
    assert told.control.names == ("file",)


AREA = "0,0,1,0,1,1"


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"objects": {"track": ["person", "cart"]}}, "objects.track"),
        ({"objects": {"filters": {"cart": {"min_score": 0.5}}}}, "objects.filters"),
        ({"describe": {"objects": ["cart"]}}, "describe.objects"),
        ({"describe": {"object_prompts": {"scene": "What?", "cart": "Whose?"}}}, "describe.object_prompts"),
        ({"zones": {"z": {"coordinates": AREA, "objects": ["cart"]}}}, "zones.z.objects"),
        ({"lines": {"kerb": {"coordinates": "0,0,1,1", "objects": ["cart"]}}}, "lines.kerb.objects"),
    ],
)
async def test_a_class_that_the_detector_does_not_give_changes_nothing(told, keys, field):
    """V18: the detector would be asked for it in vain, and the camera would not run."""
    for asking in (told.control.change("file", keys), told.control.add("gate", {"source": URL, **keys})):
        with pytest.raises(
            CameraRefused, match=r"has no class 'cart'\. It knows: person, bicycle, "
        ) as refused:
            await asking
        assert refused.value.field == field
    assert told.control.settings_of("file")["objects"]["track"] is None
    await told.control.change("file", {"enabled": False})
    assert set(told.cameras(2)) == {"file"}


async def test_a_class_of_the_detector_that_was_not_asked_of_it_is_refused(tmp_path):
    detector = {"classes": ["person"]}
    control = CameraControl(
        load_settings(None, {"detector": detector}),
        "redis://127.0.0.1:1",
        board := BoardReader("redis://127.0.0.1:1", ()),
        lambda payload: pytest.fail("no camera is to be started"),
    )
    with pytest.raises(CameraRefused, match=r"has no class 'car'\. It knows: person\."):
        await control.add("gate", {"source": URL, "objects": {"track": ["car"]}})
    await board.close()


@pytest.mark.parametrize("where", ["cameras.file.objects.track", "objects.track"])
async def test_a_reload_with_a_class_that_is_not_known_changes_nothing(told, caplog, where):
    """Nor does the detector that the file names by now make it known: it waits for the next start."""
    objects = {"objects": {"track": ["cart"]}}
    file = {"source": "/srv/yard.mp4"}
    cameras = {"file": file | objects} if where.startswith("cameras") else {"file": file}
    more = {} if where.startswith("cameras") else objects
    wanted = load_settings(None, {"detector": {"model": "other.pt"}, "cameras": cameras, **more})
    await reload_from(told.control, lambda: wanted, told.settings)
    with pytest.raises(SettingsError, match=f"{where}: the detector .* has no class 'cart'"):
        telling(lambda: wanted, told.settings)()

    assert f"not read again: {where}: the detector yolo26n-scenes.pt has no class 'cart'" in caplog.text
    await told.control.change("file", {"enabled": False})
    assert told.cameras(2)["file"]["source"] == "/srv/street.mp4"


async def test_the_queue_is_told_what_a_camera_allows(told):
    permits: list[tuple[str, str]] = []

    async def permit(name: str, permit: str) -> None:
        permits.append((name, permit))
        if permit == "removed":
            raise QueueUnavailable("away")

    told.control.permit = permit
    await told.control.permit_all()
    await told.control.change("file", {"friendly_name": "A file"})
    await told.control.change("file", {"enabled": False})
    await told.control.change("file", {"enabled": True, "privacy": {"mask": "0.1,0.1,0.4,0.1,0.4,0.4"}})
    await told.control.remove("file")

    names, values = zip(*permits, strict=True)
    assert (set(names), values[:2], len(values[2]), values[3:]) == (
        {"file"},
        ("", "paused"),
        16,
        ("removed",),
    )
    assert told.cameras(5) == {}


async def test_nothing_is_told_that_the_worker_could_not_read(told, monkeypatch):
    """It would read no change after that either."""
    settings = told.settings.model_copy(
        update={"cameras": {"file": told.settings.cameras["file"].model_copy()}}
    )
    broken = settings.cameras["file"].model_copy(update={"friendly_name": "Gate \ud83d"})
    monkeypatch.setattr(told.control, "_settings", settings)
    with pytest.raises(CameraRefused, match="cannot be handed on"):
        await told.control.reload(settings.model_copy(update={"cameras": {"file": broken}}))

    await told.control.change("file", {"enabled": False})
    assert told.cameras(2)["file"]["enabled"] is False


async def test_a_camera_may_be_given_in_frigates_words(told):
    await told.control.add(
        "gate", {"source": URL, "describe": {"objects": ["car"], "cooldown": {"track": 9}}}
    )
    await told.control.change("gate", {"describe": {"objects": ["dog"]}})
    describe = told.cameras(3)["gate"]["describe"]

    assert (describe["labels"], describe["track_cooldown_s"], describe["cooldown_s"]) == (["dog"], 9, 10)


async def test_of_both_ways_to_say_how_many_frames_the_newer_holds(told):
    await told.control.change("file", {"fps": 2})
    await told.control.change("file", {"detect": {"fps": 5}})
    told.cameras(3)
    assert told.control._settings.cameras["file"].max_fps == 5
    await told.control.change("file", {"fps": 3})
    assert told.control._settings.cameras["file"].max_fps == 3


async def test_zones_lines_filters_and_prompts_go_again(told):
    area, line = {"coordinates": "0,0,1,0,1,1"}, {"coordinates": "0,0,1,1"}
    looks = {
        "zones": {"porch": area, "street": area},
        "lines": {"kerb": line},
        "objects": {"filters": {"car": {"min_score": 0.5}, "dog": {"min_score": 0.6}}},
        "describe": {"object_prompts": {"car": "Whose?"}, "triggers": {"dwell": 9}},
    }
    await told.control.change("file", looks)
    gone = {
        "zones": {"porch": None},
        "lines": {"kerb": None},
        "objects": {"filters": {"car": None}},
        "describe": {"object_prompts": {"car": None}, "triggers": {"dwell": None}},
    }
    await told.control.change("file", gone)
    file = told.cameras(3)["file"]

    assert (set(file["zones"]), file["lines"], set(file["objects"]["filters"])) == ({"street"}, {}, {"dog"})
    assert (file["describe"]["object_prompts"], file["describe"]["triggers"]["dwell"]) == ({}, None)


async def test_after_a_clock_was_set_back_cameras_are_believed(told, monkeypatch):
    await told.control.change("file", {"enabled": False})
    begun_at = time.time()
    assert not told.control.is_before_change("file", begun_at)
    assert told.control.is_before_change("file", begun_at - 60)
    with monkeypatch.context() as earlier:
        earlier.setattr("time.time", lambda: begun_at - 3600)
        assert not told.control.is_before_change("file", begun_at - 3600)


async def test_names_that_are_taken_or_unknown(told):
    with pytest.raises(CameraExists):
        await told.control.add("file", {"source": URL})
    with pytest.raises(KeyError):
        await told.control.change("gate", {"enabled": False})
    with pytest.raises(KeyError):
        await told.control.remove("gate")


async def test_a_worker_that_dies_is_told_what_is_wanted_by_then(told, monkeypatch):
    monkeypatch.setattr("appliance.processes.BACK_OFF_S", (0.01,))
    await told.control.add("gate", {"source": URL})
    assert set(told.cameras(2)) == {"file", "gate"}
    os.kill(told.workers[0].pid, signal.SIGKILL)
    await told.control.remove("file")

    import asyncio

    running = asyncio.ensure_future(told.control.run())
    while not (told.path.read_text().count("\n") >= 3 and set(told.cameras(3)) == {"gate"}):
        await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.wait([running])


async def test_without_a_camera_there_is_no_worker_until_the_first(tmp_path):
    told = Told(tmp_path / "told", {})
    assert told.workers == []
    await told.control.add("gate", {"source": URL})
    assert set(told.cameras(1)) == {"gate"}
    await told.control.stop()
    await told.board.close()


async def test_reading_the_settings_again(told, caplog):
    """SIGHUP: the file says what there is; a mistake in it changes nothing."""
    await told.control.add("gate", {"source": URL})
    again = load_settings(None, {"cameras": {"file": {"source": "/srv/yard.mp4"}, "new": {"source": URL}}})
    await reload_from(told.control, lambda: again, told.settings)
    assert {name: camera["source"] for name, camera in told.cameras(3).items()} == {
        "file": "/srv/yard.mp4",
        "new": URL,
    }

    def broken() -> Settings:
        raise SettingsError("a.yaml: cameras.new.colour: unknown key")

    await reload_from(told.control, broken, told.settings)
    assert told.control.names == ("file", "new")
    assert "colour" in caplog.text
    assert "s3cret" not in caplog.text


async def test_what_waits_for_the_next_start_is_named(told, caplog):
    """SIGHUP: all that is no camera's; what holds for all cameras is theirs."""
    caplog.set_level("INFO", "appliance.reloading")
    other = load_settings(
        None,
        {
            "events": {"path": str(told.path)},
            "cameras": {"file": {"source": "/srv/yard.mp4"}},
            "objects": {"track": ["person"]},
            "describe": {"cooldown_s": 3, "max_tokens": 9},
            "server": {"port": 9000, "api_key": "s3cret"},
        },
    )
    await reload_from(told.control, lambda: other, told.settings)

    news, waiting = caplog.records
    assert (news.levelname, news.getMessage()) == ("INFO", "the settings were read again; cameras: file")
    assert waiting.levelname == "WARNING"
    assert set(waiting.getMessage().partition("only: ")[2].split(", ")) == {
        "describe.max_tokens",
        "server.port",
        "server.api_key",
    }
    assert "s3cret" not in caplog.text


async def test_what_reading_again_takes_back_of_the_api_is_named(told, caplog):
    """SIGHUP: once, and only what the settings do not say too."""
    same = {"source": "/srv/street.mp4"}
    cameras = {"file": same, "kept": same, "back": same, "both": same}
    first = load_settings(None, {"cameras": cameras})
    await reload_from(told.control, lambda: first, told.settings)
    assert "the API" not in caplog.text, "nothing was asked of it"
    await told.control.add("gate", {"source": URL})
    await told.control.change("file", {"friendly_name": "A file"})
    await told.control.change("both", {"friendly_name": "Both"})
    await told.control.remove("back")
    again = load_settings(None, {"cameras": cameras | {"both": same | {"friendly_name": "Both"}}})
    for _ in range(2):
        await reload_from(told.control, lambda: again, told.settings)

    (line,) = [line for line in caplog.messages if "the API" in line]
    assert set(line.partition("asked for: ")[2].split(", ")) == {
        "gate is gone",
        "file is as they say",
        "back is there again",
    }
    assert set(told.control.names) == set(cameras)
