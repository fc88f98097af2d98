"""How a source is read: what a camera's settings say about it."""

from dataclasses import dataclass, field
from typing import Literal

from vision.polygons import Polygon

Transport = Literal["tcp", "udp"]
"""How RTSP carries pictures."""


@dataclass(frozen=True)
class StreamConfig:
    """How a live stream is read; times in seconds.

    Attributes:
        transport: of RTSP; ``udp`` has less delay, and loses packets.
        open_s: how long each step of opening may take: connecting, and finding out what is sent.
        first_frame_s: how long the first picture may take after that.
        silence_s: how long the stream may be without a picture.
        max_fps: frames a second that are handed on; None for all.
    """

    transport: Transport = "tcp"
    open_s: float = 10.0
    first_frame_s: float = 10.0
    silence_s: float = 5.0
    max_fps: float | None = None


@dataclass(frozen=True)
class SourceOptions:
    """What `open_source` may be told.

    Attributes:
        loop: begin a recording again at its end.
        rotate: quarter turns clockwise, in degrees: 0, 90, 180 or 270.
        max_width: pixels; wider frames are made smaller and keep their proportions. After `rotate`.
        max_height: pixels, likewise.
        masks: areas that are painted black in every frame, after the rest.
        stream: for live streams.
    """

    loop: bool = False
    rotate: int = 0
    max_width: int | None = None
    max_height: int | None = None
    masks: tuple[Polygon, ...] = ()
    stream: StreamConfig = field(default_factory=StreamConfig)
