"""Pictures from files."""

import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from vision import stills
from vision.errors import SourceNotFound, SourceUnreadable, SourceUnsupported
from vision.stills import Stills, read_image

CORNER_RGB = np.zeros((40, 60, 3), np.uint8)
CORNER_RGB[:20, :30] = (200, 100, 50)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path: Path, orientation: int) -> None:
    """V10, for stills: whatever way the camera was held, the corner is up left."""
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    picture = Pillow.fromarray(CORNER_RGB)
    stored = picture.transpose(Pillow.Transpose(undo[orientation])) if orientation > 1 else picture
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "p.png", exif=exif)
    assert np.array_equal(read_image(tmp_path / "p.png"), CORNER_RGB[:, :, ::-1])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F"])
def test_every_mode_becomes_8_bit_bgr(tmp_path: Path, mode: str) -> None:
    """V14: grey, palette, alpha, 16-bit and float pictures."""
    if mode == "I;16":
        picture = Pillow.fromarray(np.full((4, 6), 40_000, np.uint16))
    elif mode == "F":
        picture = Pillow.fromarray(np.full((4, 6), 0.6, np.float32))
    else:
        picture = Pillow.new("RGB", (6, 4), (156, 156, 156)).convert(mode)
    path = tmp_path / ("p.png" if mode not in ("F", "CMYK") else "p.tif")
    picture.save(path)
    image = read_image(path)
    assert image.dtype == np.uint8
    assert image.shape == (4, 6, 3)
    assert abs(float(image.mean()) - 156) <= (70 if mode == "1" else 4)


def test_transparent_is_white(tmp_path: Path) -> None:
    Pillow.new("RGBA", (6, 4), (10, 20, 30, 0)).save(tmp_path / "p.png")
    assert (read_image(tmp_path / "p.png") == 255).all()


def test_a_folder_is_read_by_name_and_damage_is_counted(tmp_path: Path) -> None:
    for name, shade in (("b.jpg", 200), ("a.png", 100), ("d.PNG", 50)):
        Pillow.new("L", (8, 8), shade).save(tmp_path / name)
    (tmp_path / "c.jpg").write_bytes(b"no picture")
    (tmp_path / "notes.txt").write_text("left alone")
    (tmp_path / "e.png").mkdir()
    source = Stills.in_folder(tmp_path, "door")
    frames = list(source)
    assert [round(float(frame.image.mean()) / 50) * 50 for frame in frames] == [100, 200, 50]
    assert [(frame.index, frame.time_s) for frame in frames] == [(0, 0.0), (1, 1.0), (3, 3.0)]
    assert (source.num_frames, source.num_lost) == (4, 1)
    assert not source.is_video


def test_a_folder_without_pictures(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match=r"no pictures in folder .*\.jpg"):
        Stills.in_folder(tmp_path, "door")


def test_nothing_readable_is_an_error(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"no picture")
    with pytest.raises(SourceUnreadable, match=r"b\.png"):
        list(Stills.in_folder(tmp_path, "door"))


def test_a_picture_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "p.jpg"
    Pillow.effect_noise((200, 200), 80).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(SourceUnreadable, match=r"p\.jpg"):
        read_image(path)


def test_too_many_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Pillow.new("L", (30, 30)).save(tmp_path / "p.png")
    monkeypatch.setattr(stills, "MAX_PIXELS", 899)
    with pytest.raises(SourceUnsupported, match="30×30"):
        read_image(tmp_path / "p.png")


def test_one_that_is_too_large_or_odd_ends_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("a", 8), ("b", 30), ("c", 9), ("d", 8)):
        Pillow.new("L", (size, size)).save(tmp_path / f"{name}.png")
    monkeypatch.setattr(stills, "MAX_PIXELS", 899)
    turn = stills.ImageOps.exif_transpose

    def trip(picture: Pillow.Image) -> Pillow.Image:
        if picture.width == 9:
            raise struct.error("what a parser trips over")
        return turn(picture)

    monkeypatch.setattr(stills.ImageOps, "exif_transpose", trip)
    source = Stills.in_folder(tmp_path, "door")
    assert [frame.index for frame in source] == [0, 3]
    assert source.num_lost == 2


def test_closing_ends_a_running_iteration(tmp_path: Path) -> None:
    for name in "abc":
        Pillow.new("L", (8, 8)).save(tmp_path / f"{name}.png")
    source = Stills.in_folder(tmp_path, "door")
    frames = iter(source)
    next(frames)
    source.close()
    assert list(frames) == []
