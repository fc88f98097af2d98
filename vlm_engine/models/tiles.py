"""Tiles as the families that cut images into them hand them over: every tile is an image to the engine."""

import hashlib

from torch import Tensor

from vlm_engine.models.base import ImageInput


def tile_digest(image: bytes, tile: int, cut: str = "") -> bytes:
    """Digest of one tile of an image, from the image's digest, the tile's number and how it was cut."""
    return hashlib.sha256(image + b"%d" % tile + cut.encode()).digest()


def tile_inputs(pixels: Tensor | None, patch: int, scale: int) -> tuple[ImageInput, ...]:
    """Tiles as patches, the ``scale * scale`` patches of an image token together, row by row.

    invariant: tiles are full, since the processors resize an image to whole tiles; so no pixel
    mask is read.

    Args:
        pixels: ``[num_tiles, channels, height, width]``; None for no image.
        patch: Pixels of a patch's side; what is left over at the right and below is not read.
        scale: Patches of an image token's side.

    Returns:
        For each tile ``[rows * columns, channels * patch * patch]``.
    """
    if pixels is None:
        return ()
    num_tiles, channels, height, width = pixels.shape
    rows, columns = height // patch, width // patch
    cut = pixels[:, :, : rows * patch, : columns * patch]
    parts = cut.reshape(num_tiles, channels, rows // scale, scale, patch, columns // scale, scale, patch)
    patches = parts.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(num_tiles, rows * columns, -1)
    return tuple(ImageInput(tile, (1, rows, columns)) for tile in patches)


def in_token_order(table: Tensor, scale: int) -> Tensor:
    """A value for each patch, ``[rows, columns]``, in the order in which `tile_inputs` puts the patches."""
    rows, columns = table.shape
    return table.reshape(rows // scale, scale, columns // scale, scale).transpose(1, 2).flatten()
