"""A close look at settings: everything that a start would meet later, told at once."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from appliance.cli import app
from appliance.settings_check import ALL_CHECKS, CAMERA_CHECKS, look_at

CONFIGS = Path(__file__).parents[2] / "configs"
STREET = {"source": "synthetic://street"}


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("APPLIANCE_DETECTOR__RUNTIME", raising=False)
    return tmp_path / "box.yaml"


def findings(box: Path, parts: dict[str, Any], checks: Any = ALL_CHECKS) -> dict[str, tuple[str, str]]:
    """By path: weight and text."""
    box.write_text(yaml.safe_dump(parts))
    _, lines, found = look_at(box, {}, checks)
    assert lines == []
    assert len({one.path for one in found}) == len(found), "each is told once"
    return {one.path: (one.weight, one.text) for one in found}


def config_check(box: Path) -> Result:
    return CliRunner().invoke(app, ["config", "check", str(box)])


def test_the_shipped_settings_are_fine() -> None:
    for path in CONFIGS.glob("*.yaml"):
        _, lines, found = look_at(path, {}, ALL_CHECKS)

        assert lines == []
        # why: some are for a GPU, which need not be here
        others = [one for one in found if "torch finds no CUDA device" not in one.text]
        assert {one.weight for one in others} <= {"unchecked"}, path


@pytest.mark.parametrize(
    ("parts", "path"),
    [
        ({"detector": {"classes": ["persn"]}}, "detector.classes"),
        ({"objects": {"track": ["persn"]}}, "objects.track"),
        ({"objects": {"filters": {"persn": {"min_score": 0.5}}}}, "objects.filters"),
        ({"describe": {"labels": ["persn"]}}, "describe.objects"),
        ({"describe": {"object_prompts": {"persn": "What?"}}}, "describe.object_prompts"),
        ({"cameras": {"a": {**STREET, "objects": {"track": ["persn"]}}}}, "cameras.a.objects.track"),
        ({"cameras": {"a": {**STREET, "describe": {"objects": ["persn"]}}}}, "cameras.a.describe.objects"),
        (
            {
                "cameras": {
                    "a": {**STREET, "zones": {"z": {"coordinates": "0,0,1,0,1,1", "objects": "persn"}}}
                }
            },
            "cameras.a.zones.z.objects",
        ),
        (
            {"cameras": {"a": {**STREET, "lines": {"l": {"coordinates": "0,0,1,1", "objects": "persn"}}}}},
            "cameras.a.lines.l.objects",
        ),
    ],
    ids=str,
)
def test_a_class_that_the_detector_does_not_have(box: Path, parts: dict[str, Any], path: str) -> None:
    """V18: with the names that it has."""
    ((where, (weight, text)),) = findings(box, {"cameras": {"b": STREET}, **parts}).items()

    assert (where, weight) == (path, "problem")
    assert text.startswith("the detector yolo26n-scenes.pt has no class 'persn'. It knows: person, bicycle, ")


def test_a_class_that_an_output_waits_for_in_vain(box: Path) -> None:
    """V18: not an error, as other machines may have other detectors; a scene is no class and may be named."""
    hook = {"url": "https://example.org/hook", "labels": ["person", "persn", "scene"]}
    mqtt = {"url": "mqtt://broker", "labels": ["dgo"]}
    describe = {"object_prompts": {"scene": "What is there?"}}
    found = findings(box, {"describe": describe, "outputs": {"webhooks": [hook], "mqtt": mqtt}})

    assert {path: weight for path, (weight, _) in found.items()} == {
        "outputs.webhooks.0.labels": "warning",
        "outputs.mqtt.labels": "warning",
    }
    assert "has no class 'persn'. It knows: person, bicycle" in found["outputs.webhooks.0.labels"][1]


def test_a_source_that_hangs_ends_no_start(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V2, V3: a network drive that is away holds whoever opens a file on it."""
    released = threading.Event()
    monkeypatch.setattr("appliance.camera.OPEN_S", 0.05)
    monkeypatch.setattr("vision.sources._open_path", lambda *_: released.wait())
    found = findings(box, {"cameras": {"far": {"source": "/far/v.mp4"}, "b": STREET}}, CAMERA_CHECKS)
    released.set()

    assert found["cameras.far.source"][0] == "awaited"
    assert "/far/v.mp4 cannot be opened in 0.05 s" in found["cameras.far.source"][1]


