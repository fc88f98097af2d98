"""Clips that came as bytes: which of their frames are kept, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from tests.vision.videos import corner, write_video
from vision.errors import SourceError, SourceUnreadable, SourceUnsupported
from vision.video_clip import ClipLimits, VideoClip

SIZE = (64, 48)


def shade(number: int) -> int:
    return 40 + 4 * number


def clip(
    folder: Path, num_frames: int, fps: int = 10, name: str = "clip.mp4", codec: str = "libx264"
) -> bytes:
    """Frames that tell their number by their brightness."""
    images = [np.full((SIZE[1], SIZE[0], 3), shade(n), np.uint8) for n in range(num_frames)]
    return write_video(folder / name, images, fps=fps, codec=codec).read_bytes()


def numbers(images: list[np.ndarray]) -> list[int]:
    return [round((float(image.mean()) - float(images[0].mean())) / 4) for image in images]


def test_frames_are_evenly_spread(tmp_path: Path) -> None:
    """3 s at 10 frames a second: every fifth frame unless more are asked for."""
    data = clip(tmp_path, 30)
    images, fps = VideoClip(data, "mp4").sampled(None, ClipLimits())
    assert numbers(images) == [0, 5, 10, 15, 20, 25]
    assert fps == pytest.approx(2.0)
    images, fps = VideoClip(data, "mp4").sampled(5.0, ClipLimits())
    assert numbers(images) == list(range(0, 30, 2))
    assert fps == pytest.approx(5.0)


def test_more_frames_a_second_than_there_are(tmp_path: Path) -> None:
    """A rate above the recording's gives all frames and the rate at which they were taken."""
    images, fps = VideoClip(clip(tmp_path, 6), "mp4").sampled(60.0, ClipLimits())
    assert numbers(images) == list(range(6))
    assert fps == pytest.approx(10.0)


def test_a_long_clip_has_frames_further_apart(tmp_path: Path) -> None:
    data = clip(tmp_path, 48)
    images, fps = VideoClip(data, "mp4").sampled(None, ClipLimits(max_frames=3))
    assert numbers(images) == [0, 20, 40]
    assert fps == pytest.approx(0.5)
    with pytest.raises(SourceUnsupported, match=r"more than 3 frames at 2 a second; ask for fewer \(fps\)"):
        VideoClip(data, "mp4").sampled(2.0, ClipLimits(max_frames=3))


@pytest.mark.parametrize(
    ("name", "codec"), [("clip.webm", "libvpx"), ("clip.avi", "mpeg4"), ("clip.mov", "mpeg4")]
)
def test_other_containers(tmp_path: Path, name: str, codec: str) -> None:
    data = clip(tmp_path, 11, name=name, codec=codec)
    images, _ = VideoClip(data, name.rpartition(".")[2]).sampled(None, ClipLimits())
    assert [abs(n - wanted) <= 1 for n, wanted in zip(numbers(images), (0, 5, 10), strict=True)] == [True] * 3


def test_pictures_are_upright_and_small_enough(tmp_path: Path) -> None:
    """A phone's clip that lies on its side is turned; large frames lose pixels, not their shape."""
    turn = [0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30]
    path = write_video(tmp_path / "a.mp4", [corner(96, 48)] * 3, fps=2, matrix=turn)
    images, _ = VideoClip(path.read_bytes(), "mp4").sampled(None, ClipLimits(max_kept_pixels=1152))
    assert {image.shape for image in images} == {(48, 24, 3)}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (ClipLimits(max_read=5), "more than 5 frames; cut it"),
        (ClipLimits(max_frame_pixels=3000), "64x48, more than 3000 pixels"),
        (ClipLimits(max_read_pixels=20_000), "more than 20000 pixels together; cut it"),
        (ClipLimits(max_read_s=0.0), "more than 0 s to read; cut it, or make it smaller"),
    ],
)
def test_limits(tmp_path: Path, limits: ClipLimits, message: str) -> None:
    with pytest.raises(SourceUnsupported, match=message):
        VideoClip(clip(tmp_path, 10), "mp4").sampled(None, limits)


def test_what_is_no_clip_of_two_frames_is_refused(tmp_path: Path) -> None:
    data = clip(tmp_path, 4)
    with pytest.raises(SourceUnsupported, match=r"one frame only at 2 a second; ask for more \(fps\)"):
        VideoClip(data, "mp4").sampled(None, ClipLimits())
    for broken, kind in (
        (b"", "mp4"),
        (b"no video" * 99, "mp4"),
        (data, "webm"),
        (data[: len(data) // 3], "mp4"),
    ):
        with pytest.raises(SourceUnreadable, match="the clip"):
            VideoClip(broken, kind).sampled(None, ClipLimits())


def test_bytes_that_name_other_files_open_none_of_them(tmp_path: Path) -> None:
    """A playlist in a clip's clothes must not make the server read its own files."""
    secret = tmp_path / "secret.ts"
    secret.write_bytes(clip(tmp_path, 20, name="secret.ts"))
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nfile://{secret}\n#EXT-X-ENDLIST\n".encode()
    listed = f"ffconcat version 1.0\nfile {secret}\n".encode()
    for data in (playlist, listed):
        for kind in ("mp4", "webm", "mpegts", "avi", "mpeg"):
            with pytest.raises(SourceError):
                VideoClip(data, kind).sampled(None, ClipLimits())
