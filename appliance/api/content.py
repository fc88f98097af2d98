"""From the messages of a chat request to those of the engine: images fetched from the request or a camera."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from PIL import Image

from appliance.api.errors import ApiError, bad_request
from appliance.api.schemas import Message, Part
from appliance.api.services import Services
from appliance.images import ImageError, ImageLimits, image_from_bytes, image_from_data_uri

_CAMERA_SCHEME = "camera://"
_ROLES = {"developer": "system"}


async def engine_messages(messages: Sequence[Message], services: Services) -> list[dict[str, Any]]:
    """The engine's form of `messages`; images are decoded in a thread.

    Raises `ApiError` that names the part: 400 for what is no image or not allowed, 503 for a camera
    that has no frame yet.
    """
    _check_parts(messages, services.limits.max_images)
    frames: dict[str, bytes] = {}
    for where, _, part in _parts(messages):
        name = _camera_name(part)
        if name is not None and name not in frames:
            frames[name] = await _frame(name, f"{where}.{part.type}", services)
    return await services.in_thread(lambda: _build(messages, frames, services.limits.image))


def _parts(messages: Sequence[Message]) -> Iterator[tuple[str, Message, Part]]:
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content):
            yield f"messages[{i}].content[{j}]", message, part


def _check_parts(messages: Sequence[Message], max_images: int) -> None:
    images = [found for found in _parts(messages) if found[2].type != "text"]
    for number, (where, message, part) in enumerate(images, 1):
        if message.role != "user":
            raise bad_request(f"{where}: only a user's message may hold images", param=where)
        if number > max_images:
            raise bad_request(f"{where}: more than {max_images} images in one request", param=where)
        _check_url(part, f"{where}.image_url")


def _check_url(part: Part, where: str) -> None:
    if part.image_url is None or _camera_name(part) is not None:
        return
    scheme = part.image_url.url[:8].partition(":")[0].lower()
    if scheme == "data":
        return
    # why: the URL itself is not repeated, since it may hold a password
    reason = (
        "fetching images over http(s) is off on this server"
        if scheme in ("http", "https")
        else "only data: URIs and camera://NAME are accepted"
    )
    message = f"{where}: {reason}; send the image as data:image/jpeg;base64,…"
    raise bad_request(message, param=where, code="invalid_image_url")


def _camera_name(part: Part) -> str | None:
    if part.type == "camera":
        return part.camera
    url = part.image_url.url if part.image_url else ""
    is_camera = url[: len(_CAMERA_SCHEME)].lower() == _CAMERA_SCHEME
    return url[len(_CAMERA_SCHEME) :].rstrip("/") if is_camera else None


async def _frame(name: str, where: str, services: Services) -> bytes:
    try:
        return await services.camera_frame(name)
    except ApiError as error:
        if error.code != "camera_not_found":
            raise
        raise bad_request(error.message, param=where, code=error.code) from None


def _build(
    messages: Sequence[Message], frames: Mapping[str, bytes], limits: ImageLimits
) -> list[dict[str, Any]]:
    built = []
    for i, message in enumerate(messages):
        parts = [
            _build_part(part, f"messages[{i}].content[{j}]", frames, limits)
            for j, part in enumerate(message.content)
        ]
        is_text_only = len(parts) == 1 and parts[0]["type"] == "text"
        content = parts[0]["text"] if is_text_only else parts
        built.append({"role": _ROLES.get(message.role, message.role), "content": content})
    return built


def _build_part(part: Part, where: str, frames: Mapping[str, bytes], limits: ImageLimits) -> dict[str, Any]:
    if part.type == "text":
        return {"type": "text", "text": part.text}
    field = f"{where}.{part.type}"
    try:
        return {"type": "image", "image": _image(part, frames, limits)}
    except ImageError as error:
        raise bad_request(f"{field}: {error}", param=field, code="invalid_image") from None


def _image(part: Part, frames: Mapping[str, bytes], limits: ImageLimits) -> Image.Image:
    name = _camera_name(part)
    if name is not None:
        return image_from_bytes(frames[name], limits)
    assert part.image_url is not None
    return image_from_data_uri(part.image_url.url, limits)