def test_a_class_that_is_described_but_not_tracked(box: Path) -> None:
    """Where it is said: for all, or by a camera."""
    both = {"objects": {"track": ["person"]}, "describe": {"objects": ["person", "car"]}}
    off = {"describe": {"enabled": False}}
    more = {"objects": {"track": ["person", "car"]}}
    none = {"objects": {"track": []}}
    cameras = {"a": STREET, "b": STREET, "c": STREET | off, "d": STREET | more, "e": STREET | none}
    found = findings(box, {**both, "cameras": cameras})

    assert {path: weight for path, (weight, _) in found.items()} == {
        "describe.objects": "warning",
        "cameras.e.describe.objects": "warning",
    }
    told = "car will never be described: objects.track has only person"
    assert found["describe.objects"][1] == told
    assert findings(box, {"cameras": {"a": STREET | both}})["cameras.a.describe.objects"][1] == told
    assert findings(box, {"cameras": {"a": STREET}, "describe": {"objects": ["car"]}}) == {}


def test_a_stream_that_was_not_meant_for_detection(box: Path) -> None:
    def stream(*roles: str) -> dict[str, Any]:
        return {"path": STREET["source"], "roles": list(roles)}

    def camera(*inputs: dict[str, Any]) -> dict[str, Any]:
        return {"ffmpeg": {"inputs": list(inputs)}}

    cameras = {
        "a": camera(stream("record")),
        "b": camera(stream("record"), stream("detect")),
        "c": camera(stream()),
        "d": camera(stream("audio")) | {"enabled": False},
    }
    ((path, (weight, text)),) = findings(box, {"cameras": cameras}, CAMERA_CHECKS).items()

    assert (path, weight) == ("cameras.a.ffmpeg.inputs", "warning")
    assert "none has the role detect, so the first is looked at" in text


def test_a_class_that_was_not_asked_of_the_detector(box: Path) -> None:
    found = findings(box, {"detector": {"classes": ["person"]}, "objects": {"track": ["person", "car"]}})

    assert found["objects.track"][1] == "the detector yolo26n-scenes.pt has no class 'car'. It knows: person."


def test_classes_that_cannot_be_known_before(box: Path) -> None:
    (box.parent / "own.pt").write_bytes(b"no model")
    parts = {"detector": {"model": "own.pt"}, "objects": {"track": ["persn"]}}

    assert findings(box, parts)["detector.model"][0] == "unchecked"


