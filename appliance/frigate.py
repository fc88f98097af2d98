"""Settings as somebody writes them who comes from Frigate: other words for the same, and what is not here."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

_VARIABLE = re.compile(r"\{((?:APPLIANCE|FRIGATE)_[A-Za-z0-9_]+)\}")

_NO_RECORDER = "nothing is recorded here"
_OWN_DECODER = "streams are read without an ffmpeg command"
UNSUPPORTED: Mapping[str, str] = {
    "annotation_offset": _NO_RECORDER,
    "audio": "sound is not listened to",
    "audio_transcription": "sound is not listened to",
    "best_image_timeout": "the frame that caused an event is its picture",
    "birdseye": "there is no such view",
    "database": "events have a file of their own: events.path",
    "detectors": "one detector serves all cameras: detector.model",
    "distances": "speeds are not measured",
    "face_recognition": "faces are not recognized",
    "genai": "use describe",
    "global_args": _OWN_DECODER,
    "go2rtc": "give the stream's own address",
    "hwaccel_args": _OWN_DECODER,
    "input_args": "use stream.transport for UDP",
    "live": "there is no such view",
    "lpr": "plates are not read",
    "max_disappeared": "a track is over after two seconds out of sight",
    "min_initialized": "use describe.min_hits",
    "model": "use detector.model",
    "notifications": "use webhooks or MQTT",
    "onvif": "cameras are not moved",
    "output_args": _OWN_DECODER,
    "record": _NO_RECORDER,
    "retry_interval": "it is tried again by itself, less and less often",
    "review": "use describe.required_zones",
    "semantic_search": "use /v1/events?q=",
    "speed_threshold": "speeds are not measured",
    "stationary": "an object that stands still is one visit",
    "timestamp_style": "nothing is written into pictures",
    "ui": "the page has no settings",
    "webui_url": "the page does not link to cameras",
}
"""Keys of Frigate's that mean nothing here, and why or what to use in their place."""

_OTHER_WORDS = {"objects": "labels", "schema": "answer_schema"}
WRITTEN = {ours: written for written, ours in _OTHER_WORDS.items()}
"""Names of ours, and as they are best written."""

_COOLDOWNS = {"object": "cooldown_s", "camera": "camera_cooldown_s", "track": "track_cooldown_s"}


class MissingVariableError(ValueError):
    """A `{APPLIANCE_…}` in the settings that the environment does not have."""


def fill_variables(value: Any, environ: Mapping[str, str] = os.environ, path: str = "") -> Any:
    """`value` with every `{APPLIANCE_NAME}` or `{FRIGATE_NAME}` in its texts from the environment.

    Raises `MissingVariableError` that names the path in the settings and the variable.
    """
    if isinstance(value, dict):
        return {key: fill_variables(part, environ, f"{path}.{key}") for key, part in value.items()}
    if isinstance(value, list):
        return [fill_variables(part, environ, f"{path}.{number}") for number, part in enumerate(value)]
    if not isinstance(value, str):
        return value
    for name in _VARIABLE.findall(value):
        if name not in environ:
            raise MissingVariableError(f"{path.lstrip('.')}: the environment has no {name}")
    return _VARIABLE.sub(lambda match: environ[match[1]], value)


def in_our_words(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The same settings under one name for each, and what each changed path was: ours → as it was written.

    Sections that Frigate has, this has not, and that are switched off are left out.
    """
    renamed: dict[str, str] = {}
    data = dict(data)
    if isinstance(data.get("describe"), Mapping):
        data["describe"] = _describe(data["describe"], "describe", renamed)
    if isinstance(data.get("cameras"), Mapping):
        data["cameras"] = {
            name: _camera(camera, f"cameras.{name}", renamed) if isinstance(camera, Mapping) else camera
            for name, camera in data["cameras"].items()
        }
    return _without_disabled(data), renamed


def in_written_words(camera: Mapping[str, Any]) -> dict[str, Any]:
    """A camera's settings under the names that are best written: what `in_our_words` reads."""
    describe = dict(camera["describe"])
    cooldown = {what: describe.pop(ours) for what, ours in _COOLDOWNS.items()}
    written = {WRITTEN.get(name, name): value for name, value in describe.items()}
    return {**camera, "describe": {**written, "cooldown": cooldown}}


def _camera(camera: Mapping[str, Any], path: str, renamed: dict[str, str]) -> dict[str, Any]:
    camera = _without_disabled(camera)
    if isinstance(camera.get("describe"), Mapping):
        camera["describe"] = _describe(camera["describe"], f"{path}.describe", renamed)
    return camera


def _describe(section: Mapping[str, Any], path: str, renamed: dict[str, str]) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    for name, value in section.items():
        for our_name, part, written in _our_keys(str(name), value):
            renamed[f"{path}.{our_name}"] = f"{path}.{written}"
            ours[our_name] = part
    return ours


def _our_keys(name: str, value: Any) -> Iterator[tuple[str, Any, str]]:
    if name == "cooldown" and isinstance(value, Mapping):
        for what, seconds in value.items():
            yield _COOLDOWNS.get(str(what), f"cooldown.{what}"), seconds, f"cooldown.{what}"
    elif name == "cooldown":
        yield "cooldown_s", value, name
    else:
        yield _OTHER_WORDS.get(name, name), value, name


def _without_disabled(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in section.items()
        if name not in UNSUPPORTED or value not in (None, {}, {"enabled": False})
    }
