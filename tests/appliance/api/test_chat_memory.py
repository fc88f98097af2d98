"""What chats hold of their pictures: little, and not for long."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from appliance.api import ApiLimits
from appliance.images import image_from_bytes
from tests.appliance.api.serving import MODEL, Running, Servers, held_steps, wait_until
from tests.appliance.pictures import data_uri, encoded

LARGE = (7000, 7000)


def large(format_: str = "JPEG") -> bytes:
    return encoded(Image.new("RGB", LARGE, "navy"), format_)


def body(*images: bytes) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_uri(image, "image/jpeg")}} for image in images]
    content = [*parts, {"type": "text", "text": "what?"}]
    return {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}


def test_a_large_picture_is_made_as_small_as_any_model_reads_it():
    assert image_from_bytes(large()).size == (4096, 4096)
    assert image_from_bytes(encoded(Image.new("RGB", (4096, 4096)))).size == (4096, 4096)


def test_too_many_pixels_are_refused_by_their_headers(http: httpx.Client) -> None:
    """Six pictures of 49 megapixels: the third is named, and none is decoded."""
    before = psutil.Process().memory_info().rss
    reply = http.post("/v1/chat/completions", json=body(*[large()] * 6))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "messages[0].content[2].image_url"
    assert error["code"] == "too_many_pixels"
    assert "more than 100000000 pixels together; send fewer, or smaller ones" in error["message"]
    assert psutil.Process().memory_info().rss - before < 100 * 2**20


def test_pictures_of_many_requests_wait_for_room(servers: Servers) -> None:
    """Never more pixels than there is room for, and all are given back."""
    running = servers.start(limits=ApiLimits(max_pixels_in_hand=20_000_000))
    images = [encoded(noise(side), "PNG") for side in (700, 800, 900, 1000)]
    most = 0

    def ask(image: bytes) -> int:
        return httpx.post(f"{running.base_url}/chat/completions", json=body(image), timeout=60).status_code

    with ThreadPoolExecutor(12) as pool:
        replies = [pool.submit(ask, image) for image in images * 6]
        while not all(reply.done() for reply in replies):
            most = max(most, running.services.pixels.num_taken)
    assert {reply.result() for reply in replies} <= {200, 400}
    assert 0 < most <= 20_000_000
    wait_until(lambda: running.services.pixels.num_taken == running.services.bodies.num_taken == 0, "room")
    servers.stop(running)


def test_bodies_of_all_requests_have_one_room(servers: Servers) -> None:
    running = servers.start(limits=ApiLimits(max_bytes_in_hand=1000))
    reply = httpx.post(f"{running.base_url}/chat/completions", json={"model": "x" * 2000})
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "overloaded"
    assert running.services.bodies.num_taken == 0
    assert httpx.post(f"{running.base_url}/chat/completions", json=body()).status_code == 200
    servers.stop(running)


@pytest.mark.parametrize("stream", [True, False])
def test_pictures_are_gone_while_the_answer_is_made(server: Running, stream: bool) -> None:
    long = body(encoded(noise(64))) | {"max_tokens": 20, "ignore_eos": True, "stream": stream}
    with httpx.Client(base_url=server.base_url, timeout=60) as client, ThreadPoolExecutor(1) as pool:
        with held_steps(server.engine, after=3):
            reply = pool.submit(client.post, "/chat/completions", json=long)
            wait_until(lambda: server.engine.stats().num_running == 1, "a running chat")
            rooms = server.services.pixels, server.services.bodies
            wait_until(lambda: not any(room.num_taken for room in rooms), "room")
            assert not reply.done()
        assert reply.result().status_code == 200


def noise(side: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(side).integers(0, 256, (side, side, 3), np.uint8))