@pytest.mark.parametrize(
    ("parts", "path", "text"),
    [
        ({"detector": {"model": "none.pt"}}, "detector.model", "none.pt: nothing is downloaded"),
        ({"detector": {"model": "x.engine"}}, "detector.model", "needs the package tensorrt"),
        ({"detector": {"runtime": "openvino", "device": "cuda"}}, "detector.runtime", "computes on cuda"),
        ({"engine": {"device": "gpu"}}, "engine.device", "use auto, cpu or cuda"),
        ({"engine": {"device": "cuda:99"}}, "engine.device", "CUDA device"),
        ({"detector": {"device": "cuda:99"}}, "detector.device", "CUDA device"),
        ({"engine": {"model": "./none"}}, "engine.model", "there is no folder"),
        ({"engine": {"model": "empty"}}, "engine.model", "has no config.json"),
        ({"engine": {"model": "a/b/c"}}, "engine.model", "no hub name can be so"),
        ({"server": {"host": "0.0.0.0"}}, "server.host", "set server.api_key"),
        ({"events": {"path": "none/events.db"}}, "events.path", "there is no folder"),
        ({"events": {"path": "empty"}}, "events.path", "is a folder"),
        ({"events": {"path": "/proc/events.db"}}, "events.path", "cannot be written"),
        (
            {"outputs": {"mqtt": {"url": "mqtts://broker", "ca_file": "none.pem"}}},
            "outputs.mqtt.ca_file",
            "none.pem: cannot be used",
        ),
        (
            {"cameras": {"a": {"source": "synthetic://street?sed=3"}}},
            "cameras.a.source",
            "known are seed, fps",
        ),
        ({"cameras": {"a": {"source": "ftp://host/x"}}}, "cameras.a.source", "not supported"),
        ({"cameras": {"a": {"source": "rtsp://me:a@b/@host/x"}}}, "cameras.a.source", "read in two ways"),
    ],
    ids=str,
)
def test_what_cannot_be_started_with(box: Path, parts: dict[str, Any], path: str, text: str) -> None:
    (box.parent / "empty").mkdir()
    (box.parent / "x.engine").touch()

    found = findings(box, parts)

    assert found[path][0] == "problem"
    assert text in found[path][1]


def test_a_checkpoint_that_is_not_one(box: Path) -> None:
    folder = box.parent / "bert"
    folder.mkdir()
    parts = {"engine": {"model": "bert"}}
    (folder / "config.json").write_text('{"model_type": "bert"}')

    assert "has no weights" in findings(box, parts)["engine.model"][1]
    (folder / "model.safetensors").touch()
    assert "family 'bert', which is not supported" in findings(box, parts)["engine.model"][1]
    (folder / "config.json").write_text("{")
    assert "cannot be read" in findings(box, parts)["engine.model"][1]


@pytest.mark.parametrize("source", ["none.mp4", "empty", "damaged.mp4"])
def test_a_source_may_come_later(box: Path, source: str) -> None:
    """V2: whoever watches other cameras goes on."""
    (box.parent / "empty").mkdir()
    (box.parent / "damaged.mp4").write_text("this is no video\n" * 100)
    parts = {"cameras": {"a": {"source": source}, "off": {"source": "off.mp4", "enabled": False}}}

    found = findings(box, parts, CAMERA_CHECKS)

    assert {path: weight for path, (weight, _) in found.items()} == {"cameras.a.source": "awaited"}
    assert config_check(box).exit_code == 1


def test_a_name_of_a_hub_cannot_be_looked_at(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(box.parent))
    weight, text = findings(box, {"engine": {"model": "Nobody/Has-This-1B"}})["engine.model"]

    assert weight == "unchecked"
    assert "is not on this machine yet" in text
    done = config_check(box)
    assert done.exit_code == 0
    assert "not checked  engine.model: Nobody/Has-This-1B" in done.stdout


