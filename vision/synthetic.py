"""Cameras that are drawn: the scenes of `vision.scenes` as a source of frames."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from vision.errors import SourceUnsupported
from vision.scenes import PLACES, TIMES_OF_DAY, SceneStream
from vision.types import Frame
from vision.urls import split_uri


@dataclass(frozen=True)
class SyntheticConfig:
    """What a synthetic camera shows.

    Attributes:
        place: one of `vision.scenes.PLACES`.
        seed: 0 or more; the same seed gives the same frames.
        fps: frames a second.
        size: width and height in pixels.
        num_frames: length; None is endless.
        time_of_day: one of `vision.scenes.TIMES_OF_DAY`; None leaves it to the seed.
        is_live: run by the clock and lose frames when the reader is late, as a camera does.
    """

    place: str = "street"
    seed: int = 0
    fps: float = 5.0
    size: tuple[int, int] = (448, 256)
    num_frames: int | None = None
    time_of_day: str | None = None
    is_live: bool = False

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise SourceUnsupported(
                f"synthetic place {self.place!r} is not known; one of {', '.join(PLACES)} is"
            )
        if self.time_of_day not in (None, *TIMES_OF_DAY):
            raise SourceUnsupported(
                f"time={self.time_of_day} is not known; one of {', '.join(TIMES_OF_DAY)} is"
            )
        if not 0 < self.fps <= 1000 or not all(32 <= side <= 8192 for side in self.size):
            raise SourceUnsupported(
                "a synthetic camera needs fps over 0 and up to 1000, and a size from 32x32 to 8192x8192"
            )
        if self.seed < 0:
            raise SourceUnsupported("seed= of a synthetic camera must not be negative")
        if self.num_frames is not None and self.num_frames < 1:
            raise SourceUnsupported(
                "frames= of a synthetic camera must be 1 or more; leave it out for an endless one"
            )


class SyntheticSource:
    """A drawn camera; a `FrameSource` whose frame i is the same in every run.

    Args:
        config: what it shows.
        camera: the name that its frames carry.
        clock: seconds, rising; only read when live.
        sleep: waits that many seconds; only called when live.
    """

    is_video = True

    def __init__(
        self,
        config: SyntheticConfig,
        camera: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config = config
        self.name = camera
        self.is_live = config.is_live
        self.fps = config.fps
        self.num_frames = config.num_frames
        self.num_lost = 0
        self._clock = clock
        self._sleep = sleep
        self._is_closed = False

    @classmethod
    def from_uri(cls, uri: str, camera: str) -> "SyntheticSource":
        """Read ``synthetic://PLACE?seed=7&fps=5[&size=448x256][&frames=N][&time=day|dusk|night][&live=1]``.

        Raises:
            SourceUnsupported: an unknown place, option or value; the message tells which.
        """
        parts = split_uri(uri)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := sorted(set(options) - set(_OPTIONS)):
            raise SourceUnsupported(f"{uri}: unknown option {unknown[0]!r}; known are {', '.join(_OPTIONS)}")
        return cls(SyntheticConfig(place=parts.netloc or "street", **_parse(uri, options)), camera)

    @property
    def losses(self) -> Mapping[str, int]:
        """Frames of the current iteration that could not be handed on."""
        return {"late": self.num_lost}

    def __iter__(self) -> Iterator[Frame]:
        config = self.config
        scenes = SceneStream(config.place, config.seed, config.fps, config.size, config.time_of_day)
        for index in self._indices():
            image, _ = scenes.frame(index)
            yield Frame(self.name, index, index / config.fps, time.time(), image)

    def close(self) -> None:
        """End a running iteration at its next frame."""
        self._is_closed = True

    def _indices(self) -> Iterator[int]:
        self.num_lost = 0
        index, start = 0, self._clock()
        while not self._is_closed and (self.num_frames is None or index < self.num_frames):
            yield index
            index = self._next_live(index, start) if self.is_live else index + 1

    def _next_live(self, index: int, start: float) -> int:
        newest = int((self._clock() - start) * self.config.fps)
        if newest <= index:
            self._sleep(max(0.0, start + (index + 1) / self.config.fps - self._clock()))
            return index + 1
        self.num_lost += newest - index - 1
        return newest


def _parse(uri: str, options: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, text in options.items():
        field, convert = _OPTIONS[key]
        try:
            values[field] = convert(text)
        except ValueError as error:
            raise SourceUnsupported(f"{uri}: {key}={text} is not a value for {key}") from error
    return values


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    return int(width), int(height)


def _flag(text: str) -> bool:
    if text.lower() not in ("1", "true", "yes", "0", "false", "no"):
        raise ValueError(text)
    return text.lower() in ("1", "true", "yes")


_OPTIONS: dict[str, tuple[str, Callable[[str], object]]] = {
    "seed": ("seed", int),
    "fps": ("fps", float),
    "size": ("size", _size),
    "frames": ("num_frames", int),
    "time": ("time_of_day", str),
    "live": ("is_live", _flag),
}
