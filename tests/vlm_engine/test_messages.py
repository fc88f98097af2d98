"""What families share of conversations."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlm_engine import ImageRejected, RequestError
from vlm_engine.models.messages import collect_clips, collect_images, image_digest, walk_parts

MODES = ("1", "L", "P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "I;16")
SHADES = np.arange(64 * 48).reshape(48, 64).astype(np.uint8)


def test_digests_tell_shape_and_mode_apart() -> None:
    """E10: the same bytes as RGB, as grey, in another shape; a copy is the same."""
    data = bytes(range(256)) * 36
    shapes = [("RGB", (64, 48)), ("RGB", (48, 64)), ("L", (192, 48)), ("L", (48, 192)), ("RGBA", (48, 48))]
    images = [Image.frombytes(mode, size, data) for mode, size in shapes]
    assert len({image_digest(image) for image in images}) == len(images)
    assert image_digest(images[0].copy()) == image_digest(images[0])


def colored(seed: int, mode: str = "P") -> Image.Image:
    image = Image.fromarray(SHADES).convert("P")
    image.putpalette(np.random.default_rng(seed).integers(0, 256, 768, dtype=np.uint8).tobytes())
    return image.convert(mode)


@pytest.mark.parametrize("mode", ["P", "PA"])
def test_digests_tell_palettes_apart(mode: str) -> None:
    assert image_digest(colored(1, mode)) == image_digest(colored(1, mode))
    assert image_digest(colored(1, mode)) != image_digest(colored(2, mode))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_digests_tell_apart_what_is_transparent(mode: str) -> None:
    """Some families put what is transparent on white."""
    opaque, clear = colored(1).convert(mode), colored(1).convert(mode)
    clear.info["transparency"] = (1, 2, 3) if mode == "RGB" else 3
    assert image_digest(opaque) != image_digest(clear)


@pytest.mark.parametrize("mode", MODES)
def test_digests_in_every_mode(mode: str) -> None:
    """One pixel is enough, and a file that was not read yet is the picture that it becomes."""
    one, other = Image.new(mode, (8, 8)), Image.new(mode, (8, 8))
    assert image_digest(one) == image_digest(other)
    if mode not in ("P", "PA"):
        num_bands = len(one.getbands())
        other.paste(1 if num_bands == 1 else (1,) * num_bands, (3, 3, 4, 4))
        assert image_digest(one) != image_digest(other)
    if mode in ("1", "L", "RGB", "RGBA", "LA", "I;16"):
        file = io.BytesIO()
        one.save(file, "PNG")
        assert image_digest(Image.open(file)) == image_digest(one)


@pytest.mark.parametrize(
    "array",
    [np.asfortranarray(SHADES), SHADES[::2, ::2], SHADES.astype(np.uint16), SHADES > 9, SHADES.astype("f4")],
    ids=lambda array: str(array.dtype),
)
def test_digests_of_arrays_in_any_order(array: Any) -> None:
    image = Image.fromarray(array)
    assert image_digest(image) == image_digest(Image.fromarray(np.ascontiguousarray(array)))
    assert image_digest(image) != image_digest(Image.fromarray(np.ascontiguousarray(array[::-1])))


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def test_a_file_that_is_cut_off_is_refused_where_it_stands() -> None:
    file = io.BytesIO()
    colored(1, "RGB").save(file, "PNG")
    cut = file.getvalue()[:600]
    image = Image.open(io.BytesIO(cut))
    with pytest.raises(ImageRejected, match="cannot be read") as caught:
        collect_images(user({"type": "text", "text": "x"}, {"type": "image", "image": image}))
    assert caught.value.field == "messages[0].content[1]"
    frames = [Image.open(io.BytesIO(cut)) for _ in range(2)]
    with pytest.raises(ImageRejected) as caught:
        collect_clips(user({"type": "video", "frames": frames}))
    assert caught.value.field == "messages[0].content[0].frames"
    with pytest.raises(ImageRejected, match="no pixels"):
        collect_images(user({"type": "image", "image": Image.new("RGB", (0, 5))}))
    with pytest.raises(ImageRejected, match="more than 8 bits"):
        collect_images(user({"type": "image", "image": Image.new("I;16", (5, 5), 30000)}))


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (["hello"], "messages[0]"),
        ([{"role": "user", "content": "half \ud83d"}], "messages[0].content"),
        (user({"type": "text", "text": "\udc4d"}), "messages[0].content[0]"),
        (user({"type": "image", "image": colored(1), "scale": "1"}), "messages[0].content[0].scale"),
    ],
)
def test_what_no_tokenizer_or_processor_can_take_names_its_field(messages: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        list(walk_parts(messages))
    assert caught.value.field == field
