"""Videos in chat requests: files and frames in the order of time, answered or refused by part."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from appliance.api import ApiLimits
from appliance.clips import VideoLimits
from tests.appliance.api.serving import MODEL, Servers
from tests.appliance.pictures import data_uri, encoded
from tests.vision.videos import write_video

SIZE = (96, 64)
# why: two frames of 3x2 tokens each are read at once
TOKENS_OF_TWO = 6


def frame(shade: int, size: tuple[int, int] = SIZE) -> bytes:
    return encoded(Image.new("RGB", size, (shade, 255 - shade, 90)), "JPEG")


def as_jpegs(frames: Sequence[bytes], **more: Any) -> dict[str, Any]:
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(data).decode() for data in frames)
    return {"type": "video_url", "video_url": {"url": url, **more}}


def as_list(frames: Sequence[bytes], **more: Any) -> dict[str, Any]:
    return {"type": "video", "video": [data_uri(data, "image/jpeg") for data in frames], **more}


def as_file(folder: Path, num_frames: int, **more: Any) -> dict[str, Any]:
    images = [np.full((SIZE[1], SIZE[0], 3), 8 * n, np.uint8) for n in range(num_frames)]
    data = write_video(folder / "clip.mp4", images, fps=10).read_bytes()
    return {"type": "video_url", "video_url": {"url": data_uri(data, "video/mp4"), **more}}


def as_webm(folder: Path, media_type: str) -> dict[str, Any]:
    images = [np.full((SIZE[1], SIZE[0], 3), 8 * n, np.uint8) for n in range(30)]
    data = write_video(folder / "clip.webm", images, fps=10, codec="libvpx").read_bytes()
    return {"type": "video_url", "video_url": {"url": data_uri(data, media_type)}}


def ask(http: httpx.Client, *parts: dict[str, Any]) -> httpx.Response:
    content = [*parts, {"type": "text", "text": "What is happening?"}]
    messages = [{"role": "user", "content": content}]
    body = {"model": MODEL, "max_tokens": 8, "temperature": 0, "messages": messages}
    return http.post("/v1/chat/completions", json=body)


def answer(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def prompt_tokens(reply: httpx.Response) -> int:
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens"])


def test_the_order_and_the_times_of_frames_count(http: httpx.Client) -> None:
    frames = [frame(shade) for shade in (0, 80, 160, 240)]
    replies = [
        ask(http, part) for part in (as_jpegs(frames), as_jpegs(frames[::-1]), as_jpegs(frames, fps=0.1))
    ]
    assert len(set(map(answer, replies))) == 3
    assert prompt_tokens(replies[0]) - prompt_tokens(ask(http, as_jpegs(frames[:2]))) >= TOKENS_OF_TWO


def test_a_list_of_frames_is_the_same_clip(http: httpx.Client) -> None:
    frames = [frame(shade) for shade in (5, 85, 165, 245)]
    replies = [ask(http, part) for part in (as_jpegs(frames, fps=1.0), as_list(frames, fps=1.0))]
    assert len(set(map(answer, replies))) == 1
    details = replies[1].json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == (prompt_tokens(replies[1]) - 1) // 16 * 16


def test_a_file_is_what_its_bytes_say(http: httpx.Client, tmp_path: Path) -> None:
    """Whatever it is called: programs name any video MP4."""
    replies = [ask(http, as_webm(tmp_path, kind)) for kind in ("video/webm", "video/mp4", "video/x-msvideo")]
    assert len({(answer(reply), prompt_tokens(reply)) for reply in replies}) == 1


def test_a_file_is_sampled_in_time(http: httpx.Client, tmp_path: Path) -> None:
    """3 s at 10 frames a second: 6 frames, 12 if so many are asked for."""
    few, many = ask(http, as_file(tmp_path, 30)), ask(http, as_file(tmp_path, 30, fps=4.0))
    assert prompt_tokens(many) - prompt_tokens(few) >= 3 * TOKENS_OF_TWO


def test_clips_and_images_in_one_prompt(http: httpx.Client) -> None:
    """Mixed, in any order, each counted."""
    picture = {"type": "image_url", "image_url": {"url": data_uri(frame(7, (64, 64)), "image/jpeg")}}
    clip = as_list([frame(shade) for shade in (1, 2)])
    one, both = ask(http, picture), ask(http, picture, clip, picture, as_list([frame(3), frame(4)]))
    assert prompt_tokens(both) - prompt_tokens(one) >= 4 + 2 * TOKENS_OF_TWO


PART = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("part", "param", "message"),
    [
        (as_jpegs([frame(1)]), "video_url", "the video has 1 frames; it may have 2 to 64"),
        (as_list([frame(1)] * 65), "video", "the video has 65 frames; it may have 2 to 64"),
        (as_jpegs([frame(1)] * 65), "video_url", "the video has 65 frames"),
        (as_jpegs([frame(1), frame(2, (64, 64))]), "video_url", "frame 2 is 64×64, the first 96×64"),
        (as_jpegs([frame(1), b"!!"]), "video_url", "frame 2: these 2 bytes are not a"),
        (as_list([frame(1), frame(1)[:700]]), "video", "frame 2: the JPEG image is damaged"),
        (as_jpegs([frame(1)] * 2, fps=0), "video_url.fps", "greater than 0"),
        (as_list([frame(1)] * 2, fps=-1.0), "fps", "greater than 0"),
        ({"type": "video", "video": ["data:video/mp4;base64,AA=="] * 2}, "video", "image/… is needed"),
        ({"type": "video", "video": ["/etc/passwd"] * 2}, "video", "only data: URIs"),
        (
            {"type": "video_url", "video_url": "data:video/mp4;base64,AAAA"},
            "video_url",
            "the clip cannot be read as a video: Invalid data found when processing "
            "input (sent as video/mp4)",
        ),
        (
            {"type": "video_url", "video_url": "data:application/x-mpegurl;base64,AAAA"},
            "video_url",
            "'application/x-mpegurl'; it may be video/jpeg, video/avi",
        ),
        (
            {"type": "video_url", "video_url": "https://user:secret@example.org/street.mp4"},
            "video_url",
            "fetching videos over http(s) is off",
        ),
        ({"type": "video_url", "video_url": "file:///etc/passwd"}, "video_url", "only data: URIs are"),
        ({"type": "video_url", "video_url": "camera://street"}, "video_url", "only data: URIs are"),
        ({"type": "video_url"}, "", "needs the field 'video_url'"),
        ({"type": "video"}, "", "needs the field 'video'"),
    ],
)
def test_what_is_no_video_is_refused(
    http: httpx.Client, part: dict[str, Any], param: str, message: str
) -> None:
    reply = ask(http, part)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert message in error["message"]
    assert "secret" not in error["message"]
    assert error["param"] == f"{PART}.{param}".rstrip(".")


def test_limits_of_a_request(servers: Servers) -> None:
    """Videos, bytes and pixels together have limits, each with its own message."""
    video = VideoLimits(max_bytes=20_000, max_pixels=3 * SIZE[0] * SIZE[1])
    running = servers.start(limits=ApiLimits(max_videos=2, video=video, max_pixels=5 * SIZE[0] * SIZE[1]))
    clip = as_list([frame(1)] * 2)
    parts = {
        "more than 2 videos in one request": [clip] * 3,
        "the video has more than the 20000 bytes": [as_list([encoded(noise(), "PNG")] * 2)],
        "more than 18432 pixels together": [as_list([frame(1)] * 4)],
        "messages[0].content[1].video: with it the pictures of this request have more than 30720": [
            as_list([frame(1)] * 3),
            as_list([frame(1)] * 3),
        ],
    }
    with httpx.Client(base_url=running.url, timeout=60) as http:
        for message, content in parts.items():
            reply = ask(http, *content)
            assert reply.status_code == 400
            assert message in reply.json()["error"]["message"]
        assert ask(http, clip, clip).status_code == 200
    servers.stop(running)


def noise() -> Image.Image:
    """A picture that no format makes small."""
    pixels = np.random.default_rng(1).integers(0, 256, (SIZE[1], SIZE[0], 3), np.uint8)
    return Image.fromarray(pixels)
