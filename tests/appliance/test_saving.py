"""What `replay` writes for people: captions, videos, lines."""

import io
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import av
import cv2
import numpy as np
import pytest

from appliance.jobs import Description
from appliance.output import DescriptionWriter, readable_line
from appliance.recordings import Recording, find_recordings
from appliance.saving import CAPTION_S, Captions, Saver
from appliance.settings import SettingsError
from appliance.video_writer import VideoWriter
from tests.appliance.running import until
from vision.pipeline import FrameResult
from vision.types import Detections, Frame


def description(time_s: float, text: str | None = "A person.", error: str | None = None) -> Description:
    return Description(
        job_id=f"job-{time_s}",
        camera="front",
        source="front.mp4",
        frame_index=round(time_s * 10),
        time_s=time_s,
        captured_at=0,
        described_at=0,
        track_id=4,
        label="person",
        reason="new_track",
        detections=[],
        prompt="",
        text=text,
        error=error,
    )


def test_a_caption_begins_with_what_it_describes_and_ends():
    captions = Captions([description(1.0, "one"), description(3.0, "two")])

    shown = [captions.at(time_s) for time_s in (0.9, 1.0, 2.9, 3.0, 3.0 + CAPTION_S, 3.1 + CAPTION_S)]

    assert shown == [None, "one", "one", "two", "two", None]


def test_an_error_is_captioned_as_one():
    """A8."""
    assert Captions([description(0, None, "out of memory")]).at(0) == "no description: out of memory"


def test_there_is_room_for_the_longest_caption():
    frame = Frame("front", 0, 0.0, 0.0, np.zeros((100, 200, 3), np.uint8))
    short, long = (
        Captions([description(0, "a")]),
        Captions([description(0, "a"), description(1, "word " * 40)]),
    )

    assert 0 < short.room(frame) < long.room(frame)
    assert Captions([]).room(frame) == 0


def interrupted(saver: Saver, recording: Recording, path: Path) -> None:
    """Every twentieth frame was seen, and an interrupt comes while the video is drawn."""
    with saver:
        for frame in itertools.islice(recording.open(), 1000):
            seen = replace(frame, index=frame.index * 20)
            saver.keep(recording, FrameResult(seen, Detections.empty({}), None))
        saver.end(recording, num_jobs=0)
        until(path.exists)
        raise KeyboardInterrupt


def test_a_second_interrupt_ends_a_video_where_it_is(tmp_path: Path) -> None:
    (recording,) = find_recordings(["synthetic://street?frames=100000"])
    said: list[str] = []
    path = tmp_path / "street-annotated.mp4"
    with pytest.raises(KeyboardInterrupt):
        interrupted(Saver(tmp_path, say=said.append), recording, path)
    with av.open(str(path)) as video:
        num_frames = sum(1 for _ in video.decode(video=0))
    assert said[0].startswith(f"saved {path}: {num_frames} frame")
    assert said[1] == f"saved in {tmp_path}: 0 snapshots, 1 video"
    assert 0 < num_frames < 1000


def test_a_videos_name_may_be_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with VideoWriter(Path("2026-11-30T04:00:00.mp4")) as video:
        video.write(np.zeros((48, 64, 3), np.uint8), 0.0)
    assert (tmp_path / "2026-11-30T04:00:00.mp4").stat().st_size


@pytest.mark.parametrize("size", [(640, 480), (2560, 1440)])
def test_a_video_looks_like_its_pictures(tmp_path: Path, size: tuple[int, int]) -> None:
    """Drawn scenes, noise and all, of 35 dB at least, in what is quick for their size."""
    width, height = size
    (recording,) = find_recordings(["synthetic://street?seed=3&frames=5"])
    pictures = [cv2.resize(frame.image, (width, height)) for frame in recording.open()]
    with VideoWriter(tmp_path / "v.mp4") as video:
        for index, picture in enumerate(pictures):
            video.write(picture, index / 5)

    with av.open(str(tmp_path / "v.mp4")) as opened:
        read = [frame.to_ndarray(format="bgr24") for frame in opened.decode(video=0)]
    assert len(read) == len(pictures)
    assert min(map(cv2.PSNR, pictures, read)) > 35


@pytest.mark.parametrize("size", [(64, 48), (65, 49), (32, 200)])
def test_a_video_keeps_size_and_times(tmp_path: Path, size):
    """V9, V12: odd sides are cut to even ones, and times are as given, equal or not."""
    width, height = size
    times = [0.0, 0.1, 0.5, 0.52, 2.0]
    with VideoWriter(tmp_path / "v.mp4", room=10) as video:
        for time_s in times:
            video.write(np.full((height, width, 3), 200, np.uint8), time_s)
        video.write(np.full((height + 9, width + 9, 3), 200, np.uint8), 2.0)

    with av.open(str(tmp_path / "v.mp4")) as opened:
        frames = list(opened.decode(video=0))
    assert {(f.width, f.height) for f in frames} == {(width - width % 2, (height + 10) - (height + 10) % 2)}
    assert [f.time for f in frames] == pytest.approx([*times, 2.0], abs=1e-3)
    pixels = frames[0].to_ndarray(format="rgb24")
    assert pixels[: height // 2].mean() == pytest.approx(200, abs=6)
    assert pixels[-4:].mean() == pytest.approx(32, abs=10)


def test_a_line_for_people():
    assert readable_line(description(83.25, "A person\non the left.")) == (
        "front 1:23.2 person #4: A person on the left."
    )
    assert "(no description: gone)" in readable_line(description(0, None, "gone"))


class Printer:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize(
    ("path", "is_terminal", "num_readable", "num_on_stdout", "num_in_file"),
    [
        (None, True, 1, 0, 0),
        (None, False, 0, 1, 0),
        ("-", True, 0, 1, 0),
        ("-", False, 0, 1, 0),
        ("out/lines.jsonl", True, 1, 0, 1),
        ("out/lines.jsonl", False, 0, 0, 1),
    ],
)
def test_where_descriptions_go(
    tmp_path, monkeypatch, path, is_terminal, num_readable, num_on_stdout, num_in_file
):
    stdout = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(stdout, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.chdir(tmp_path)
    printer = Printer()

    with DescriptionWriter(Path(path) if path else None) as writer:
        writer.write(description(0), printer)

    assert len(printer.lines) == num_readable
    assert stdout.buffer.getvalue().count(b"\n") == num_on_stdout  # type: ignore[attr-defined]
    written = [file.read_text().count("\n") for file in tmp_path.rglob("*.jsonl")]
    assert sum(written) == num_in_file


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(SettingsError, match="choose another --output"):
        DescriptionWriter(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="choose another --output"):
        DescriptionWriter(tmp_path / "file" / "lines.jsonl")
