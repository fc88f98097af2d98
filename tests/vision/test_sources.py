"""`open_source`: which kind, at which pace, and what it says when there is nothing."""

import os
import threading
import time
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from tests.vision.videos import corner, write_video
from vision.errors import SourceError, SourceNotFound, SourceUnsupported
from vision.options import SourceOptions
from vision.shape import FrameShape
from vision.sources import FrameSource, PacedSource, open_source
from vision.stills import Stills
from vision.synthetic import SyntheticConfig, SyntheticSource
from vision.video_file import VideoFile


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


def test_the_kind_follows_from_the_address(tmp_path: Path) -> None:
    video = write_video(tmp_path / "v.mp4", [corner(64, 48)] * 2)
    Pillow.new("L", (8, 8)).save(tmp_path / "p.png")
    kinds = {
        str(video): VideoFile,
        video.as_uri(): VideoFile,
        str(tmp_path / "p.png"): Stills,
        str(tmp_path): Stills,
        "synthetic://street?seed=1": SyntheticSource,
    }
    for uri, kind in kinds.items():
        source = open_source(uri, camera="a")
        assert isinstance(source, kind)
        assert isinstance(source, FrameSource)
        assert source.name == "a"
    assert isinstance(open_source(video, camera="a", realtime=True), PacedSource)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match=r"nowhere\.mp4: check the path$"):
        open_source(tmp_path / "nowhere.mp4", camera="gate")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["v.mp4", "p.jpg"])
