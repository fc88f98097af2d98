"""The images and videos of one request: measured by their headers first, then decoded one by one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from appliance.api.errors import bad_request
from appliance.api.schemas import Part
from appliance.api.services import ApiLimits
from appliance.clips import Clip, VideoLimits, clip_from_data_uri, clip_from_frames
from appliance.images import ImageError, bytes_from_data_uri, image_from_bytes, image_size

CAMERA_SCHEME = "camera://"
# why: what a decoder, a change of mode and an alpha channel take beside the pixels that are kept
_WHILE_DECODING = 3


class Pictures:
    """What a request shows, part by part.

    Args:
        limits: What may be sent.
        frames: The newest frames (JPEG) of the cameras that the request names.
    """

    def __init__(self, limits: ApiLimits, frames: Mapping[str, bytes]) -> None:
        self.num_kept = 0
        self._limits, self._frames = limits, frames
        self._images: dict[str, bytes] = {}
        self._num_sent = self._num_needed = self._most = 0

    @property
    def num_needed(self) -> int:
        """Pixels that are in memory at once, at most, while all this is decoded."""
        return self._num_needed + _WHILE_DECODING * self._most

    def measure(self, part: Part, where: str) -> None:
        """Take in a part; raises `ApiError` (400) for what no image begins with, and for too many pixels."""
        if part.type == "text":
            return
        if part.is_video:
            self._need(self._limits.video.max_pixels, self._limits.video.max_pixels)
            return
        limits = self._limits.image
        with _refusals(part, where):
            data = self._encoded(part)
            width, height = image_size(data, limits)
        self._images[where] = data
        self._need(min(width * height, limits.max_kept_pixels), width * height)
        self._count(width * height, part, where)

    def part(self, part: Part, where: str) -> dict[str, Any]:
        """A part as the engine takes it; raises `ApiError` (400)."""
        if part.type == "text":
            return {"type": "text", "text": part.text}
        with _refusals(part, where):
            if not part.is_video:
                image = image_from_bytes(self._images.pop(where), self._limits.image)
                self.num_kept += image.width * image.height
                return {"type": "image", "image": image}
            clip = _clip(part, self._limits.video)
        num_pixels = sum(frame.width * frame.height for frame in clip.frames)
        self.num_kept += num_pixels
        self._count(num_pixels, part, where)
        return {"type": "video", "frames": clip.frames, "fps": clip.fps}

    def _encoded(self, part: Part) -> bytes:
        name = camera_name(part)
        if name is not None:
            return self._frames[name]
        assert part.image_url is not None
        return bytes_from_data_uri(part.image_url.url, self._limits.image)

    def _need(self, num_kept: int, num_decoded: int) -> None:
        self._num_needed += num_kept
        self._most = max(self._most, num_decoded)

    def _count(self, num_pixels: int, part: Part, where: str) -> None:
        self._num_sent += num_pixels
        if self._num_sent > self._limits.max_pixels:
            field = f"{where}.{part.type}"
            message = (
                f"with it the pictures of this request have more than {self._limits.max_pixels} pixels "
                "together; send fewer, or smaller ones"
            )
            raise bad_request(f"{field}: {message}", param=field, code="too_many_pixels")


def camera_name(part: Part) -> str | None:
    """The camera whose newest frame a part asks for; None for another part."""
    if part.type == "camera":
        return part.camera
    url = part.image_url.url if part.type == "image_url" and part.image_url else ""
    is_camera = url[: len(CAMERA_SCHEME)].lower() == CAMERA_SCHEME
    return url[len(CAMERA_SCHEME) :].rstrip("/") if is_camera else None


@contextmanager
def _refusals(part: Part, where: str) -> Iterator[None]:
    field = f"{where}.{part.type}"
    try:
        yield
    except ImageError as error:
        code = "invalid_video" if part.is_video else "invalid_image"
        raise bad_request(f"{field}: {error}", param=field, code=code) from None


def _clip(part: Part, limits: VideoLimits) -> Clip:
    if part.video is not None and part.type == "video":
        return clip_from_frames(part.video, part.fps, limits)
    assert part.video_url is not None
    return clip_from_data_uri(part.video_url.url, part.video_url.fps or part.fps, limits)
