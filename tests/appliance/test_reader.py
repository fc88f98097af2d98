"""A camera's frames in a thread of their own: the newest of a live one, all of a file, failures apart."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from appliance import reader
from appliance.reader import CameraReader, FrameRate
from vision.errors import SourceUnreadable
from vision.sources import FrameSource
from vision.types import Frame

WAIT_S = 20.0


class Numbers:
    """A source of `num` empty frames at 10 frames/s, which then ends or fails."""

    name = "numbers"
    is_video = True
    fps = 10.0
    num_lost = 0

    def __init__(self, num: int, *, is_live: bool = False, error: Exception | None = None) -> None:
        self.is_live = is_live
        self.num_frames = num
        self.is_closed = False
        self._error = error

    def __iter__(self) -> Iterator[Frame]:
        for index in range(self.num_frames):
            yield Frame("numbers", index, index / 10, time.time(), np.zeros((2, 2, 3), np.uint8))
        if self._error:
            raise self._error

    def close(self) -> None:
        self.is_closed = True


def started(
    opener: Callable[[], FrameSource], max_fps: float | None = None
) -> tuple[CameraReader, threading.Event]:
    wake = threading.Event()
    camera = CameraReader("numbers", opener, on_frame=wake.set, max_fps=max_fps)
    camera.start()
    return camera, wake


def taken(camera: CameraReader, wake: threading.Event) -> list[int]:
    """The indices of all frames that come until the source ends."""
    indices, deadline = [], time.monotonic() + WAIT_S
    while not camera.is_done:
        assert time.monotonic() < deadline
        wake.wait(0.05)
        wake.clear()
        if frame := camera.take():
            indices.append(frame.index)
    return indices


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_recording_waits_and_gives_every_frame():
    source = Numbers(20)
    camera, wake = started(lambda: source)

    assert taken(camera, wake) == list(range(20))
    assert camera.num_dropped == 0
    assert source.is_closed


def test_a_live_source_gives_the_newest_and_counts_the_rest():
    """V15: the latest wins, and every drop is counted."""
    camera, _ = started(lambda: Numbers(20, is_live=True))
    until(lambda: camera.state == "ended")

    frame = camera.take()

    assert frame is not None
    assert frame.index == 19
    assert camera.num_dropped == 19
    assert camera.is_done


def test_only_so_many_frames_a_second_are_looked_at():
    camera, wake = started(lambda: Numbers(20), max_fps=2.5)

    assert taken(camera, wake) == [0, 4, 8, 12, 16]


def test_a_source_that_fails_is_opened_again(monkeypatch):
    """V2: the failure stays with this camera, and is told without ending its thread."""
    monkeypatch.setattr(reader, "BACK_OFF_S", (0.05,))
    sources = iter([Numbers(1, error=SourceUnreadable("cable pulled")), Numbers(2)])
    camera, wake = started(lambda: next(sources))
    assert wake.wait(WAIT_S)
    assert camera.take() is not None
    until(lambda: camera.state == "failed" or camera.num_openings == 2)

    assert taken(camera, wake) == [0, 1]
    assert camera.num_openings == 2
    assert camera.error is None


def test_a_source_that_cannot_be_opened_says_so():
    def opener() -> FrameSource:
        raise SourceUnreadable("no such camera")

    camera, _ = started(opener)
    until(lambda: camera.state == "failed")

    assert camera.error == "no such camera"
    stopped_at = time.monotonic()
    camera.stop()
    assert time.monotonic() - stopped_at < 2


def test_a_surprise_of_a_decoder_is_a_failed_camera(caplog):
    camera, _ = started(lambda: Numbers(0, error=ZeroDivisionError("odd")))
    until(lambda: camera.state == "failed")

    assert camera.error == "ZeroDivisionError: odd"
    camera.stop()


def test_stop_ends_a_reader_that_waits_for_room():
    """V6."""
    camera, wake = started(lambda: Numbers(20))
    assert wake.wait(WAIT_S)

    camera.stop()

    assert camera.num_read <= 2


def test_frame_rate_is_that_of_the_last_seconds():
    now = 0.0
    rate = FrameRate(lambda: now)
    for i in range(41):
        now = i / 10
        rate.count()
    assert rate.fps == 10

    now += 10
    assert rate.fps == 0
