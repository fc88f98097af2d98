"""Cases I1 to I9 at the door itself; api/test_chat_refusals.py sends the same over REST."""

import base64
import contextlib
import io
import os
import struct
import time
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from appliance.clips import VideoLimits, clip_from_data_uri
from appliance.images import ImageError, ImageLimits, bytes_from_data_uri, image_from_bytes
from tests.appliance.pictures import data_uri, encoded, giant_png_header, quadrants


@pytest.mark.parametrize("size", [(1, 1), (1, 150), (26, 28), (257, 27), (100, 1)])
def test_small_images_are_enlarged_to_a_patch(size: tuple[int, int]) -> None:
    """I1"""
    image = image_from_bytes(encoded(Image.new("RGB", size, "red")))
    assert min(image.size) == 32
    assert image.width / image.height == pytest.approx(size[0] / size[1], rel=0.05)
    assert image.getpixel((image.width // 2, image.height // 2)) == (255, 0, 0)


@pytest.mark.parametrize("size", [(499, 1), (1093, 5), (200, 1), (1, 200)])
def test_extreme_shapes_are_refused(size: tuple[int, int]) -> None:
    """I1, I2"""
    with pytest.raises(ImageError, match=rf"{size[0]}×{size[1]}.*200 times"):
        image_from_bytes(encoded(Image.new("RGB", size)))


def test_a_shape_just_under_the_limit_is_accepted() -> None:
    """I2"""
    assert image_from_bytes(encoded(Image.new("RGB", (1990, 10)))).size == (6368, 32)


@pytest.mark.parametrize(
    ("mode", "format_", "pixel", "expected"),
    [
        ("L", "PNG", 90, (90, 90, 90)),
        ("LA", "PNG", (0, 128), (127, 127, 127)),
        ("RGBA", "PNG", (255, 0, 0, 0), (255, 255, 255)),
        ("RGBA", "WEBP", (255, 0, 0, 0), (255, 255, 255)),
        ("RGBA", "PNG", (0, 0, 255, 128), (127, 127, 255)),
        ("CMYK", "JPEG", (0, 255, 255, 0), (254, 0, 0)),
        ("CMYK", "TIFF", (0, 255, 255, 0), (255, 0, 0)),
        ("1", "PNG", 1, (255, 255, 255)),
        ("I;16", "PNG", 0x8000, (128, 128, 128)),
        ("I;16", "TIFF", 0xFFFF, (255, 255, 255)),
        ("I;16", "PNG", 300, (1, 1, 1)),
    ],
)
def test_modes_become_rgb_with_alpha_over_white(
    mode: str, format_: str, pixel: float | tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """I3"""
    image = image_from_bytes(encoded(Image.new(mode, (40, 40), pixel), format_))
    assert image.mode == "RGB"
    assert image.getpixel((20, 20)) == pytest.approx(expected, abs=2)


def palette_image() -> Image.Image:
    image = Image.new("P", (40, 40), 0)
    image.putpalette([200, 30, 30, 30, 200, 30])
    image.paste(1, (20, 0, 40, 40))
    return image


def test_a_palette_becomes_rgb() -> None:
    """I3"""
    image = image_from_bytes(encoded(palette_image()))
    assert image.getpixel((5, 5)) == (200, 30, 30)
    assert image.getpixel((35, 5)) == (30, 200, 30)


@pytest.mark.parametrize("transparency", [0, b"\x00\xff"])
def test_a_transparent_palette_entry_becomes_white(transparency: int | bytes) -> None:
    """I3"""
    image = image_from_bytes(encoded(palette_image(), transparency=transparency))
    assert image.getpixel((5, 5)) == (255, 255, 255)
    assert image.getpixel((35, 5)) == (30, 200, 30)


@pytest.mark.parametrize(("mode", "key"), [("L", 7), ("RGB", (7, 7, 7))])
def test_a_transparent_colour_becomes_white(mode: str, key: int | tuple[int, ...]) -> None:
    """I3"""
    source = Image.new(mode, (40, 40), key)
    source.paste(99 if mode == "L" else (99, 99, 99), (20, 0, 40, 40))
    image = image_from_bytes(encoded(source, transparency=key))
    assert image.getpixel((5, 5)) == (255, 255, 255)
    assert image.getpixel((35, 5)) == (99, 99, 99)


def test_floating_point_pixels_are_refused() -> None:
    """I3"""
    with pytest.raises(ImageError, match="image has F pixels"):
        image_from_bytes(encoded(Image.new("F", (40, 40), 0.5), "TIFF"))


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(orientation: int, format_: str) -> None:
    """I4"""
    upright = quadrants(96, 64)
    undo = {
        1: upright,
        2: upright.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: upright.rotate(180),
        4: upright.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: upright.transpose(Image.Transpose.TRANSPOSE),
        6: upright.rotate(90, expand=True),
        7: upright.transpose(Image.Transpose.TRANSVERSE),
        8: upright.rotate(-90, expand=True),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = image_from_bytes(encoded(undo[orientation], format_, exif=exif))
    assert image.size == (96, 64)
    difference = np.abs(np.asarray(image).astype(int) - np.asarray(upright).astype(int))
    assert np.median(difference) < 12
    assert not image.getexif()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_unreadable_exif_leaves_the_image_as_it_lies() -> None:
    """I4"""
    data = encoded(quadrants(64, 64), "JPEG", exif=b"Exif\x00\x00MM\x00\x2a\xff\xff\xff\xff")
    assert image_from_bytes(data).size == (64, 64)


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_file_cut_short_is_refused(format_: str) -> None:
    """I5"""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 80, 3), dtype=np.uint8))
    with pytest.raises(ImageError, match=rf"{format_} image is damaged|not a JPEG, PNG"):
        image_from_bytes(encoded(noise, format_)[:-128])


def test_a_jpeg_cut_short_says_so() -> None:
    """I5"""
    with pytest.raises(ImageError, match="the JPEG image is damaged or cut short: image file is truncated"):
        image_from_bytes(encoded(quadrants(200, 200), "JPEG")[:-128])


def test_a_progressive_jpeg_cut_short_is_refused() -> None:
    """I5"""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 80, 3), dtype=np.uint8))
    with pytest.raises(ImageError, match="cut short"):
        image_from_bytes(encoded(noise, "JPEG", progressive=True)[:-128])


