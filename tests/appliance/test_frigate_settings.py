"""Settings in Frigate's words: what is pasted works, or each key that does not is named."""

from pathlib import Path

import numpy as np
import pytest

from appliance.settings import Settings, SettingsError, load_settings, to_json
from appliance.viewing import camera_config, privacy_masks
from vision.detector import Detector
from vision.types import Detections

PASTED = """
cameras:
  front_door:
    enabled: true
    friendly_name: Front door
    ffmpeg:
      inputs:
        - path: rtsp://user:{FRIGATE_PASSWORD}@10.0.0.1/main
          roles: [record]
        - path: rtsp://user:{APPLIANCE_PASSWORD}@10.0.0.1/sub
          roles: [detect, audio]
    record: {enabled: false}
    detect: {enabled: true, width: 1280, height: 720, fps: 5}
    objects:
      track: [person, car]
      filters:
        person:
          min_area: 5000
          max_area: 100000
          min_ratio: 0.5
          max_ratio: 2.0
          min_score: 0.5
          threshold: 0.7
        car:
          mask:
            sky: {friendly_name: Sky, enabled: true, coordinates: "0.000,0.000,1.000,0.000,1.000,0.278"}
            gone: {enabled: false, coordinates: "0,0,1,0,1,1"}
      mask: "0,0,1280,0,1280,72,0,72"
    motion:
      mask:
        - 0.1,0.1,0.2,0.1,0.2,0.2
        - 640,0,1280,0,1280,360
    snapshots: {enabled: true}
    zones:
      porch:
        coordinates: 0,720,640,720,640,360,0,360
        objects: person
        inertia: 2
        loitering_time: 4
      street: {coordinates: ["0.5,0.5", "1,0.5", "1,1"]}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("FRIGATE_PASSWORD", "one")
    monkeypatch.setenv("APPLIANCE_PASSWORD", "two")

    def load(text: str) -> Settings:
        (tmp_path / "box.yaml").write_text(text)
        return load_settings(tmp_path / "box.yaml")

    return load


def problems(write, text: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        write(text)
    return [line.partition("box.yaml: ")[2] for line in str(caught.value).splitlines()]


@pytest.fixture(scope="module")
def detector() -> Detector:
    return Detector(load_settings(None, {"detector": {"device": "cpu", "imgsz": 320}}).detector)


def test_a_pasted_camera_is_understood(write, detector) -> None:
    settings = write(PASTED)
    camera = settings.cameras["front_door"]
    assert camera.source == "rtsp://user:two@10.0.0.1/sub"
    assert (camera.max_fps, camera.detect.width, camera.friendly_name) == (5, 1280, "Front door")

    config = camera_config(settings, detector, "front_door", frame_rate=5)

    assert config.filters.track == config.trigger.labels == ("person", "car")
    person, car = config.filters.filters["person"], config.filters.filters["car"]
    assert (person.min_area, person.max_ratio, person.min_score) == (5000 / (1280 * 720), 2.0, 0.5)
    assert config.trigger.thresholds == {"person": 0.7}
    assert [mask.points for mask in car.masks] == [((0, 0), (1, 0), (1, 0.278))]
    assert config.filters.masks[0].points == ((0, 0), (1, 0), (1, 0.1), (0, 0.1))
    assert [len(mask.points) for mask in config.trigger.motion_masks] == [3, 3]
    porch, street = config.trigger.zones
    assert porch.polygon.points == ((0, 1), (0.5, 1), (0.5, 0.5), (0, 0.5))
    assert (porch.labels, porch.inertia, porch.loitering_s) == (("person",), 2, 4)
    assert street.polygon.points == ((0.5, 0.5), (1, 0.5), (1, 1))
    assert Settings.model_validate_json(to_json(settings)) == settings


def test_each_key_that_is_not_supported_is_named(write) -> None:
    text = """
detectors: {coral: {type: edgetpu}}
cameras:
  front:
    source: a.mp4
    detect: {max_disappeared: 25, stationary: {interval: 50}}
    ffmpeg: {hwaccel_args: preset-vaapi, inputs: [{path: a.mp4, input_args: preset-rtsp-restream}]}
    record: {enabled: true}
    birdseye: {enabled: false}
    zones: {porch: {coordinates: "0,0,1,0,1,1", distances: "1,2,3,4"}}
    objects: {genai: {enabled: true}}
