"""A camera's frames in a thread of their own: the newest of a live one, all of a file, failures apart."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from appliance import reader
from appliance.reader import CameraReader, FrameRate, Patience, _Attempt
from vision.errors import SourceAuthFailed, SourceNotFound, SourceUnreadable, SourceUnsupported
from vision.sources import FrameSource
from vision.types import Frame

WAIT_S = 120.0


class Numbers:
    """A source of `num` empty frames at 10 frames/s, which then ends or fails."""

    name = "numbers"
    is_video = True
    fps = 10.0

    def __init__(self, num: int, *, is_live: bool = False, error: Exception | None = None) -> None:
        self.is_live = is_live
        self.num_frames = num
        self.is_closed = False
        self.losses: dict[str, int] = {}
        self._error = error

    def __iter__(self) -> Iterator[Frame]:
        for index in range(self.num_frames):
            yield Frame("numbers", index, index / 10, time.time(), np.zeros((2, 2, 3), np.uint8))
        if self._error:
            raise self._error

    def close(self) -> None:
        self.is_closed = True


def started(
    opener: Callable[[], FrameSource], max_fps: float | None = None, patience: Patience | None = None
) -> tuple[CameraReader, threading.Event]:
    wake = threading.Event()
    camera = CameraReader("numbers", opener, on_frame=wake.set, max_fps=max_fps, patience=patience)
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
    assert not camera.dropped
    assert source.is_closed


def test_a_live_source_gives_the_newest_and_counts_the_rest():
    """V15: the latest wins, and every drop is counted."""
    camera, _ = started(lambda: Numbers(20, is_live=True))
    until(lambda: camera.state == "ended")

    frame = camera.take()

    assert frame is not None
    assert frame.index == 19
    assert camera.dropped == {"replaced": 19}
    assert camera.is_done


def test_only_so_many_frames_a_second_are_looked_at():
    camera, wake = started(lambda: Numbers(20), max_fps=2.5)

    assert taken(camera, wake) == [0, 4, 8, 12, 16]


def test_a_source_that_fails_is_opened_again(monkeypatch):
    """V2: the failure stays with this camera, and is told without ending its thread."""
    monkeypatch.setattr(reader, "BACK_OFF_S", dict.fromkeys(reader.BACK_OFF_S, (0.05,)))
    sources = iter([Numbers(1, error=SourceUnreadable("cable pulled")), Numbers(2)])
    camera, wake = started(lambda: next(sources))
    assert wake.wait(WAIT_S)
    assert camera.take() is not None
    until(lambda: camera.state == "stalled" or camera.num_openings == 2)

    assert taken(camera, wake) == [0, 1]
    assert camera.num_openings == 2
    assert camera.error is None


def test_a_source_that_cannot_be_opened_says_so(monkeypatch):
    """Who is told to stop does not wait for the next try."""
    monkeypatch.setattr(reader, "BACK_OFF_S", dict.fromkeys(reader.BACK_OFF_S, (600.0,)))

    def opener() -> FrameSource:
        raise SourceUnreadable("no such camera")

    camera, _ = started(opener)
    until(lambda: camera.error is not None)

    assert camera.error == "no such camera"
    camera.stop(WAIT_S)
    assert not camera.is_alive


def test_a_surprise_of_a_decoder_is_a_failed_camera(caplog):
    camera, _ = started(lambda: Numbers(0, error=ZeroDivisionError("odd")))
    until(lambda: camera.error is not None)

    assert camera.error == "ZeroDivisionError: odd"
    until(lambda: "Traceback" in caplog.text)
    camera.stop()


def test_stop_ends_a_reader_that_waits_for_room():
    """V6."""
    camera, wake = started(lambda: Numbers(20))
    assert wake.wait(WAIT_S)

    camera.stop()

    assert camera.num_read <= 2


class Hanging(Numbers):
    """A live source that gives `num` frames and then does not come back from a call."""

    def __init__(self, num: int, release: threading.Event) -> None:
        super().__init__(num, is_live=True)
        self.is_hanging = threading.Event()
        self._release = release

    def __iter__(self) -> Iterator[Frame]:
        yield from super().__iter__()
        self.is_hanging.set()
        self._release.wait(WAIT_S)


@pytest.mark.parametrize("num", [0, 3])
def test_a_thread_that_hangs_is_replaced_and_never_more_than_one(num):
    """V3: beyond all deadlines of the source; V4: threads do not pile up."""
    release = threading.Event()
    first, second = Hanging(num, release), Hanging(num, release)
    opened = iter([first, second, Numbers(1, is_live=True)])
    camera, _ = started(lambda: next(opened), max_fps=100, patience=Patience(0.01, 0.01))

    assert first.is_hanging.wait(WAIT_S)
    until(lambda: (camera.watch(), camera.num_hung == 1)[1])
    assert first.is_closed
    assert second.is_hanging.wait(WAIT_S)
    for _ in range(20):
        camera.watch()
        time.sleep(0.01)
    assert camera.num_hung == 1
    assert camera.state in ({"running", "stalled"} if num else {"connecting"})

    release.set()
    until(lambda: (camera.watch(), camera.state == "ended")[1])
    camera.stop()
    until(lambda: not any("camera-numbers" in thread.name for thread in threading.enumerate()))


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (SourceAuthFailed("no"), "auth_failed"),
        (SourceNotFound("no"), "not_found"),
        (SourceUnsupported("no"), "unsupported"),
        (SourceUnreadable("no"), "connecting"),
    ],
)
def test_the_state_says_what_is_wrong(error, state):
    camera, _ = started(lambda: Numbers(0, error=error))
    until(lambda: camera.error is not None)

    assert camera.state == state
    camera.stop()
    assert camera.state == "stopped"


def test_a_camera_that_ran_is_stalled_and_tried_again_soon(monkeypatch):
    """A host that answers `not found` while it starts again is no reason to wait long."""
    waits: list[float] = []
    sources = iter([Numbers(1, is_live=True, error=SourceUnreadable("cut"))])

    def opener() -> FrameSource:
        if len(waits) == 6:
            return Numbers(1, is_live=True)
        return next(sources, None) or Numbers(0, error=SourceNotFound("not yet"))

    camera = CameraReader("numbers", opener, on_frame=lambda: None)
    monkeypatch.setattr(camera._stopping, "wait", waits.append)
    camera._state = "connecting"
    camera._attempt = attempt = _Attempt(camera._run, "numbers")
    camera._run(attempt)

    assert camera.state == "ended"
    assert len(waits) == 6
    assert max(waits) <= 2
    assert len(set(waits)) == 6


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SourceUnreadable("no"), "connecting"),
        (SourceNotFound("no"), "not_found"),
        (SourceUnsupported("no"), "unsupported"),
        (SourceAuthFailed("no"), "auth_failed"),
        (ZeroDivisionError("odd"), "unsupported"),
    ],
)
def test_it_is_tried_for_ever_with_pauses_that_grow_to_a_limit_and_differ(monkeypatch, caplog, error, kind):
    """Cameras that went with one switch do not all come back in the same moment."""
    waits: list[float] = []

    def opener() -> FrameSource:
        return Numbers(0, error=None if len(waits) == 300 else type(error)("no"))

    camera = CameraReader("numbers", opener, on_frame=lambda: None)
    monkeypatch.setattr(camera._stopping, "wait", waits.append)
    camera._state = "connecting"
    camera._attempt = attempt = _Attempt(camera._run, "numbers")
    camera._run(attempt)

    most = reader.BACK_OFF_S[kind]
    assert camera.state == "ended"
    assert len(waits) == 300
    assert len(caplog.records) == 1, "and told of once"
    # why: where no answer came, what was waited for it counts
    least = [reader.LEAST_WAIT_S if kind == "connecting" else 0.5 * limit for limit in most]
    assert all(low <= wait <= limit for wait, low, limit in zip(waits, least, most, strict=False))
    assert all(least[-1] <= wait <= most[-1] for wait in waits[len(most) :])
    assert max(waits) > 0.9 * most[-1]
    assert len(set(waits)) > 290


def test_a_silent_live_camera_is_stalled(monkeypatch):
    """V1: silence is seen before the deadline of the reader, and no frame is made up meanwhile."""
    monkeypatch.setattr(reader, "STALE_AFTER_S", 0.05)
    release = threading.Event()
    camera, _ = started(lambda: Hanging(1, release), max_fps=100)
    until(lambda: camera.state == "stalled")

    assert camera.take() is not None
    assert camera.take() is None
    release.set()
    camera.stop()


def test_what_a_source_loses_is_counted_over_its_openings(monkeypatch):
    monkeypatch.setattr(reader, "BACK_OFF_S", dict.fromkeys(reader.BACK_OFF_S, (0.01,)))
    sources = [Numbers(1, is_live=True, error=SourceUnreadable("cut")), Numbers(1, is_live=True)]
    for source in sources:
        source.losses = {"damaged": 2, "late": 1}
    opened = iter(sources)
    camera, _ = started(lambda: next(opened))
    until(lambda: camera.state == "ended")

    assert camera.dropped == {"replaced": 1, "damaged": 4, "late": 2}


def test_secrets_of_a_surprise_are_not_told():
    """A2."""
    url = "rtsp://john.doe:p@s/w?o#r:d@10.0.0.5/live"
    camera, _ = started(lambda: Numbers(0, error=OSError(f"cannot open {url}")))
    until(lambda: camera.error is not None)

    assert camera.error == "OSError: cannot open rtsp://10.0.0.5/…"
    camera.stop()


def test_frame_rate_is_that_of_the_last_seconds():
    now = 0.0
    rate = FrameRate(lambda: now)
    for i in range(41):
        now = i / 10
        rate.count()
    assert rate.fps == 10

    now += 10
    assert rate.fps == 0
