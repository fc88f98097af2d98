"""`replay --save`: snapshots of what was described and an annotated video, drawn when all is described.

A caption begins at the moment that it describes, which a single pass could not do: the sentence comes later.
"""

import bisect
import itertools
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import av.error

from appliance.jobs import Description
from appliance.read_files import ReadFiles
from appliance.recordings import Recording
from appliance.settings import SettingsError
from appliance.video_writer import VideoWriter
from vision.annotate import draw, encode_jpeg
from vision.pipeline import FrameResult
from vision.types import Detections, Frame

logger = logging.getLogger(__name__)

CAPTION_S = 5.0
SNAPSHOT_QUALITY = 92


@dataclass(slots=True)
class _Kept:
    """What is remembered of one recording until it is drawn."""

    detections: dict[int, Detections] = field(default_factory=dict)
    descriptions: list[Description] = field(default_factory=list)


class Saver:
    """Remembers detections and descriptions while a replay runs, and draws them afterwards.

    What is `read` is never written over, the file then has another name.
    """

    def __init__(self, folder: Path, read: ReadFiles | None = None) -> None:
        self._folder = folder
        self._read = read or ReadFiles()
        self._kept: defaultdict[str, _Kept] = defaultdict(_Kept)

    def keep(self, recording: Recording, result: FrameResult) -> None:
        """Remembers what was seen in one frame (some hundred bytes)."""
        self._kept[recording.name].detections[result.frame.index] = result.detections

    def describe(self, description: Description) -> None:
        """Remembers what was said."""
        self._kept[description.camera].descriptions.append(description)

    def save(self, recordings: Iterable[Recording]) -> None:
        """Reads the recordings again; writes `NAME-….jpg` a description and `NAME-annotated.mp4` a video.

        Raises `SettingsError` when they cannot be written, `VisionError` when a recording cannot be read.
        """
        for recording in recordings:
            if kept := self._kept.get(recording.name):
                kept.descriptions.sort(key=lambda description: description.frame_index)
                try:
                    self._save_one(recording, kept)
                except (OSError, av.error.FFmpegError) as error:
                    reason = error.strerror or error
                    raise SettingsError(f"{self._folder}: cannot be written to (--save): {reason}") from None

    def _save_one(self, recording: Recording, kept: _Kept) -> None:
        captions = Captions(kept.descriptions)
        frames = _frames(recording, last_index=max(kept.detections))
        if not recording.is_video:
            for frame in frames:
                self._save_snapshots(frame, kept)
            return
        first = next(frames)
        path = self._path(f"{recording.name}-annotated.mp4")
        with VideoWriter(path, room=captions.room(first)) as video:
            for frame in itertools.chain([first], frames):
                self._save_snapshots(frame, kept)
                if frame.index in kept.detections:
                    image = draw(frame, kept.detections[frame.index], captions.at(frame.time_s))
                    video.write(image, frame.time_s)

    def _save_snapshots(self, frame: Frame, kept: _Kept) -> None:
        for description in kept.descriptions:
            if description.frame_index == frame.index:
                image = draw(frame, kept.detections[frame.index], _caption(description))
                path = self._path(f"{frame.camera}-{frame.index:06}-{description.label}.jpg")
                path.write_bytes(encode_jpeg(image, SNAPSHOT_QUALITY))

    def _path(self, name: str) -> Path:
        # why: a model may name its classes as it likes.
        return self._read.spare(self._folder / name.replace("/", "-"))


class Captions:
    """Which sentence stands under the picture when."""

    def __init__(self, descriptions: list[Description]) -> None:
        self._descriptions = descriptions
        self._starts_s = [description.time_s for description in descriptions]

    def at(self, time_s: float) -> str | None:
        """The newest description that began in the last five seconds, or None."""
        # why: job times are rounded to milliseconds.
        number = bisect.bisect_right(self._starts_s, time_s + 0.001) - 1
        if number < 0 or time_s - self._starts_s[number] > CAPTION_S:
            return None
        return _caption(self._descriptions[number])

    def room(self, frame: Frame) -> int:
        """Pixels that the longest sentence needs under pictures of this size."""
        nothing = Detections.empty({})
        heights = [draw(frame, nothing, _caption(one)).shape[0] for one in self._descriptions]
        return max(heights, default=frame.height) - frame.height


def _caption(description: Description) -> str:
    return description.text or f"no description: {description.error}"


def _frames(recording: Recording, *, last_index: int) -> Iterator[Frame]:
    """The recording once more, no further than it was played: a synthetic camera may have no end."""
    source = recording.open()
    try:
        for frame in source:
            if frame.index > last_index:
                return
            yield frame
    finally:
        source.close()