"""
    assert sorted(line.split(":")[0] for line in problems(write, text)) == [
        "cameras.front.detect.max_disappeared",
        "cameras.front.detect.stationary",
        "cameras.front.ffmpeg.hwaccel_args",
        "cameras.front.ffmpeg.inputs.0.input_args",
        "cameras.front.objects.genai",
        "cameras.front.record",
        "cameras.front.zones.porch.distances",
        "detectors",
    ]
    assert all("a key of Frigate's that is not supported" in line for line in problems(write, text))


def test_what_a_camera_does_not_say_holds_for_all(write) -> None:
    settings = write("""
detect: {fps: 5, width: 640}
objects: {track: [person], filters: {person: {min_area: 100, threshold: 0.7}}}
describe: {prompt: 'Who?', cooldown: 3, triggers: {dwell: 9}, object_prompts: {car: 'Whose?'}}
cameras:
  one: {source: a.mp4}
  two:
    source: b.mp4
    detect: {fps: 2}
    objects: {track: [car], filters: {person: {min_area: 200}, car: {min_ratio: 1}}}
    describe: {cooldown: {object: 5, track: 60}, triggers: {new_track: false}, object_prompts: {dog: 'Eh?'}}
""")
    one, two = settings.cameras["one"], settings.cameras["two"]
    assert (one.detect.fps, two.detect.fps, two.detect.width) == (5, 2, 640)
    assert (one.objects.track, two.objects.track) == (("person",), ("car",))
    person = two.objects.filters["person"]
    assert (person.min_area, person.threshold, set(two.objects.filters)) == (200, 0.7, {"person", "car"})
    assert (one.describe.cooldown_s, two.describe.cooldown_s, two.describe.track_cooldown_s) == (3, 5, 60)
    assert (two.describe.prompt, two.describe.object_prompts) == ("Who?", {"car": "Whose?", "dog": "Eh?"})
    assert (one.describe.triggers.new_track, two.describe.triggers.new_track) == (True, False)
    assert two.describe.triggers.dwell is not None
    assert settings.view_of("any").detect.fps == 5
    assert Settings.model_validate_json(to_json(settings)) == settings


def test_a_list_of_triggers_means_these_only(write) -> None:
    settings = write("""
describe: {triggers: {dwell: {seconds: 5}}}
cameras: {one: {source: a.mp4, describe: {triggers: [zone_entry]}, zones: {z: {coordinates: "0,0,1,0,1,1"}}}}
""")
    triggers = settings.cameras["one"].describe.triggers
    assert (triggers.new_track, triggers.zone_entry, triggers.dwell) == (False, True, None)
    (line,) = problems(write, "describe: {triggers: [dwell]}")
    assert line.startswith(
        "describe.triggers: a list of triggers may name new_track, zone_entry, line_crossing"
    )


@pytest.mark.parametrize(
    ("camera", "expected"),
    [
        ("zones: {z: {coordinates: '0,0,1'}}", ".zones.z.coordinates: coordinates must be pairs"),
        ("zones: {z: {coordinates: '0,0,1,1'}}", ".zones.z.coordinates: coordinates must be of 3 points"),
        (
            "zones: {z: {coordinates: 'a,b,c,d'}}",
            ".zones.z.coordinates: coordinates must be numbers, not 'a'",
        ),
        ("zones: {z: {}}", ".zones.z.coordinates: is missing"),
        ("zones: {1: {coordinates: '0,0,1,0,1,1'}}", ".zones: the name 1 is no text: put it in quotes"),
        (
            "objects: {filters: {car: {min_area: 500, max_area: 100}, dog: {min_area: 0.5, max_area: 100}}}",
            ".objects.filters.car.min_area: 500 is above max_area, 100, so nothing passes",
        ),
        ("objects: {filters: {car: {min_ratio: 3, max_ratio: 1}}}", ".objects.filters.car.min_ratio: 3 is"),
        (
            "zones: {z: {coordinates: '0.1,0.2,0.9,0.2,0.9,1.02'}}",
            ".zones.z.coordinates: coordinates must all be from 0 to 1, or all be pixels, not 0.1 and 1.02",
        ),
        (
            "zones: {z: {coordinates: '0.1,0.1,0.2,0.2,0.3,0.3,0.7,0.7'}}",
            ".zones.z.coordinates: coordinates must be around an area",
        ),
        ("privacy: {mask: '0.5,0.5,0.5,0.5,0.5,0.5'}", ".privacy.mask.0: coordinates must be around an area"),
        ("zones: {z: {coordinates: '.nan,0,1,0,1,1'}}", ".zones.z.coordinates: coordinates must be"),
        ("zones: {z: {coordinates: '0,0,9,0,9,9'}}", ".zones.z.coordinates: in pixels, so detect.width"),
        (
            "detect: {width: 640, height: 360}, privacy: {mask: '0,0,640,0,640,361'}",
            ".privacy.mask: a point lies outside of detect.width x detect.height, 640x360",
        ),
        ("describe: {required_zones: [a]}", ".describe.required_zones: no 'a' here; there is none"),
        ("describe: {triggers: {zone_entry: [a]}}", ".describe.triggers.zone_entry: no 'a' here"),
        ("describe: {cooldown: soon}", ".describe.cooldown: Input should be a valid number"),
        (
            "describe: {cooldown: {dog: 3}}",
            ".describe.cooldown.dog: unknown key; a cooldown is seconds, which count for each class by "
            "itself, or a table of object, camera, track",
        ),
        ("describe: {objects: 5}", ".describe.objects: Input should be a valid tuple"),
        ("describe: {concurrency: 5}", ".describe.concurrency: unknown key; allowed here: camera_cooldown_s"),
        ("detect: {enabled: false}", ".detect.enabled: detection cannot be switched off alone"),
        ("objects: {mask: {a: {coordinate: 1}}}", ".objects.mask: mask 'a': coordinates are missing"),
        ("ffmpeg: {inputs: [{path: b.mp4}]}", ": give source or ffmpeg.inputs, not both"),
    ],
)
def test_what_is_wrong_is_told_with_its_path(write, camera: str, expected: str) -> None:
    (line,) = problems(write, f"cameras: {{front: {{source: a.mp4, {camera}}}}}")
    assert line.startswith(f"cameras.front{expected}")


def test_a_stream_without_an_address_is_an_error(write) -> None:
    assert problems(write, "cameras: {front: {ffmpeg: {inputs: []}}}") == [
        "cameras.front.source: is missing and has no default",
        "cameras.front.ffmpeg.inputs: one stream or more must be listed",
    ]


def test_a_variable_that_is_not_set_is_named(write) -> None:
    text = "cameras: {front: {source: 'rtsp://a:{APPLIANCE_NO_SUCH}@b'}}"
    assert problems(write, text) == ["cameras.front.source: the environment has no APPLIANCE_NO_SUCH"]


def test_variables_that_are_not_set_are_told_with_all_else(write) -> None:
    """Once each, whatever is wrong beside them, and none of what is left out."""
    text = """
