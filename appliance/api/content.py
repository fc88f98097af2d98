"""From the messages of a chat request to those of the engine, with images and videos as pictures."""

from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from appliance.api.errors import ApiError, bad_request
from appliance.api.pictures import Pictures, camera_name
from appliance.api.schemas import Message, Part
from appliance.api.services import ApiLimits, Services
from appliance.clips import CLIP_FORM

_ROLES = {"developer": "system"}


async def engine_messages(
    messages: Sequence[Message], services: Services, held: AsyncExitStack
) -> list[dict[str, Any]]:
    """The engine's form of `messages`; images are decoded in a thread, as soon as there is room for pixels.

    `held` gets the room, which is to be given back when the pixels are gone. Raises `ApiError` that names the
    part: 400 for what is no image or not allowed, 503 for a camera that has no frame yet.
    """
    _check_parts(messages, services.limits)
    frames: dict[str, bytes] = {}
    for where, _, part in _parts(messages):
        name = camera_name(part)
        if name is not None and name not in frames:
            frames[name] = await _frame(name, f"{where}.{part.type}", services)
    pictures = Pictures(services.limits, frames)
    await services.in_thread(lambda: _measured(messages, pictures))
    place = await held.enter_async_context(services.pixels.place(pictures.num_needed))
    built = await services.in_thread(lambda: _build(messages, pictures))
    place.shrink(pictures.num_kept)
    return built


def _parts(messages: Sequence[Message]) -> Iterator[tuple[str, Message, Part]]:
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content):
            yield f"messages[{i}].content[{j}]", message, part


def _check_parts(messages: Sequence[Message], limits: ApiLimits) -> None:
    num_images = num_videos = 0
    for where, message, part in _parts(messages):
        if part.type == "text":
            continue
        if message.role != "user":
            raise bad_request(f"{where}: only a user's message may hold images and videos", param=where)
        num_videos += part.is_video
        num_images += not part.is_video
        if num_images > limits.max_images:
            raise bad_request(f"{where}: more than {limits.max_images} images in one request", param=where)
        if num_videos > limits.max_videos:
            raise bad_request(f"{where}: more than {limits.max_videos} videos in one request", param=where)
        for url in part.urls:
            _check_url(url, part, f"{where}.{part.type}")


def _check_url(url: str, part: Part, where: str) -> None:
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data" or camera_name(part) is not None:
        return
    what, allowed, form = (
        ("videos", "data: URIs", CLIP_FORM)
        if part.is_video
        else ("images", "data: URIs and camera://NAME", "the image as data:image/jpeg;base64,…")
    )
    # why: the URL itself is not repeated, since it may hold a password
    reason = (
        f"fetching {what} over http(s) is off on this server"
        if scheme in ("http", "https")
        else f"only {allowed} are accepted"
    )
    code = "invalid_video_url" if part.is_video else "invalid_image_url"
    raise bad_request(f"{where}: {reason}; send {form}", param=where, code=code)


async def _frame(name: str, where: str, services: Services) -> bytes:
    try:
        return (await services.camera_frame(name)).jpeg
    except ApiError as error:
        if error.code != "camera_not_found":
            raise
        raise bad_request(error.message, param=where, code=error.code) from None


def _measured(messages: Sequence[Message], pictures: Pictures) -> None:
    for where, _, part in _parts(messages):
        pictures.measure(part, where)


def _build(messages: Sequence[Message], pictures: Pictures) -> list[dict[str, Any]]:
    built = []
    for i, message in enumerate(messages):
        parts = [pictures.part(part, f"messages[{i}].content[{j}]") for j, part in enumerate(message.content)]
        is_text_only = len(parts) == 1 and parts[0]["type"] == "text"
        content = parts[0]["text"] if is_text_only else parts
        built.append({"role": _ROLES.get(message.role, message.role), "content": content})
    return built
