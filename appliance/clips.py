"""The door for clips: videos and lists of frames from outside become pictures in the order of time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from PIL import Image

from appliance.images import (
    ImageError,
    ImageLimits,
    bytes_from_data_uri,
    from_base64,
    image_from_bytes,
    image_size,
    split_data_uri,
)
from vision.errors import SourceError
from vision.video_clip import DEFAULT_FPS, ClipLimits, VideoClip

_CONTAINERS = {
    "video/avi": "avi",
    "video/matroska": "matroska",
    "video/mp2t": "mpegts",
    "video/mp4": "mp4",
    "video/mpeg": "mpeg",
    "video/quicktime": "mov",
    "video/webm": "webm",
    "video/x-matroska": "matroska",
    "video/x-msvideo": "avi",
}
_MARKS = {
    "avi": (8, b"AVI "),
    "matroska": (0, b"\x1a\x45\xdf\xa3"),
    "mp4": (4, b"ftyp"),
    "mpeg": (0, b"\x00\x00\x01\xba"),
}
"""Where a file of that kind (as FFmpeg calls it) says so, and how; WebM is a kind of Matroska."""
_FRAMES = "video/jpeg"
CLIP_FORM = "data:video/mp4;base64,… or frames as data:video/jpeg;base64,FRAME,FRAME,…"


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """What the door lets through: encoded bytes and pixels are those of all frames of a video together."""

    max_bytes: int = 20 * 2**20
    max_pixels: int = 50_000_000
    clip: ClipLimits = field(default_factory=ClipLimits)
    image: ImageLimits = field(default_factory=ImageLimits)


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """Pictures of one size, two or more, in the order of time; `fps` of them make a second."""

    frames: list[Image.Image]
    fps: float


def clip_from_data_uri(uri: str, fps: float | None, limits: VideoLimits) -> Clip:
    """A video file, of which two frames a second are taken or `fps`; or JPEG frames with commas between.

    Raises `ImageError` for what is no video or exceeds a limit.
    """
    media_type, payload = split_data_uri(uri, "a video", CLIP_FORM)
    if len(payload) > limits.max_bytes * 4 // 3 + 4:
        raise ImageError(f"the video has more than the {limits.max_bytes} bytes that are accepted")
    if media_type == _FRAMES:
        num_frames = payload.count(",") + 1
        parts = payload.split(",", limits.clip.max_frames)
        encoded = (from_base64(part, limits.max_bytes, "frame") for part in parts)
        return Clip(_pictures(encoded, num_frames, limits), fps or DEFAULT_FPS)
    if media_type not in _CONTAINERS:
        known = ", ".join([_FRAMES, *_CONTAINERS])
        raise ImageError(f"the media type of the data: URI is {media_type or 'missing'!r}; it may be {known}")
    data = from_base64(payload, limits.max_bytes, "video")
    try:
        images, rate = VideoClip(data, _container(data, media_type)).sampled(fps, limits.clip)
    except SourceError as error:
        raise ImageError(f"{error} (sent as {media_type})") from error
    return Clip([Image.fromarray(image[..., ::-1].copy()) for image in images], rate)


def _container(data: bytes, media_type: str) -> str:
    """What kind of file it is by its first bytes, or else as it was sent."""
    kinds = (kind for kind, (at, mark) in _MARKS.items() if data.startswith(mark, at))
    return next(kinds, _CONTAINERS[media_type])


def clip_from_frames(uris: Sequence[str], fps: float | None, limits: VideoLimits) -> Clip:
    """Frames that are ``data:image/…`` URIs each; raises `ImageError`, which names the frame."""
    if sum(map(len, uris)) > limits.max_bytes * 4 // 3 + 64 * len(uris):
        raise ImageError(f"the video has more than the {limits.max_bytes} bytes that are accepted")
    encoded = (bytes_from_data_uri(uri, limits.image) for uri in uris)
    return Clip(_pictures(encoded, len(uris), limits), fps or DEFAULT_FPS)


def _pictures(encoded: Iterable[bytes], num_frames: int, limits: VideoLimits) -> list[Image.Image]:
    most = limits.clip.max_frames
    if not 2 <= num_frames <= most:
        raise ImageError(f"the video has {num_frames} frames; it may have 2 to {most}")
    frames: list[Image.Image] = []
    source = iter(encoded)
    for number in range(1, num_frames + 1):
        try:
            data = next(source)
            width, height = image_size(data, limits.image)
            if num_frames * width * height > limits.max_pixels:
                raise ImageError(
                    f"it is {width}×{height}; the frames have more than {limits.max_pixels} pixels together; "
                    "send fewer, or smaller ones"
                )
            frames.append(image_from_bytes(data, limits.image))
        except ImageError as error:
            raise ImageError(f"frame {number}: {error}") from error
        _check_size(frames)
    return frames


def _check_size(frames: Sequence[Image.Image]) -> None:
    first, last = frames[0], frames[-1]
    if last.size != first.size:
        raise ImageError(
            f"frame {len(frames)} is {last.width}×{last.height}, the first {first.width}×{first.height}; "
            "the frames of a video have one size"
        )
