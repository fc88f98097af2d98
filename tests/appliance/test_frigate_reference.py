"""What Frigate's reference shows of a camera, and what is left when it is pasted."""

from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.settings import Settings, SettingsError, load_settings

Load = Callable[[str], Settings]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.setenv("FRIGATE_PASSWORD", "one")

    def load(text: str) -> Settings:
        (tmp_path / "box.yaml").write_text(text)
        return load_settings(tmp_path / "box.yaml")

    return load


REFERENCE = """
mqtt: {enabled: False}
tls: {enabled: False}
detectors: {}
version: 0.17-0
cameras:
  back:
    enabled: True
    type: generic
    ffmpeg:
      path: default
      inputs:
        - path: rtsp://viewer:{FRIGATE_PASSWORD}@10.0.10.10:554/cam/realmonitor?channel=1&subtype=2
          roles: [audio, detect, record, record_sub]
          hwaccel_args: preset-vaapi
    best_image_timeout: 60
    webui_url: ""
    record: {enabled: False, continuous: {days: 0}}
    notifications: {enabled: False, cooldown: 0}
    detect: {width: 1280, height: 720, fps: 5, stationary: {interval: 50}, annotation_offset: 0}
    motion: {threshold: 30, contour_area: 10, mask: {mask1: {coordinates: "0.0,0.4,1.0,0.4,1.0,1.0"}}}
    objects: {track: [person], genai: {enabled: False, use_snapshot: False}}
    snapshots: {enabled: True, clean_copy: True, height: 175, required_zones: [], retain: {default: 10}}
    zones:
      front_steps:
        friendly_name: ""
        enabled: True
        coordinates: 0.033,0.306,0.324,0.138,0.439,0.185,0.042,0.428
        distances: 10,15,12,11
        inertia: 3
        loitering_time: 0
        speed_threshold: 2.5
        objects: [person]
        filters: {person: {min_area: 5000, max_area: 100000, threshold: 0.7}}
    mqtt: {enabled: True, timestamp: True}
    ui: {order: 0, dashboard: True}
    onvif: {host: 0.0.0.0, port: 8000}
    triggers: {coat: {type: description, data: red coat}}
    profiles: {away: {detect: {enabled: true}}}
camera_groups: {front: {cameras: [back], icon: LuCar, order: 0}}
"""
"""What Frigate's reference shows of a camera: what is off or empty is left out, the rest is named."""


def test_every_key_of_frigates_reference_works_or_is_named_as_such(load: Load) -> None:
    with pytest.raises(SettingsError) as caught:
        load(REFERENCE)
    told = [line.partition("box.yaml: ")[2] for line in str(caught.value).splitlines()]
    assert {line.partition(": ")[0].removeprefix("cameras.back.") for line in told} == {
        "version",
        "camera_groups",
        "type",
        "ffmpeg.path",
        "ffmpeg.inputs.0.hwaccel_args",
        "best_image_timeout",
        "detect.stationary",
        "detect.annotation_offset",
        "motion.threshold",
        "motion.contour_area",
        "snapshots.clean_copy",
        "snapshots.height",
        "snapshots.required_zones",
        "snapshots.retain",
        "zones.front_steps.distances",
        "zones.front_steps.speed_threshold",
        "zones.front_steps.filters",
        "mqtt",
        "ui",
        "onvif",
        "triggers",
        "profiles",
    }
    assert all("a key of Frigate's that is not supported: " in line for line in told), told


def test_a_table_of_which_all_is_commented_out_says_nothing(load: Load) -> None:
    text = """
detect: {fps: 5}
cameras:
  a:
    source: a.mp4
    detect:
    motion:
      # mask: 0,0,1,0,1,1
    zones:
    objects: {track: [person], filters: , mask: }
    describe:
"""
    camera = load(text).cameras["a"]
    assert (camera.max_fps, camera.motion.mask, camera.zones, camera.objects.filters) == (5, (), {}, {})