def test_what_is_no_file_holds_nobody(tmp_path: Path, name: str) -> None:
    """V3: a pipe into which nobody writes holds whoever opens it for ever."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(SourceUnsupported, match="is a pipe"):
        open_source(tmp_path / name, camera="gate")


def test_an_unknown_scheme_keeps_the_password_to_itself() -> None:
    with pytest.raises(SourceUnsupported, match="gopher://") as caught:
        open_source("gopher://admin:hunter2@cam.example/live", camera="gate")
    assert "hunter2" not in str(caught.value)
    assert "admin" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("synthetic://moon", "moon.*street, park, yard, room"),
        ("synthetic://street?sede=1", "'sede'.*seed, fps"),
        ("synthetic://street?seed=x", "seed=x"),
        ("synthetic://street?seed=-1", "negative"),
        ("synthetic://street?fps=0", "fps over 0"),
        ("synthetic://street?fps=nan", "fps over 0"),
        ("synthetic://street?size=9x9", "32x32"),
        ("synthetic://street?size=448", "size=448"),
        ("synthetic://street?frames=0", "frames="),
        ("synthetic://street?time=noon", "noon.*day, dusk, night"),
        ("synthetic://street?live=maybe", "live=maybe"),
    ],
)
def test_bad_synthetic_addresses_say_what_is_known(uri: str, says: str) -> None:
    with pytest.raises(SourceUnsupported, match=says):
        open_source(uri, camera="a")


def test_synthetic_frames_repeat() -> None:
    uri = "synthetic://park?seed=3&fps=4&size=96x64&frames=6&time=night"
    first, second = (list(open_source(uri, camera="a")) for _ in range(2))
    assert len(first) == 6
    assert [frame.time_s for frame in first] == [i / 4 for i in range(6)]
    assert first[0].image.shape == (64, 96, 3)
    assert all(np.array_equal(a.image, b.image) for a, b in zip(first, second, strict=True))
    other = next(iter(open_source(uri.replace("seed=3", "seed=4"), camera="a")))
    assert not np.array_equal(first[0].image, other.image)


def test_a_synthetic_camera_is_endless_until_it_is_closed() -> None:
    source = open_source("synthetic://yard?size=32x32", camera="a")
    assert source.num_frames is None
    frames = iter(source)
    assert [next(frames).index for _ in range(3)] == [0, 1, 2]
    source.close()
    assert list(frames) == []


def test_live_frames_that_come_too_late_are_lost_and_counted() -> None:
    """V15, in short: the latest frame wins."""
    time_ = Time()
    config = SyntheticConfig(fps=10, size=(32, 32), num_frames=100, is_live=True)
    source = SyntheticSource(config, "a", time_.clock, time_.sleep)
    frames = iter(source)
    indices = [next(frames).index]
    for work_s in (0.0, 0.02, 0.55, 0.0, 0.31):
        time_.now += work_s
        indices.append(next(frames).index)
    assert indices == [0, 1, 2, 7, 8, 11]
    assert source.num_lost == 6
    assert time_.now == pytest.approx(101.1, abs=0.1)


def test_pacing_follows_the_time_stamps(tmp_path: Path) -> None:
    """V22: every frame comes, with the same times, at 1× as at full speed; only later."""
    times = [0.0, 0.1, 0.5, 2.0]
    path = write_video(tmp_path / "v.mp4", [corner(64, 48)] * 4, times_s=times)
    time_ = Time()
    paced = PacedSource(VideoFile(path, "a"), time_.clock, time_.sleep)
    came = [(time_.now - 100, frame.index, frame.time_s) for frame in paced]
    assert [at for at, _, _ in came] == pytest.approx(times, abs=1e-3)
    assert [item[1:] for item in came] == [(frame.index, frame.time_s) for frame in VideoFile(path, "a")]


def test_a_hole_in_the_time_stamps_is_not_waited_for(tmp_path: Path) -> None:
    """V11, for files: two recordings joined whose clocks are a day apart; the times stay what they are."""
    path = write_video(tmp_path / "v.mkv", [corner(64, 48)] * 4, times_s=[0.0, 0.1, 86_400.0, 86_400.5])
    time_ = Time()
    paced = PacedSource(VideoFile(path, "a"), time_.clock, time_.sleep)
    came = [(time_.now - 100, frame.time_s) for frame in paced]
    assert [at for at, _ in came] == pytest.approx([0, 0.1, 60.1, 60.6], abs=1e-3)
    assert [time_s for _, time_s in came] == pytest.approx([0.0, 0.1, 86_400.0, 86_400.5], abs=1e-3)


def test_a_late_reader_loses_no_frame_of_a_recording(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", [corner(64, 48)] * 4)
    time_ = Time()
    indices = []
    for frame in PacedSource(VideoFile(path, "a"), time_.clock, time_.sleep):
        indices.append(frame.index)
        time_.now += 1.0
    assert indices == [0, 1, 2, 3]
    assert time_.now == pytest.approx(104.0)


def test_realtime_is_real(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", [corner(64, 48)] * 4)
    started, started_at = time.monotonic(), time.time()
    frames = list(open_source(path, camera="a", realtime=True))
    assert time.monotonic() - started >= 0.3
    assert all(frame.captured_at >= started_at + frame.time_s - 0.05 for frame in frames)


def test_every_source_error_is_one_to_catch(tmp_path: Path) -> None:
    (tmp_path / "v.mp4").write_bytes(b"nothing")
    for uri in (tmp_path / "v.mp4", tmp_path / "no", "synthetic://moon", "ftp://x"):
        with pytest.raises(SourceError):
            open_source(uri, camera="a")


def test_a_looped_recording_goes_on_with_numbers_and_times(tmp_path: Path) -> None:
    video = write_video(tmp_path / "v.mp4", [corner(64, 48)] * 4)
    source = open_source(video, camera="a", options=SourceOptions(loop=True))
    frames = list(islice(source, 10))
    source.close()

    assert [frame.index for frame in frames] == list(range(10))
    steps = {round(b.time_s - a.time_s, 3) for a, b in pairwise(frames)}
    assert len(steps) == 1
    assert source.num_frames is None


def test_closing_a_paced_source_ends_its_wait(tmp_path: Path) -> None:
    """V6: one of ten minutes, until the second frame is due."""
    path = write_video(tmp_path / "v.mp4", [corner(64, 48)] * 2, times_s=[0.0, 600.0])
    source = open_source(path, camera="a", realtime=True)
    frames = iter(source)
    next(frames)
    threading.Timer(0.05, source.close).start()

    assert list(frames) == []


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        (FrameShape(), (90, 160)),
        (FrameShape(rotate=270), (160, 90)),
        (FrameShape(max_width=80), (45, 80)),
        (FrameShape(max_height=45), (45, 80)),
        (FrameShape(max_width=320, max_height=320), (90, 160)),
        (FrameShape(rotate=90, max_width=45, max_height=45), (45, 25)),
    ],
)
def test_frames_fit_the_size_asked_for(shape: FrameShape, size: tuple[int, int]) -> None:
    """V12: proportions stay, nothing is enlarged, and turning comes first."""
    assert shape.apply(np.zeros((90, 160, 3), np.uint8)).shape == (*size, 3)


def test_turning_is_clockwise() -> None:
    """V10."""
    image = np.zeros((2, 3, 3), np.uint8)
    image[0, 0] = 255

    assert FrameShape(rotate=90).apply(image)[0, 1].all()
    assert FrameShape(rotate=180).apply(image)[1, 2].all()
    assert FrameShape(rotate=270).apply(image)[2, 0].all()
