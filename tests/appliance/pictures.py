"""Pictures for tests, drawn and encoded here."""

import base64
import io
import struct
import zlib
from typing import Any

from PIL import Image


def quadrants(width: int, height: int) -> Image.Image:
    """Red, green / blue, white quarters: every flip and rotation looks different."""
    image = Image.new("RGB", (width, height), "red")
    image.paste("green", (width // 2, 0, width, height // 2))
    image.paste("blue", (0, height // 2, width // 2, height))
    image.paste("white", (width // 2, height // 2, width, height))
    return image


def encoded(image: Image.Image, format_: str = "PNG", **options: Any) -> bytes:
    """The image as a file's bytes."""
    buffer = io.BytesIO()
    image.save(buffer, format_, **options)
    return buffer.getvalue()


def data_uri(data: bytes, media_type: str = "image/png") -> str:
    """The bytes as a `data:` URI."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def giant_png_header() -> bytes:
    """A PNG of 40,000 x 40,000 by its header, in 90 bytes."""
    parts = [b"\x89PNG\r\n\x1a\n"]
    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 16)), (b"IEND", b"")):
        parts.append(struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)))
    return b"".join(parts)
