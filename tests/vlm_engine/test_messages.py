"""What families share of conversations."""

from PIL import Image

from vlm_engine.models.messages import image_digest


def test_digests_tell_shape_and_mode_apart() -> None:
    """E10: the same bytes as RGB, as grey, in another shape; a copy is the same."""
    data = bytes(range(256)) * 36
    shapes = [("RGB", (64, 48)), ("RGB", (48, 64)), ("L", (192, 48)), ("L", (48, 192)), ("RGBA", (48, 48))]
    images = [Image.frombytes(mode, size, data) for mode, size in shapes]
    assert len({image_digest(image) for image in images}) == len(images)
    assert image_digest(images[0].copy()) == image_digest(images[0])