mqtt: {host: broker, password: "{FRIGATE_NO_MQTT}"}
onvif: {enabled: false, password: "{FRIGATE_NO_ONVIF}"}
server: {port: "{APPLIANCE_NO_PORT}"}
cameras:
  front:
    ffmpeg: {inputs: [{path: "rtsp://{FRIGATE_NO_USER}:{FRIGATE_NO_WORD}@b/x", roles: [detect]}]}
    colour: red
  back: {source: a.mp4, describe: {objects: ["{APPLIANCE_NO_CLASS}"], required_zones: [porch]}}
"""
    told = problems(write, text)

    assert told[:4] == [
        "mqtt.password: the environment has no FRIGATE_NO_MQTT",
        "server.port: the environment has no APPLIANCE_NO_PORT",
        "cameras.front.ffmpeg.inputs.0.path: the environment has no FRIGATE_NO_USER, FRIGATE_NO_WORD",
        "cameras.back.describe.objects.0: the environment has no APPLIANCE_NO_CLASS",
    ]
    others = [line.split(": ")[0] for line in told[4:]]
    assert sorted(others) == ["cameras.back.describe.required_zones", "cameras.front.colour", "mqtt"]


def test_both_names_of_a_setting_are_one(write, monkeypatch) -> None:
    """The environment wins over the file, and options win over both, whichever name they use."""
    text = "describe: {objects: [person], cooldown: 3}"
    assert write(text).describe.labels == ("person",)
    monkeypatch.setenv("APPLIANCE_DESCRIBE__LABELS", "car")
    monkeypatch.setenv("APPLIANCE_DESCRIBE__COOLDOWN", "4")
    assert (write(text).describe.labels, write(text).describe.cooldown_s) == (("car",), 4)


def test_a_schema_is_inherited_as_a_whole(write) -> None:
    settings = write("""
describe: {schema: {type: object, properties: {what: {type: string}}}}
cameras:
  one: {source: a.mp4}
  two: {source: a.mp4, describe: {schema: {enum: [yes, no]}}}
