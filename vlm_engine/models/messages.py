"""Checks and digests of conversations that all families share."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from vlm_engine.errors import ImageRejected, RequestError
from vlm_engine.request import Message
from vlm_engine.sampling_params import is_whole_text

ROLES = ("system", "user", "assistant")
DEFAULT_FPS = 2.0
WIDE_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """A video of a message.

    Args:
        frames: Pictures of one size in the order of time, two or more.
        fps: Frames a second, at which they were taken.
        field: Where in the messages it is.
    """

    frames: tuple[Image.Image, ...]
    fps: float
    field: str


def walk_parts(messages: Sequence[Message]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Content parts with their field names; plain strings come as text parts.

    Raises:
        RequestError: No messages, an unknown role, or a part of no known shape.
    """
    if not messages:
        raise RequestError("at least one message is needed", field="messages")
    for i, message in enumerate(messages):
        field = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise RequestError("a message is {role: …, content: …}", field=field)
        if message.get("role") not in ROLES:
            raise RequestError(f"role must be one of {', '.join(ROLES)}", field=f"{field}.role")
        content = message.get("content")
        if isinstance(content, str):
            yield f"{field}.content", _checked({"type": "text", "text": content}, f"{field}.content")
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
        if not is_whole_text(part["text"]):
            raise RequestError("text must not contain half a character (a lone surrogate)", field=field)
        return part  # type: ignore[no-any-return]
    if kind == "image" and isinstance(part.get("image"), Image.Image):
        scale = part.get("scale", 1.0)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale <= 1:
            raise RequestError("an image's scale is greater than 0 and at most 1", field=f"{field}.scale")
        return part  # type: ignore[no-any-return]
    if kind == "video":
        return _checked_video(part, field)
    raise RequestError(
        "a part is {type: text, text: …}, {type: image, image: PIL image} or "
        "{type: video, frames: [PIL image, …], fps: …}",
        field=field,
    )


def _checked_video(part: dict[str, Any], field: str) -> dict[str, Any]:
    frames, fps = part.get("frames"), part.get("fps", DEFAULT_FPS)
    is_list = isinstance(frames, Sequence) and all(isinstance(frame, Image.Image) for frame in frames)
    if not is_list or len(part["frames"]) < 2:
        raise RequestError("a video is a list of two or more PIL images", field=f"{field}.frames")
    if len({(frame.size, frame.mode) for frame in part["frames"]}) > 1:
        raise RequestError("the frames of a video have one size and one mode", field=f"{field}.frames")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise RequestError("fps must be a positive number", field=f"{field}.fps")
    return part


def collect_images(messages: Sequence[Message]) -> list[tuple[Image.Image, str]]:
    """All images in order, with the fields they came in; the messages are checked on the way."""
    images = ((part["image"], field) for field, part in walk_parts(messages) if part["type"] == "image")
    return [(_read(image, field), field) for image, field in images]


def collect_clips(messages: Sequence[Message]) -> list[Clip]:
    """All videos in order; the messages are checked on the way."""
    return [_clip(part, field) for field, part in walk_parts(messages) if part["type"] == "video"]


def _clip(part: dict[str, Any], field: str) -> Clip:
    frames = tuple(_read(frame, f"{field}.frames") for frame in part["frames"])
    return Clip(frames, float(part.get("fps", DEFAULT_FPS)), field)


def _read(image: Image.Image, field: str) -> Image.Image:
    """A picture with its pixels: PIL reads those of a file when they are first looked at."""
    try:
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageRejected(f"the picture cannot be read: {error}", field=field) from error
    if not image.width or not image.height:
        raise ImageRejected("the picture has no pixels", field=field)
    if image.mode in WIDE_MODES:
        raise ImageRejected(
            f"the picture has more than 8 bits a pixel (mode {image.mode}), which would be cut off; scale "
            "them to 8 bits",
            field=field,
        )
    return image


def image_scale(messages: Sequence[Message]) -> float:
    """The smallest ``scale`` of the images of checked messages, 1 where none has one."""
    return min((part.get("scale", 1.0) for _, part in walk_parts(messages)), default=1.0)


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
    """SHA-256 over mode, size, colours that a palette or a mark makes, and all pixels.

    # invariant: equal digests mean equal pictures, whatever a processor makes of their mode.
    """
    marks = (image.getpalette("RGBA"), image.info.get("transparency"))
    digest = hashlib.sha256(f"{image.mode}:{image.width}x{image.height}:{marks}:".encode())
    digest.update(image.tobytes())
    return digest.digest()