def test_the_first_picture_of_a_phones_double_jpeg_is_taken() -> None:
    """I7: MPO, which is what some phones write with the name .jpg."""
    data = encoded(quadrants(64, 48), "MPO", save_all=True, append_images=[Image.new("RGB", (64, 48))])
    assert image_from_bytes(data).getpixel((60, 40)) == pytest.approx((255, 255, 255), abs=5)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"I am a text file.\n", "these 18 bytes are not a JPEG, PNG, WebP, GIF, BMP or TIFF"),
    ],
)
def test_what_is_no_image_is_refused(data: bytes, reason: str) -> None:
    """I5"""
    with pytest.raises(ImageError, match=reason):
        image_from_bytes(data)


def test_a_giant_is_refused_from_its_header() -> None:
    """I6: no pixel is decoded, and a warning of Pillow about bombs would be an error here."""
    started = time.process_time()
    with pytest.raises(ImageError, match=r"40000×40000, more than 50000000 pixels"):
        image_from_bytes(giant_png_header())
    assert time.process_time() - started < 0.5


def test_the_byte_cap_holds_for_every_way_in() -> None:
    limits = ImageLimits(max_bytes=100)
    data = encoded(quadrants(64, 64))
    with pytest.raises(ImageError, match="more than the 100"):
        image_from_bytes(data, limits)
    with pytest.raises(ImageError, match="more than the 100"):
        bytes_from_data_uri(data_uri(data), limits)