""")
    one, two = (settings.cameras[name].describe.answer_schema for name in ("one", "two"))
    assert one == {"type": "object", "properties": {"what": {"type": "string"}}}
    assert two == {"enum": [True, False]}


def test_a_privacy_mask_is_found(write) -> None:
    settings = write("cameras: {a: {source: a.mp4, privacy: {mask: ['0,0,0.5,0,0.5,0.5']}}}")
    (mask,) = privacy_masks(settings.view_of("a"))
    assert mask.points == ((0, 0), (0.5, 0), (0.5, 0.5))
    assert privacy_masks(settings.view_of("b")) == ()


def test_a_schema_that_cannot_be_kept_to_is_said_at_once(write) -> None:
    with pytest.raises(
        SettingsError, match=r"cameras\.gate\.describe\.schema: the schema cannot be compiled: "
    ):
        load_settings(write("cameras: {gate: {source: a.mp4, describe: {schema: {type: 12}}}}"))


def test_a_camera_s_own_fps_holds_before_what_holds_for_all(write) -> None:
    text = "detect: {fps: 5}\ncameras: {slow: {source: a.mp4, fps: 2}, usual: {source: b.mp4}}\n"
    cameras = write(text).cameras
    assert (cameras["slow"].max_fps, cameras["usual"].max_fps) == (2, 5)


def test_where_nothing_is_tracked_nothing_is_found(write, detector) -> None:
    """As in Frigate; classes to describe that are not tracked do not mean all classes either."""
    text = """
cameras:
  none: {source: a.mp4, objects: {track: []}}
  all: {source: a.mp4, describe: {labels: []}}
  other: {source: a.mp4, objects: {track: [person]}, describe: {objects: [car]}}
"""
    settings = write(text)
    none, all_, other = (camera_config(settings, detector, n, frame_rate=5) for n in ("none", "all", "other"))
    assert (none.filters.track, none.trigger.labels) == ((), ())
    assert (all_.filters.track, all_.trigger.labels) == (None, None)
    assert (other.filters.track, other.trigger.labels) == (("person",), ())


@pytest.mark.parametrize("scale", [1, 0.5, 2])
def test_areas_are_pixels_of_the_size_that_is_named(write, detector, scale) -> None:
    """As coordinates are: a stream of another size is looked at alike."""
    text = """
cameras:
  front:
    source: a.mp4
    detect: {width: 1280, height: 720}
    objects: {filters: {person: {min_area: 5000, max_area: 24000000}, car: {max_area: 5000}}}
"""
    filters = camera_config(write(text), detector, "front", frame_rate=5).filters
    size = (round(720 * scale), round(1280 * scale), 3)
    boxes = np.array([[100, 100, 160, 180], [100, 100, 180, 180]] * 2, np.float32) * scale
    found = Detections(boxes, np.ones(4, np.float32), np.array([0, 0, 2, 2]), {0: "person", 2: "car"})
    kept = filters.apply(found, np.zeros(size, np.uint8))
    assert (kept.boxes == boxes[[1, 2]]).all()


@pytest.mark.parametrize(
    ("describe", "path"),
    [
        ("required_zones: [porch]", "required_zones"),
        ("triggers: {zone_entry: [porch]}", "triggers.zone_entry"),
        ("triggers: {dwell: {seconds: 3, zones: [porch]}}", "triggers.dwell.zones"),
    ],
)
def test_zones_that_are_switched_off_are_no_reason_for_anything(write, describe, path) -> None:
    text = """
cameras:
  front:
    source: a.mp4
    zones: {porch: {coordinates: "0,0,1,0,1,1", enabled: false}, street: {coordinates: "0,0,1,0,1,1"}}
    describe: {%s}
"""
    (problem,) = problems(write, text % describe)
    assert problem.startswith(f"cameras.front.describe.{path}: all of porch are switched off")
    assert write(text % describe.replace("[porch]", "[porch, street]")).cameras


def test_a_key_twice_is_one_too_many(write) -> None:
    (problem,) = problems(write, "cameras:\n  gate: {source: a.mp4}\n  gate: {source: b.mp4}\n")
    assert "the key 'gate' of line 2 stands again in line 3" in problem
    (problem,) = problems(write, "cameras: {gate: {source: a.mp4, source: b.mp4}}\n")
    assert "the key 'source' of line 1 stands again in line 1" in problem
    merged = "x: &usual {source: a.mp4, fps: 2}\ncameras: {gate: {<<: *usual, fps: 3}}\n"
    (problem,) = problems(write, merged)
    assert problem.startswith("x: unknown key")
