"""Settings as somebody writes them who comes from Frigate: other words for the same, and what is not here."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from appliance.settings_paths import Location

_VARIABLE = re.compile(r"\{((?:APPLIANCE|FRIGATE)_[A-Za-z0-9_]+)\}")

_NO_RECORDER = "nothing is recorded here"
_OWN_DECODER = "streams are read without an ffmpeg command"
_NO_MOTION = "every frame is looked at, whether something moves or not"
_PLAIN_SNAPSHOT = "an event keeps the picture that was described, as it was"
UNSUPPORTED: Mapping[str, str] = {
    "annotation_offset": _NO_RECORDER,
    "apple_compatibility": _NO_RECORDER,
    "audio": "sound is not listened to",
    "audio_transcription": "sound is not listened to",
    "auth": "use server.api_key",
    "best_image_timeout": "the frame that caused an event is its picture",
    "birdseye": "there is no such view",
    "camera_groups": "the page shows all cameras",
    "classification": "use describe.prompt to ask what something is",
    "database": "events have a file of their own: events.path",
    "detectors": "one detector serves all cameras: detector.model",
    "distances": "speeds are not measured",
    "environment_vars": "set them where the appliance is started",
    "face_recognition": "faces are not recognized",
    "ffmpeg": _OWN_DECODER,
    "ffmpeg.path": _OWN_DECODER,
    "filters": "a zone has none of its own: use objects.filters",
    "genai": "use describe",
    "global_args": _OWN_DECODER,
    "go2rtc": "give the stream's own address",
    "gpu": _OWN_DECODER,
    "hwaccel_args": _OWN_DECODER,
    "input_args": "use stream.transport for UDP",
    "live": "there is no such view",
    "logger": "the log tells what went wrong, and there is nothing to set",
    "lpr": "plates are not read",
    "max_disappeared": "a track is over after two seconds out of sight",
    "min_initialized": "use describe.min_hits",
    "model": "use detector.model",
    "motion.contour_area": _NO_MOTION,
    "motion.delta_alpha": _NO_MOTION,
    "motion.enabled": _NO_MOTION,
    "motion.frame_alpha": _NO_MOTION,
    "motion.frame_height": _NO_MOTION,
    "motion.improve_contrast": _NO_MOTION,
    "motion.lightning_threshold": _NO_MOTION,
    "motion.mqtt_off_delay": _NO_MOTION,
    "motion.skip_motion_threshold": _NO_MOTION,
    "motion.threshold": _NO_MOTION,
    "mqtt": "use outputs.mqtt",
    "networking": "use server.host and server.port",
    "notifications": "use webhooks or MQTT",
    "onvif": "cameras are not moved",
    "output_args": _OWN_DECODER,
    "profiles": "there is one set of settings; cameras may be changed over the API",
    "proxy": "use server.api_key",
    "record": _NO_RECORDER,
    "retry_interval": "it is tried again by itself, less and less often",
    "review": "use describe.required_zones",
    "semantic_search": "use /v1/events?q=",
    "snapshots.bounding_box": _PLAIN_SNAPSHOT,
    "snapshots.clean_copy": _PLAIN_SNAPSHOT,
    "snapshots.crop": "use describe.image: crop",
    "snapshots.height": "use describe.max_side",
    "snapshots.quality": _PLAIN_SNAPSHOT,
    "snapshots.required_zones": "use describe.required_zones",
    "snapshots.retain": "use events.retain_days",
    "snapshots.timestamp": _PLAIN_SNAPSHOT,
    "speed_threshold": "speeds are not measured",
    "stationary": "an object that stands still is one visit",
    "telemetry": "use /metrics",
    "timestamp_style": "nothing is written into pictures",
    "tls": "put a proxy before it that speaks TLS",
    "triggers": "use describe.triggers",
    "type": "all cameras are of one kind",
    "ui": "the page has no settings",
    "version": "settings have no version",
    "webui_url": "the page does not link to cameras",
}
"""Keys of Frigate's that mean nothing here (some with the one before), and why or what to use instead."""

_OTHER_WORDS = {"objects": "labels", "schema": "answer_schema"}
WRITTEN = {ours: written for written, ours in _OTHER_WORDS.items()}
"""Names of ours, and as they are best written."""

_SECTIONS = ("detect", "ffmpeg", "motion", "objects", "snapshots")
_TABLES = (*_SECTIONS, "describe", "filters", "lines", "privacy", "zones")
_COOLDOWNS = {"object": "cooldown_s", "camera": "camera_cooldown_s", "track": "track_cooldown_s"}


def why_unsupported(location: Sequence[object]) -> str | None:
    """Why a key that is not known means nothing, by where it stands; None if it is none of Frigate's."""
    *_, before, key = ("", *map(str, location))
    return UNSUPPORTED.get(f"{before}.{key}") or UNSUPPORTED.get(key)


def why_no_cooldown(location: Sequence[object]) -> str | None:
    """What `cooldown` takes, for a key in it that is not known; None for a key of elsewhere."""
    if not str(location[-1]).startswith("cooldown."):
        return None
    known = ", ".join(_COOLDOWNS)
    return f"unknown key; a cooldown is seconds, which count for each class by itself, or a table of {known}"


def fill_variables(value: Any, missing: dict[Location, str], location: Location = ()) -> Any:
    """`value` with every `{APPLIANCE_NAME}` or `{FRIGATE_NAME}` in its texts from the environment.

    A text with one that the environment does not have keeps it, and its place goes into `missing` with the
    name.
    """
    if isinstance(value, dict):
        return {key: fill_variables(part, missing, (*location, key)) for key, part in value.items()}
    if isinstance(value, list):
        return [fill_variables(part, missing, (*location, number)) for number, part in enumerate(value)]
    if not isinstance(value, str):
        return value
    if absent := [name for name in _VARIABLE.findall(value) if name not in os.environ]:
        missing[location] = ", ".join(absent)
    return _VARIABLE.sub(lambda match: os.environ.get(match[1], match[0]), value)


def in_our_words(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The same settings under one name for each, and what each changed path was: ours → as it was written.

    Sections that Frigate has, this has not, and that are switched off are left out, and so are empty ones.
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


def as_written(location: Location, renamed: Mapping[str, str]) -> str:
    """The path of a key as it was written, by what `in_our_words` told."""
    parts = [str(part) for part in location]
    for end in range(len(parts), 0, -1):
        if before := renamed.get(".".join(parts[:end])):
            return ".".join([before, *parts[end:]])
    return ".".join(parts)


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
        name: _without_disabled(value) if name in _SECTIONS and isinstance(value, Mapping) else value
        for name, value in section.items()
        # why: a table of which all is commented out is None
        if not (name in UNSUPPORTED and _says_nothing(value)) and not (name in _TABLES and value is None)
    }


def _says_nothing(value: Any) -> bool:
    is_off = isinstance(value, Mapping) and value.get("enabled") is False
    return is_off or value in (None, {}, [], "")
