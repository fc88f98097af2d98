"""Recorded video: times, turns, sizes, depths and damage."""

import gc
import io
from itertools import islice
from pathlib import Path

import av
import numpy as np
import pytest
from av.stream import Disposition

from tests.vision.videos import corner, turned_jpeg, write_video
from vision.errors import SourceUnreadable, SourceUnsupported
from vision.sources import open_source
from vision.types import Image
from vision.video_file import VideoFile, upright

ONE = 1 << 16
TURNED_LEFT = (0, -ONE, 0, ONE, 0, 0, 0, 0, 1 << 30)
UPSIDE_DOWN = (-ONE, 0, 0, 0, -ONE, 0, 0, 0, 1 << 30)
TURNED_RIGHT = (0, ONE, 0, -ONE, 0, 0, 0, 0, 1 << 30)
MIRRORED = (-ONE, 0, 0, 0, ONE, 0, 0, 0, 1 << 30)


def light_quarter(image: Image) -> str:
    """Where the light quarter of `corner` is now."""
    height, width = image.shape[:2]
    means = {
        "upper left": image[: height // 2, : width // 2].mean(),
        "upper right": image[: height // 2, width // 2 :].mean(),
        "lower left": image[height // 2 :, : width // 2].mean(),
        "lower right": image[height // 2 :, width // 2 :].mean(),
    }
    return max(means, key=lambda place: means[place])


def damage(path: Path, first: int, end: int, keep: float = 0.0) -> None:
    """Blank the packets from `first` up to `end`, all but the leading part `keep` of each."""
    with av.open(str(path)) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    data = bytearray(path.read_bytes())
    for position, size in packets[first:end]:
        kept = int(size * keep)
        data[position + kept : position + size] = bytes(size - kept)
    path.write_bytes(data)


def test_times_come_from_the_time_stamps(tmp_path: Path) -> None:
    """V9: a variable frame rate."""
    times = [0.0, 0.1, 0.15, 1.0, 1.04, 1.05, 4.0]
    path = write_video(tmp_path / "v.mp4", [corner(64, 48)] * len(times), times_s=times)
    frames = list(VideoFile(path, "yard"))
    assert [frame.time_s for frame in frames] == pytest.approx(times, abs=1e-3)
    assert [frame.index for frame in frames] == list(range(len(times)))
    assert {frame.camera for frame in frames} == {"yard"}


def test_a_recording_starts_at_zero_wherever_its_clock_stood(tmp_path: Path) -> None:
    """V9: MPEG-TS starts its time stamps somewhere."""
    path = write_video(tmp_path / "v.ts", [corner(64, 48)] * 4, times_s=[7.0, 7.1, 7.2, 7.5])
    assert [f.time_s for f in VideoFile(path, "a")] == pytest.approx([0.0, 0.1, 0.2, 0.5], abs=1e-3)


def test_a_name_may_be_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As recorders give it; from the folder where it is, a colon is no protocol's."""
    name = "2026-11-30T04:00:00.mp4"
    write_video(tmp_path / "v.mp4", [corner(64, 48)] * 2).rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert len(list(open_source(name, camera="a"))) == 2


def test_time_goes_on_where_time_stamps_start_again(tmp_path: Path) -> None:
    """V11, for files: two recordings joined into one."""
    part = write_video(tmp_path / "part.ts", [corner(64, 48)] * 5).read_bytes()
    (tmp_path / "v.ts").write_bytes(part + part)
    times = [frame.time_s for frame in VideoFile(tmp_path / "v.ts", "a")]
    assert len(times) == 10
    assert all(0 < step < 0.5 for step in np.diff(times))


@pytest.mark.parametrize(
    ("matrix", "place", "shape"),
    [
        (None, "upper left", (48, 64, 3)),
        (TURNED_LEFT, "lower left", (64, 48, 3)),
        (UPSIDE_DOWN, "lower right", (48, 64, 3)),
        (TURNED_RIGHT, "upper right", (64, 48, 3)),
        (MIRRORED, "upper right", (48, 64, 3)),
    ],
)
@pytest.mark.parametrize("ending", ["mp4", "mkv"])
def test_frames_are_upright_exactly_once(
    tmp_path: Path, matrix: tuple[int, ...] | None, place: str, shape: tuple[int, ...], ending: str
) -> None:
    """V10: rotation metadata of 90, 180 and 270 degrees."""
    if matrix == MIRRORED and ending == "mkv":
        pytest.skip("Matroska has no mirrored display")
    path = write_video(tmp_path / f"v.{ending}", [corner(64, 48)] * 2, matrix=matrix)
    for frame in VideoFile(path, "a"):
        assert frame.image.shape == shape
        assert light_quarter(frame.image) == place


@pytest.mark.parametrize(
    ("orientation", "place"),
    list(enumerate(["upper left", "upper right", "lower right", "lower left"] * 2, 1)),
)
def test_pictures_with_exif_in_a_video_are_upright_exactly_once(
    tmp_path: Path, orientation: int, place: str
) -> None:
    """V10: as cameras write them into each frame of MJPEG; from 5 on the sides are exchanged too."""
    path = tmp_path / "v.mjpeg"
    path.write_bytes(turned_jpeg(corner(64, 48), orientation) * 3)
    frames = list(VideoFile(path, "a"))
    assert {frame.image.shape for frame in frames} == {(64, 48, 3) if orientation > 4 else (48, 64, 3)}
    assert [light_quarter(frame.image) for frame in frames] == [place] * 3


@pytest.mark.parametrize(
    ("tag", "place"),
    [
        ("90", "upper right"),
        ("-90", "lower left"),
        ("²", "upper left"),
        ("--5", "upper left"),
        ("", "upper left"),
    ],
)
def test_a_turn_that_only_a_tag_asks_for(tmp_path: Path, tag: str, place: str) -> None:
    path = write_video(tmp_path / "v.mkv", [corner(64, 48)])
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.metadata["rotate"] = tag
        assert light_quarter(upright(next(container.decode(stream)), stream)) == place


@pytest.mark.parametrize(
    ("width", "height"), [(853, 480), (640, 368), (3632, 1080), (270, 480), (101, 77), (3840, 2160)]
)
def test_any_size(tmp_path: Path, width: int, height: int) -> None:
    """V12: sizes that are no multiple of anything, portrait, 4K."""
    speed = {"preset": "ultrafast"}
    path = write_video(tmp_path / "v.mkv", [corner(width, height)] * 2, pix_fmt="yuv444p", options=speed)
    frames = list(VideoFile(path, "a"))
    assert len(frames) == 2
    assert frames[0].image.shape == (height, width, 3)
    assert (frames[0].width, frames[0].height) == (width, height)
    edge = frames[0].image.mean(axis=2) > 128
    assert edge[: height // 2 - 4, : width // 2 - 4].all()
    assert not edge[height // 2 + 4 :].any()
    assert not edge[:, width // 2 + 4 :].any()


def test_size_changes_on_the_way(tmp_path: Path) -> None:
    """V13: a stream that goes on with another size."""
    parts = [
        write_video(tmp_path / f"{w}.h264", [corner(w, h)] * 3, options={"bf": "0"})
        for w, h in [(64, 48), (96, 128)]
    ]
    (tmp_path / "v.h264").write_bytes(b"".join(part.read_bytes() for part in parts))
    shapes = [frame.image.shape for frame in VideoFile(tmp_path / "v.h264", "a")]
    assert shapes == [(48, 64, 3)] * 3 + [(128, 96, 3)] * 3


@pytest.mark.parametrize(
    ("pix_fmt", "codec"),
    [
        ("gray", "ffv1"),
        ("gray16le", "ffv1"),
        ("yuv420p10le", "ffv1"),
        ("bgra", "ffv1"),
        ("yuvj420p", "mjpeg"),
    ],
)
def test_every_depth_becomes_8_bit_bgr(tmp_path: Path, pix_fmt: str, codec: str) -> None:
    """V14: grey, 16-bit, 10-bit, alpha and full-range video."""
    path = write_video(tmp_path / "v.mkv", [corner(64, 48, shade=200)] * 2, codec=codec, pix_fmt=pix_fmt)
    image = next(iter(VideoFile(path, "a"))).image
    assert image.dtype == np.uint8
    assert image.shape == (48, 64, 3)
    assert image.flags.c_contiguous
    assert abs(image[12, 16].astype(int) - 200).max() <= 4
    assert abs(image[36, 48].astype(int) - 16).max() <= 4


def test_pixels_that_nothing_converts_are_an_error_with_a_name(tmp_path: Path) -> None:
    """V14: four bits a pixel, in a file, and floats with alpha, at which the whole process would end."""
    path = tmp_path / "v.nut"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("rawvideo", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "rgb4"
        frame = av.VideoFrame(64, 48, "rgb4")
        frame.pts = 0
        container.mux(stream.encode(frame))
    with pytest.raises(
        SourceUnsupported, match=r"v\.nut: its pixels, rgb4, cannot be converted; make it yuv420p"
    ):
        list(VideoFile(path, "a"))
    with pytest.raises(SourceUnsupported, match="yaf32le"):
        upright(av.VideoFrame(64, 48, "yaf32le"), stream)


def test_damaged_packets_are_counted_and_passed(tmp_path: Path) -> None:
    """V7: H.264 with damage in the middle."""
    path = write_video(tmp_path / "v.mp4", [corner(64, 48)] * 30, options={"g": "5", "bf": "0"})
    damage(path, 11, 14)
    source = VideoFile(path, "a")
    frames = list(source)
    assert source.num_lost >= 3
    assert len(frames) + source.num_lost >= 30
    assert frames[-1].time_s == pytest.approx(2.9, abs=1e-3)
    assert all(light_quarter(frame.image) == "upper left" for frame in frames)


def test_frames_that_are_damaged_in_part_are_left_out(tmp_path: Path) -> None:
    """V7: the decoder patches them up with something, which is no picture of what was there."""
    noise = np.random.default_rng(0).integers(0, 256, (240, 300, 3), np.uint8)
    moving = [noise[i : i + 192, 2 * i : 2 * i + 240] for i in range(30)]
    path = write_video(tmp_path / "v.mp4", moving, options={"g": "10", "bf": "0"})
    damage(path, 12, 14, keep=0.5)
    source = VideoFile(path, "a")
    assert [frame.index for frame in source] == [i for i in range(30) if i not in (12, 13)]
    assert source.num_lost == 2


def test_the_picture_of_a_cover_is_not_the_video(tmp_path: Path) -> None:
    video = write_video(tmp_path / "v.mp4", [corner(64, 48)] * 10)
    with (
        av.open(str(video)) as source,
        av.open(io.BytesIO(turned_jpeg(corner(200, 200), 1))) as cover,
        av.open(str(tmp_path / "v.mkv"), "w") as container,
    ):
        streams = [container.add_stream_from_template(one.streams.video[0]) for one in (cover, source)]
        streams[0].disposition = Disposition.attached_pic
        for one, stream in zip((cover, source), streams, strict=True):
            for packet in one.demux(video=0):
                if packet.dts is not None:
                    packet.stream = stream
                    container.mux(packet)
    frames = list(VideoFile(tmp_path / "v.mkv", "a"))
    assert len(frames) == 10
    assert frames[0].image.shape == (48, 64, 3)


def remuxed(path: Path, target: Path, *, from_s: float = 0.0) -> Path:
    """The same packets with the index in front; what is before `from_s` is left out by an edit list."""
    options = {"movflags": "faststart", "avoid_negative_ts": "disabled"}
    with av.open(str(path)) as source, av.open(str(target), "w", options=options) as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None and packet.pts is not None and packet.time_base is not None:
                packet.stream = stream
                shift = round(from_s / packet.time_base)
                packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
                container.mux(packet)
    return target


def noise(num_frames: int) -> list[Image]:
    """Pictures that take the same room each."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, (64, 96, 3), np.uint8) for _ in range(num_frames)]


@pytest.mark.parametrize(("name", "codec"), [("v.mp4", "libx264"), ("v.mkv", "libx264"), ("v.avi", "mpeg4")])
def test_what_is_cut_off_is_counted_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, codec: str
) -> None:
    path = write_video(tmp_path / name, noise(60), codec=codec)
    if name == "v.mp4":
        path = remuxed(path, tmp_path / "fast.mp4")
    whole = VideoFile(path, "a")
    assert len(list(whole)) == 60
    assert sum(whole.losses.values()) == 0
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    source = VideoFile(path, "a")
    frames = list(source)
    assert len(list(source)) == len(frames)

    assert 20 <= len(frames) <= 50
    assert len(frames) + sum(source.losses.values()) == pytest.approx(60, abs=3)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path} has {len(frames)} frames of ")
    assert "it was cut off or is damaged" in record.getMessage()


def test_a_closed_recording_misses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = VideoFile(write_video(tmp_path / "v.mp4", noise(60)), "a")
    for frame in source:
        if frame.index == 3:
            source.close()
    assert sum(source.losses.values()) == len(caplog.records) == 0


def test_an_inexact_header_is_no_damage(tmp_path: Path) -> None:
    """An edit list leaves out frames that the index counts; a last frame may stand for long."""
    path = write_video(tmp_path / "v.mp4", noise(60), options={"g": "5", "bf": "0"})
    edited = VideoFile(remuxed(path, tmp_path / "edited.mp4", from_s=1.55), "a")
    frames = list(edited)
    assert len(frames) < edited.num_frames == 60
    assert sum(edited.losses.values()) == 0
    times_s = [*(index / 10 for index in range(20)), 12.0]
    for name in ("slow.mp4", "slow.mkv"):
        slow = VideoFile(write_video(tmp_path / name, noise(21), times_s=times_s), "a")
        assert len(list(slow)) == 21
        assert sum(slow.losses.values()) == 0


def test_facts_that_a_progress_bar_needs(tmp_path: Path) -> None:
    source = VideoFile(write_video(tmp_path / "v.mp4", [corner(64, 48)] * 7, fps=5), "a")
    assert (source.fps, source.num_frames) == (5.0, 7)
    assert (source.is_live, source.is_video) == (False, True)
    assert len(list(source)) == len(list(source)) == 7


def test_closing_ends_a_running_iteration(tmp_path: Path) -> None:
    source = VideoFile(write_video(tmp_path / "v.mp4", [corner(64, 48)] * 7), "a")
    frames = iter(source)
    next(frames)
    source.close()
    assert list(frames) == []


@pytest.mark.parametrize("content", [b"", b"this is no video\n" * 200, bytes(5000)])
def test_files_that_are_no_video(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.mp4"
    path.write_bytes(content)
    with pytest.raises(SourceUnreadable, match=r"notes\.mp4"):
        list(VideoFile(path, "a"))


def test_a_video_whose_every_packet_is_damaged(tmp_path: Path) -> None:
    """V7: an error, not an empty recording."""
    path = write_video(tmp_path / "v.mp4", [corner(64, 48)] * 3)
    damage(path, 0, 3)
    with pytest.raises(SourceUnreadable, match="not one frame"):
        list(VideoFile(path, "a"))


def test_sound_alone_is_no_source(tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(SourceUnsupported, match="no video stream"):
        VideoFile(path, "a")


def test_a_picture_is_gone_when_it_was_turned_upright(tmp_path):
    """PyAV's own `side_data` of a picture holds the picture, which then waits for the garbage collector."""
    path = tmp_path / "clip.mp4"
    write_video(path, [corner(64, 48)] * 12)
    gc.collect()
    gc.disable()
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            for picture in islice(container.decode(stream), 10):
                upright(picture, stream)
            del picture
            assert sum(type(thing) is av.VideoFrame for thing in gc.get_objects()) <= 1
    finally:
        gc.enable()
