"""The settings of one camera: where its frames come from, and how they are read."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SettingsPart(BaseModel):
    """A part of the settings: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DetectSettings(SettingsPart):
    """What the detector is given: at most so many pixels and frames a second; None leaves it to the camera.

    A frame larger than `width` x `height` is made smaller and keeps its proportions.
    """

    width: int | None = Field(default=None, ge=32, le=8192)
    height: int | None = Field(default=None, ge=32, le=8192)
    fps: float | None = Field(default=None, gt=0, le=120)


class StreamSettings(SettingsPart):
    """How a live stream is read, times in seconds.

    `transport` is that of RTSP. A stream must be open within `open_s` and give its first picture within
    `first_frame_s`; one that gives no picture for `silence_s` is opened again.
    """

    transport: Literal["tcp", "udp"] = "tcp"
    open_s: float = Field(default=10.0, gt=0, le=120)
    first_frame_s: float = Field(default=10.0, gt=0, le=120)
    silence_s: float = Field(default=5.0, gt=0, le=600)


class CameraSettings(SettingsPart):
    """One camera: where its frames come from, and how many of them a second to look at (None: all).

    `fps` is short for `detect.fps`. A file begins again at its end when it is to `loop`. `rotate` turns the
    picture clockwise, by degrees, for a camera that hangs sideways.
    """

    source: str = Field(min_length=1)
    enabled: bool = True
    fps: float | None = Field(default=None, gt=0, le=120)
    detect: DetectSettings = DetectSettings()
    stream: StreamSettings = StreamSettings()
    loop: bool = False
    rotate: Literal[0, 90, 180, 270] = 0

    @property
    def max_fps(self) -> float | None:
        """Frames a second to look at; None for all."""
        return self.detect.fps or self.fps


def check_camera_names(cameras: dict[str, CameraSettings]) -> dict[str, CameraSettings]:
    """The same cameras; raises `ValueError` for a name that could not stand in a path or key."""
    for name in cameras:
        if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
            raise ValueError(f"camera name {name!r}: use letters, digits, '-' and '_'")
    return cameras