def test_int8_without_its_package(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.model_check.find_spec", lambda name: None)

    weight, text = findings(box, {"engine": {"quantization": "int8"}})["engine.quantization"]

    assert weight == "problem"
    assert "torchao, which is not installed: pip install -e '.[int8]'" in text


def test_clips_need_a_model_that_reads_videos(box: Path, internvl_checkpoint: Path) -> None:
    parts = {
        "engine": {"model": str(internvl_checkpoint)},
        "cameras": {"a": {**STREET, "describe": {"images_as": "clip"}}, "b": STREET},
    }

    assert findings(box, parts)["cameras.a.describe.images_as"][1].startswith("clip needs a model that reads")
    assert "describe.images_as" in findings(box, {**parts, "describe": {"images_as": "clip"}})


def test_a_text_model_describes_nothing(box: Path, llama_checkpoint: Path) -> None:
    engine = {"engine": {"model": str(llama_checkpoint)}}

    assert findings(box, engine) == {}
    assert "reads texts alone" in findings(box, {**engine, "cameras": {"a": STREET}})["engine.model"][1]


def test_the_demo_models_and_what_they_were_never_shown(box: Path, media: Path) -> None:
    parts = {
        "cameras": {"a": {"source": str(media / "bikes.mp4")}, "b": STREET},
        "describe": {"images_as": "clip", "schema": {"type": "object"}},
    }

    found = findings(box, parts)

    assert {weight for weight, _ in found.values()} == {"warning"}
    assert found.keys() == {"engine.model", "detector.model", "describe.images_as", "describe.schema"}
    assert found["engine.model"][1].startswith(
        "the bundled demo model knows drawn scenes only, and a is none"
    )
    assert findings(box, {"cameras": {"b": STREET}}) == {}


WRONG = """
server: {host: 0.0.0.0, port: ninety}
engine: {max_num_seqs: 0, block_size: 0}
detector: {conf: 5, imgsz: 1, model: none.pt}
describe: {prompt: "A {labl}", cooldown: soon}
events: {path: none/events.db}
redis: {url: "redis://host:70000"}
cameras:
  a: {source: "synthetic://street?sed=3", describe: {required_zones: [porch]}}
  b: {source: none.mp4, colour: red}
  c: {}
"""


def test_every_problem_is_told_in_one_round(box: Path) -> None:
    """Of all kinds: form, what does not fit together, what is not there."""
    box.write_text(WRONG)

    told = [line.removeprefix(f"appliance: {box}: ") for line in config_check(box).stderr.splitlines()]

    paths = {line.split(": ")[0] for line in told}
    assert paths >= {
        "server.host",
        "server.port",
        "engine.max_num_seqs",
        "engine.block_size",
        "detector.conf",
        "detector.imgsz",
        "detector.model",
        "describe.prompt",
        "describe.cooldown",
        "events.path",
        "redis",
        "cameras.a.source",
        "cameras.a.describe.required_zones",
        "cameras.b.source",
        "cameras.b.colour",
        "cameras.c.source",
    }
    assert len(told) == len(set(told)) == len(paths)
    refused = CliRunner().invoke(app, ["serve", "--config", str(box)])
    assert refused.exit_code == 2
    assert "cameras.a.source" in refused.stderr
    assert "cameras.b.source" not in refused.stderr, "it may come yet"


@pytest.mark.parametrize(
    "describe",
    ["required_zones: [porch]", "triggers: {zone_entry: [porch]}", "triggers: {line_crossing: [kerb]}"],
)
def test_a_zone_that_is_wrong_is_told_once(box: Path, describe: str) -> None:
    """Who names it is not told that it is missing; a name that nobody has still is."""
    places = 'zones: {porch: {coordinates: "0,0,1"}}, lines: {kerb: {coordinates: "0,0,0,0"}}'
    text = 'cameras: {a: {source: "synthetic://street", %s, describe: {%s}}}'
    box.write_text(text % (places, describe))
    once = {line.split(": ")[2] for line in config_check(box).stderr.splitlines()}
    assert once == {"cameras.a.zones.porch.coordinates", "cameras.a.lines.kerb.coordinates"}

    box.write_text(text % (places, describe.replace("[", "[nowhere, ")))
    told = config_check(box).stderr
    assert told.count("no 'nowhere' here") == len(told.splitlines()) - 2 == 1


def test_a_prompt_may_hold_json(box: Path) -> None:
    box.write_text(json.dumps({"describe": {"prompt": 'Answer {"a": 1} for {label} at {time}'}}))

    assert config_check(box).exit_code == 0


def test_the_look_loads_no_model(box: Path) -> None:
    box.write_text(
        "objects: {track: [persn]}\ndescribe: {schema: {type: integer}}\n"
        'cameras: {a: {source: "synthetic://street", describe: {schema: {enum: [yes, no]}}}}'
    )
    code = (
        f"import sys; sys.argv = ['appliance', 'config', 'check', {str(box)!r}]\n"
        "try:\n    from appliance.cli import main; main()\n"
        "except SystemExit as end:\n"
        "    print(end.code, [x for x in ('torch', 'ultralytics') if x in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "1 []"