@pytest.mark.parametrize("format_", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_of_an_animation_is_taken(format_: str) -> None:
    """I7"""
    red, blue = Image.new("RGB", (40, 40), "red"), Image.new("RGB", (40, 40), "blue")
    data = encoded(red, format_, save_all=True, append_images=[blue], duration=100)
    assert image_from_bytes(data).getpixel((20, 20)) == pytest.approx((255, 0, 0), abs=3)


@pytest.mark.parametrize(
    "header", ["data:image/jpeg;charset=utf-8;base64,", "DATA:IMAGE/JPEG;BASE64,", "data:image/png;base64,"]
)
def test_data_uris_in_any_case_are_accepted(header: str) -> None:
    """I8"""
    payload = base64.b64encode(encoded(quadrants(64, 48))).decode()
    assert image_from_bytes(bytes_from_data_uri(header + payload)).size == (64, 48)


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("data:,x", "has to be base64"),
        ("data:image/jpeg,x", "has to be base64"),
        ("data:image/jpeg;base64;charset=utf-8,eA==", "has to be base64"),
        ("data:image/jpeg;base64", "has to be a data: URI"),
        ("data:text/html;base64,eA==", "media type"),
        ("data:image/jpeg;base64,", "empty"),
        ("data:image/jpeg;base64,e", "not valid base64"),
        ("data:image/jpeg;base64,e=A=", "not valid base64"),
        ("data:image/jpeg;base64,e_-=", "not valid base64"),
        ("data:image/jpeg;base64,é", "not valid base64"),
        ("hello", "has to be a data: URI"),
        ("", "has to be a data: URI"),
    ],
)
def test_other_data_uris_are_refused(uri: str, reason: str) -> None:
    """I8"""
    with pytest.raises(ImageError, match=reason):
        image_from_bytes(bytes_from_data_uri(uri))


@pytest.mark.parametrize("white_space", [" ", "\n", "\r\n", "\t"])
@pytest.mark.parametrize("position", [0, 40, None])
def test_white_space_in_the_payload_is_refused(white_space: str, position: int | None) -> None:
    """I8: in a picture, and in a frame of a clip."""
    payload = base64.b64encode(encoded(quadrants(64, 47), "JPEG")).decode()
    split = len(payload) if position is None else position
    broken = payload[:split] + white_space + payload[split:]
    with pytest.raises(ImageError, match="without line breaks and other white space"):
        bytes_from_data_uri("data:image/jpeg;base64," + broken)
    with pytest.raises(ImageError, match=r"frame 2: .*without line breaks and other white space"):
        clip_from_data_uri(f"data:video/jpeg;base64,{payload},{broken}", None, VideoLimits())


@pytest.mark.parametrize("height", [46, 47, 48])
def test_missing_padding_of_a_payload_is_nothing(height: int) -> None:
    """Browsers leave it away."""
    payload = base64.b64encode(encoded(quadrants(64, height))).decode()
    data = bytes_from_data_uri("data:image/png;base64," + payload.rstrip("="))
    assert image_from_bytes(data).size == (64, height)


def test_random_bytes_are_refused_at_once() -> None:
    """I9"""
    uri = data_uri(os.urandom(6_000_000))
    started = time.process_time()
    with pytest.raises(ImageError, match="these 6000000 bytes are not"):
        image_from_bytes(bytes_from_data_uri(uri))
    assert time.process_time() - started < 1


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_damage_anywhere_is_an_answer_and_never_a_crash(format_: str) -> None:
    """I5, I9: whatever a plugin trips over comes out as `ImageError`."""
    rng = np.random.default_rng(1)
    good = np.frombuffer(encoded(quadrants(64, 64), format_), np.uint8)
    for _ in range(200):
        damaged = good.copy()
        places = rng.integers(0, min(len(good), 400), 3)
        damaged[places] = rng.integers(0, 256, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(ImageError):
                assert image_from_bytes(damaged.tobytes()).mode == "RGB"


def test_a_png_that_lies_about_its_size_is_refused() -> None:
    """I6: 100 x 100 in the header, four bytes of pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 100, 100, 8, 2, 0, 0, 0)
    data = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0\0\0\0"))
        + chunk(b"IEND", b"")
    )
    with pytest.raises(ImageError, match="PNG image is damaged or cut short"):
        image_from_bytes(data)


def test_the_buffer_of_a_good_image_is_not_kept() -> None:
    """The result owns its pixels: nothing points at the sender's bytes or metadata."""
    source = io.BytesIO()
    quadrants(64, 48).save(source, "JPEG", comment=b"secret", dpi=(72, 72))
    assert image_from_bytes(source.getvalue()).info == {}
