"""Checks and digests of conversations that all families share."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image

from vlm_engine.errors import RequestError
from vlm_engine.request import Message

ROLES = ("system", "user", "assistant")


def walk_parts(messages: Sequence[Message]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Content parts with their field names; plain strings come as text parts.

    Raises:
        RequestError: No messages, an unknown role, or a part of no known shape.
    """
    if not messages:
        raise RequestError("at least one message is needed", field="messages")
    for i, message in enumerate(messages):
        field = f"messages[{i}]"
        if message.get("role") not in ROLES:
            raise RequestError(f"role must be one of {', '.join(ROLES)}", field=f"{field}.role")
        content = message.get("content")
        if isinstance(content, str):
            yield f"{field}.content", {"type": "text", "text": content}
        elif isinstance(content, Sequence):
            yield from (
                (f"{field}.content[{j}]", _checked(part, f"{field}.content[{j}]"))
                for j, part in enumerate(content)
            )
        else:
            raise RequestError("content must be a string or a list of parts", field=f"{field}.content")


def _checked(part: Any, field: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part  # type: ignore[no-any-return]
    if kind == "image" and isinstance(part.get("image"), Image.Image):
        return part  # type: ignore[no-any-return]
    raise RequestError("a part is {type: text, text: …} or {type: image, image: PIL image}", field=field)


def collect_images(messages: Sequence[Message]) -> list[tuple[Image.Image, str]]:
    """All images in order, with the fields they came in; the messages are checked on the way."""
    return [(part["image"], field) for field, part in walk_parts(messages) if part["type"] == "image"]


def refuse_reserved_text(messages: Sequence[Message], reserved: Sequence[str]) -> None:
    """Refuse text that would be read as image tokens.

    Raises:
        RequestError: A text part contains one of the `reserved` special tokens.
    """
    for field, part in walk_parts(messages):
        for token in reserved:
            if token in part.get("text", ""):
                raise RequestError(f"text must not contain the reserved token {token}", field=field)


def image_digest(image: Image.Image) -> bytes:
    """SHA-256 over mode, size and all pixels: equal digests mean equal pictures."""
    digest = hashlib.sha256(f"{image.mode}:{image.width}x{image.height}:".encode())
    digest.update(image.tobytes())
    return digest.digest()
