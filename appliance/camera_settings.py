"""The settings of one camera: where its frames come from, and how they are read."""

from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from appliance.settings_part import SettingsPart, inherit
from appliance.view_settings import ViewSettings
from vision.urls import know_address


class StreamSettings(SettingsPart):
    """How a live stream is read, times in seconds.

    `transport` is that of RTSP. A stream must be open within `open_s` and give its first picture within
    `first_frame_s`; one that gives no picture for `silence_s` is opened again.
    """

    transport: Literal["tcp", "udp"] = "tcp"
    open_s: float = Field(default=10.0, gt=0, le=120)
    first_frame_s: float = Field(default=10.0, gt=0, le=120)
    silence_s: float = Field(default=5.0, gt=0, le=600)


def _known(address: str) -> str:
    # why: from here on it may be in any text that this process logs or tells.
    know_address(address)
    return address


class FfmpegInput(SettingsPart):
    """One stream of a camera, as Frigate lists them."""

    path: str = Field(min_length=1)
    roles: tuple[Literal["detect", "record", "record_sub", "audio", "rtmp"], ...] = ()

    _is_known = field_validator("path")(_known)


class FfmpegSettings(SettingsPart):
    """The streams of a camera; the one with the role `detect` is read, else the first."""

    inputs: tuple[FfmpegInput, ...]

    @field_validator("inputs")
    @classmethod
    def _check_inputs(cls, inputs: tuple[FfmpegInput, ...]) -> tuple[FfmpegInput, ...]:
        if not inputs:
            raise ValueError("one stream or more must be listed")
        return inputs


class CameraSettings(ViewSettings):
    """One camera: where its frames come from, and how many of them a second to look at (None: all).

    `source` may also be given as Frigate does, by `ffmpeg.inputs`. `fps` is short for `detect.fps` and holds
    before it. A file begins again at its end when it is to `loop`. `rotate` turns the picture clockwise, by
    degrees, for a camera that hangs sideways.
    """

    source: str = Field(min_length=1)
    ffmpeg: FfmpegSettings | None = None
    fps: float | None = Field(default=None, gt=0, le=120)
    stream: StreamSettings = StreamSettings()
    loop: bool = False
    rotate: Literal[0, 90, 180, 270] = 0

    _is_known = field_validator("source")(_known)

    @model_validator(mode="before")
    @classmethod
    def _take_source(cls, data: Any) -> Any:
        path = _detect_path(data.get("ffmpeg")) if isinstance(data, Mapping) else None
        if path is None or data.get("source") == path:
            return data
        if "source" in data:
            raise ValueError("give source or ffmpeg.inputs, not both")
        return {**data, "source": path}

    @property
    def max_fps(self) -> float | None:
        """Frames a second to look at; None for all."""
        return self.fps or self.detect.fps


_OF_LOOKING = {"friendly_name", "objects", "motion", "zones", "lines", "snapshots", "describe"}


def is_same_stream(one: CameraSettings, other: CameraSettings) -> bool:
    """Whether both read the same frames, mask them alike, and differ at most in how those are looked at."""
    return all(
        getattr(one, key) == getattr(other, key)
        for key in CameraSettings.model_fields
        if key not in _OF_LOOKING
    )


def complete(cameras: dict[str, CameraSettings], common: ViewSettings) -> dict[str, CameraSettings]:
    """The same cameras, each with what it does not say itself out of `common`.

    Raises `ValueError` with one line a problem: a name that could not stand in a path or key, coordinates or
    names that mean nothing. A line that begins with a dot goes on the path of the cameras.
    """
    complete = completed(cameras, common)
    if problems := misfits(complete):
        raise ValueError("\n".join(problems))
    return complete


def misfits(
    cameras: Mapping[str, CameraSettings], unread: Mapping[str, Collection[str]] | None = None
) -> list[str]:
    """What `complete` would raise, of cameras that are complete but for zones and lines that are `unread`."""
    missing = unread or {}
    problems = [
        f".{name}{problem}"
        for name, camera in cameras.items()
        for problem in camera.problems(missing.get(name, ()))
    ]
    problems += [
        f"camera name {name!r}: use letters, digits, '-' and '_'" for name in cameras if not _is_plain(name)
    ]
    return problems


def completed(cameras: Mapping[str, CameraSettings], common: ViewSettings) -> dict[str, CameraSettings]:
    """The same as `complete`, with whatever mistakes there are."""
    shared = {name: getattr(common, name) for name in ViewSettings.model_fields}
    return {
        name: inherit(CameraSettings.model_construct(**shared, source=camera.source), camera)
        for name, camera in cameras.items()
    }


def _is_plain(name: str) -> bool:
    return name.isascii() and name.replace("-", "").replace("_", "").isalnum()


def _detect_path(ffmpeg: Any) -> str | None:
    """The address of the stream to look at; None when there is none that could be one."""
    inputs = ffmpeg.get("inputs") if isinstance(ffmpeg, Mapping) else None
    streams = [one for one in inputs or () if isinstance(one, Mapping)] if isinstance(inputs, list) else []
    chosen = next((one for one in streams if "detect" in (one.get("roles") or ())), next(iter(streams), {}))
    path = chosen.get("path")
    return path if isinstance(path, str) and path else None
