"""`replay --save`: a snapshot as soon as it is described, and an annotated video when all of its source is.

A caption begins at the moment that it describes, which a single pass could not do: the sentence comes later.
So a recording is read once more for its video, in a thread of its own beside those that are still played.
"""

import asyncio
import bisect
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import av.error
import cv2
import numpy as np

from appliance.jobs import Description
from appliance.output import counted
from appliance.read_files import ReadFiles
from appliance.recordings import Recording
from appliance.settings import SettingsError
from appliance.video_writer import VideoWriter
from vision.annotate import draw, encode_jpeg
from vision.errors import VisionError
from vision.pipeline import FrameResult
from vision.types import Detections, Frame

logger = logging.getLogger(__name__)

CAPTION_S = 5.0
SNAPSHOT_QUALITY = 92
KEPT_QUALITY = 97
LOOK_EVERY_S = 0.1
TELL_EVERY_S = 5.0


@dataclass(slots=True)
class _Kept:
    """What is remembered of one recording until it is drawn; `pictures` only until they are described."""

    recording: Recording
    detections: dict[int, Detections] = field(default_factory=dict)
    pictures: dict[int, tuple[bytes, Detections]] = field(default_factory=dict)
    descriptions: list[Description] = field(default_factory=list)
    num_jobs: int | None = None
    is_taken: bool = False

    @property
    def is_done(self) -> bool:
        """Whether it was played to its end, and all of it is described."""
        return self.num_jobs is not None and len(self.descriptions) >= self.num_jobs


class Saver:
    """Writes `NAME-….jpg` a description, and `NAME-annotated.mp4` a video when all of it is described.

    `keep` and `end` are for the player's thread, `describe` for the one that hears of descriptions. Leaving
    it finishes what is begun: videos end with the last frame that was seen, and what was saved is said. What
    is `read` is never written over, the file then has another name.
    """

    def __init__(
        self, folder: Path, read: ReadFiles | None = None, say: Callable[[str], None] = logger.info
    ) -> None:
        self.num_failed = 0
        self._folder = folder
        self._read = read or ReadFiles()
        self._say = say
        self._kept: dict[str, _Kept] = {}
        self._num_snapshots = 0
        self._num_videos = 0
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._is_hurried = threading.Event()
        self._ready: SimpleQueue[_Kept | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_all()
        if isinstance(error, KeyboardInterrupt):
            self._is_hurried.set()
        elif error is not None and self._thread.is_alive() and any(kept.detections for kept in self._all()):
            self._say("finishing the videos of what was seen; Ctrl-C ends them where they are")
        try:
            self._thread.join()
        finally:
            self._is_hurried.set()
            self._thread.join()
            if self._kept:
                saved = f"{counted(self._num_snapshots, 'snapshot')}, {counted(self._num_videos, 'video')}"
                self._say(f"saved in {self._folder}: {saved}")
        if error is None:
            self._check()

    def keep(self, recording: Recording, result: FrameResult) -> None:
        """Remembers what was seen in one frame (some hundred bytes; a JPEG if it is to be described)."""
        with self._lock:
            kept = self._kept.setdefault(recording.name, _Kept(recording))
        index = result.frame.index
        if recording.is_video:
            kept.detections[index] = result.detections
        if result.observation is not None:
            kept.pictures[index] = encode_jpeg(result.frame.image, KEPT_QUALITY), result.detections

    def end(self, recording: Recording, num_jobs: int) -> None:
        """A recording was played to its end; so many jobs of it are described, or will be."""
        if kept := self._kept.get(recording.name):
            kept.num_jobs = num_jobs
            self._take(kept)

    def describe(self, description: Description) -> None:
        """Writes the snapshot of what was said; raises `SettingsError` when it cannot."""
        kept = self._kept[description.camera]
        picture = kept.pictures.pop(description.frame_index, None)
        if picture is not None:
            with self._readable_errors():
                self._save_snapshot(description, *picture)
        kept.descriptions.append(description)
        self._take(kept)

    async def watch(self) -> None:
        """Raises `SettingsError` as soon as something cannot be written."""
        while True:
            self._check()
            await asyncio.sleep(LOOK_EVERY_S)

    async def wait(self) -> None:
        """Draws all that is left and waits for it; nothing more may come."""
        self._take_all()
        while self._thread.is_alive():
            await asyncio.sleep(LOOK_EVERY_S)
        self._check()

    def _all(self) -> list[_Kept]:
        with self._lock:
            return list(self._kept.values())

    def _take(self, kept: _Kept, *, is_last: bool = False) -> None:
        with self._lock:
            if kept.is_taken or not (is_last or kept.is_done):
                return
            kept.is_taken = True
        self._ready.put(kept)

    def _take_all(self) -> None:
        for kept in self._all():
            self._take(kept, is_last=True)
        self._ready.put(None)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for kept in iter(self._ready.get, None):
                self._draw(kept)
        except Exception as error:
            # why: whoever waits for this thread tells it.
            self._error = error

    def _draw(self, kept: _Kept) -> None:
        if not kept.detections or self._is_hurried.is_set():
            return
        try:
            with self._readable_errors():
                self._save_video(kept)
        except VisionError as error:
            logger.error("%s", error)
            self.num_failed += 1
        kept.detections.clear()

    def _save_video(self, kept: _Kept) -> None:
        captions = Captions(sorted(kept.descriptions, key=lambda description: description.frame_index))
        last_index, told_s = max(kept.detections), time.monotonic()
        with contextlib.closing(_frames(kept.recording, last_index=last_index)) as frames:
            if (first := next(frames, None)) is None:
                return
            path, num_frames = self._path(f"{kept.recording.name}-annotated.mp4"), 0
            with VideoWriter(path, room=captions.room(first)) as video:
                for frame in itertools.chain([first], frames):
                    if frame.index in kept.detections:
                        image = draw(frame, kept.detections[frame.index], captions.at(frame.time_s))
                        video.write(image, frame.time_s)
                        num_frames += 1
                    if time.monotonic() - told_s > TELL_EVERY_S:
                        told_s = time.monotonic()
                        self._say(f"saving {path}: frame {frame.index + 1} of {last_index + 1}")
                    if self._is_hurried.is_set():
                        break
        self._num_videos += 1
        self._say(f"saved {path}: {counted(num_frames, 'frame')}")

    def _save_snapshot(self, description: Description, jpeg: bytes, detections: Detections) -> None:
        image = np.asarray(cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR), np.uint8)
        frame = Frame(description.camera, description.frame_index, description.time_s, 0.0, image)
        path = self._path(f"{frame.camera}-{frame.index:06}-{description.label}.jpg")
        path.write_bytes(encode_jpeg(draw(frame, detections, _caption(description)), SNAPSHOT_QUALITY))
        self._num_snapshots += 1

    def _path(self, name: str) -> Path:
        # why: a model may name its classes as it likes.
        return self._read.spare(self._folder / name.replace("/", "-"))

    @contextlib.contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, av.error.FFmpegError) as error:
            reason = error.strerror or error
            raise SettingsError(f"{self._folder}: cannot be written to (--save): {reason}") from None


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


def _frames(recording: Recording, *, last_index: int) -> Generator[Frame]:
    """The recording once more, no further than it was played; raises a `vision.errors.SourceError`."""
    source = recording.open()
    try:
        for frame in source:
            yield frame
            if frame.index >= last_index:
                return
    finally:
        source.close()
