"""What a chat request may not say: refused with a status, a field and a sentence before any answer."""

import gzip
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from PIL import Image

from tests.appliance.api.serving import MODEL, Running, is_idle
from tests.appliance.pictures import data_uri, encoded, giant_png_header, quadrants

GOOD: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def image(url: str) -> dict[str, Any]:
    return user({"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url}})


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def refused(http: httpx.Client, changes: dict[str, Any], status: int = 400) -> dict[str, Any]:
    """The error of a request that is refused in the same way whether it streams or not."""
    errors = []
    for stream in (False, True):
        reply = http.post("/v1/chat/completions", json=GOOD | {"stream": stream} | changes)
        assert reply.status_code == status, reply.text
        assert reply.headers["content-type"] == "application/json"
        errors.append(reply.json()["error"])
    assert errors[0] == errors[1]
    error: dict[str, Any] = errors[0]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return error


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hello"}, "messages", "valid array"),
        ({"messages": None}, "messages", "valid array"),
        ({"model": 3}, "model", "valid string"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'system', 'developer'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages[0].content",
            "string or a list of parts",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]},
            "messages[0]",
            "'tool_calls'",
        ),
        (
            user({"type": "input_audio"}),
            "messages[0].content[0].type",
            "'text', 'image_url', 'camera', 'video_url' or 'video'",
        ),
        (user({"type": "text"}), "messages[0].content[0]", "needs the field 'text'"),
        (user({"type": "text", "text": 3}), "messages[0].content[0].text", "valid string"),
        (user({"type": "image_url"}), "messages[0].content[0]", "needs the field 'image_url'"),
        (user({"type": "image_url", "image_url": {}}), "messages[0].content[0].image_url.url", "required"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": "2"}, "max_tokens", "valid integer"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "greater than or equal to 1"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": list("abcde")}, "stop", "at most 4"),
        ({"stop": [""]}, "stop[0]", "at least 1 character"),
        ({"stop": [1]}, "stop[0]", "valid string"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"min_p": 1.1}, "min_p", "less than or equal to 1"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 200}, "n", "less than or equal to 128"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
        ({"presence_penalty": -3}, "presence_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty", "from 0.01 to 100"),
        ({"top_k": 2**70}, "top_k", "integer of at least 0"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids, not 'x'"),
        ({"logit_bias": {"1": 101}}, "logit_bias[1]", "less than or equal to 100"),
        ({"logit_bias": {"100000": 1}}, "logit_bias", "there is no token 100000"),
        ({"logprobs": 1}, "logprobs", "valid boolean"),
        ({"top_logprobs": 2}, "top_logprobs", "needs 'logprobs'"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "greater than or equal to 0"),
        ({"stop_token_ids": [100000]}, "stop_token_ids", "there is no token 100000"),
        ({"min_tokens": 3}, "min_tokens", "at most max_tokens (2)"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "'text', 'json_object' or 'json_schema'",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs the field"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format",
            "needs",
        ),
        (schema({"type": "foo"}), "response_format.json_schema.schema", "Invalid type: foo"),
        (schema({"not": {}}), "response_format.json_schema.schema", "cannot be compiled: Unimplemented"),
        (schema({"$ref": "#/x"}), "response_format.json_schema.schema", "does not exist"),
        ({"structured_outputs": {}}, "structured_outputs", "give exactly one of"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "give exactly one of",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1 item"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]", "at least 1 character"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "cannot be compiled"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "cannot be compiled"),
        ({"structured_outputs": {"backend": "x"}}, "structured_outputs.backend", "not permitted"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "exclude each other",
        ),
    ],
)
def test_bad_fields_are_named(http: httpx.Client, changes: dict[str, Any], param: str, message: str) -> None:
    error = refused(http, changes)
    assert error["param"] == param
    assert message in error["message"]
    assert param in error["message"]


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"functions": [{"name": "f"}]},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "alloy"}},
        {"reasoning_effort": "high"},
        {"skip_special_tokens": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"web_search_options": {}},
    ],
)
def test_what_would_change_the_answer_is_refused(http: httpx.Client, changes: dict[str, Any]) -> None:
    (name,) = changes
    error = refused(http, changes)
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert f"'{name}' is not supported" in error["message"]


def test_a_misspelt_field_is_refused(http: httpx.Client) -> None:
    error = refused(http, {"max_token": 5})
    assert (error["param"], error["code"]) == ("max_token", "unknown_parameter")


def test_neutral_values_and_nulls_are_accepted(http: httpx.Client) -> None:
    nulls = dict.fromkeys(
        ("tools", "logprobs", "stop", "seed", "temperature", "stream_options", "audio", "n")
    )
    reply = http.post("/v1/chat/completions", json=GOOD | nulls | {"repetition_penalty": 1.0, "min_p": 0})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "changes",
    [
        {"stop": ""},
        {"max_tokens": 3.0, "seed": 7.0, "top_k": -1.0},
        {"skip_special_tokens": True, "add_generation_prompt": True},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": []}, *GOOD["messages"]]},
    ],
)
def test_what_clients_say_otherwise_and_mean_the_same(http: httpx.Client, changes: dict[str, Any]) -> None:
    reply = http.post("/v1/chat/completions", json=GOOD | changes)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'"hello"', b'{"temperature": NaN}'])
def test_a_body_that_is_no_json_object(http: httpx.Client, body: bytes) -> None:
    reply = http.post("/v1/chat/completions", content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_too_large(http: httpx.Client) -> None:
    """Refused by what it announces, and when it announces nothing."""
    size = 33 * 2**20
    for content in (b" " * size, iter([b" " * 2**20] * 33)):
        try:
            reply = http.post("/v1/chat/completions", content=content)
        except httpx.WriteError:  # why: a server may close while a refused body is still being sent
            continue
        assert reply.status_code == 413
        assert "33554432 bytes" in reply.json()["error"]["message"]


def test_an_unknown_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here; there is tiny") as raised:
        client.chat.completions.create(model="gpt-5", messages=GOOD["messages"])
    assert raised.value.code == "model_not_found"


def test_a_prompt_that_is_too_long(http: httpx.Client) -> None:
    error = refused(http, {"messages": [{"role": "user", "content": "hello " * 5000}]})
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"


def test_a_text_that_no_context_holds_is_not_even_counted(http: httpx.Client) -> None:
    """Twenty megabytes of text would hold up everybody for minutes."""
    error = refused(http, {"messages": [{"role": "user", "content": "word " * 4_000_000}]})
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages[0].content"
    assert "over 131072 characters" in error["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": [{"role": "user", "content": "x"}] * 10_001}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 5001}] * 2}, "messages"),
        ({"messages": [{"role": "x", "content": 5}] * 10_000}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [5] * 200_000}]}, "messages[0].content[0]"),
        ({"k" * 1_000_000: 1}, "k" * 100 + "…"),
        ({"stop": ["a" * 1001]}, "stop[0]"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"stop_token_ids": [1] * 100_000}, "stop_token_ids"),
    ],
)
def test_too_much_of_anything_is_refused_in_a_short_sentence(
    http: httpx.Client, changes: dict[str, Any], param: str
) -> None:
    error = refused(http, changes)
    assert error["param"] == param
    assert len(error["message"]) < 400


def test_a_body_that_is_compressed(http: httpx.Client) -> None:
    body = gzip.compress(json.dumps(GOOD).encode())
    reply = http.post("/v1/chat/completions", content=body, headers={"Content-Encoding": "gzip"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_encoding")


@pytest.mark.parametrize("first", [-1, 2**63, "x"])
def test_a_step_that_cannot_be(http: httpx.Client, first: object) -> None:
    assert http.get(f"/v1/trace?first={first}").status_code == 400


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/secret.jpg",
        "https://user:p@ssword@169.254.169.254/latest",
        "HTTP://localhost/",
        "file:///etc/passwd",
        "/etc/passwd",
        "exec:cat",
        "rtsp://camera/",
        "",
    ],
)
def test_nothing_is_fetched(http: httpx.Client, url: str) -> None:
    """A3; the URL is not repeated, since it may hold a password."""
    error = refused(http, image(url))
    assert error["param"] == "messages[0].content[1].image_url"
    assert error["code"] == "invalid_image_url"
    assert ("http(s) is off" in error["message"]) == url.lower().startswith("http")
    assert "p@ssword" not in error["message"]


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """A listener on which nobody may knock."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "u:p@localhost"]
)
def test_nobody_is_asked(http: httpx.Client, trap: socket.socket, host: str) -> None:
    """A3: by any name of a machine, and by any kind of part; so there is no redirect to be followed."""
    url = f"http://{host}:{trap.getsockname()[1]}/picture.jpg"
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": url.upper()}},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "video", "video": [url, url]},
    ):
        assert refused(http, user(part))["code"] in ("invalid_image_url", "invalid_video_url")


@pytest.mark.parametrize(
    "text",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{url}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{url}'\nduration 1\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video {port} RTP/AVP/TCP 96\n",
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period>'
        "<AdaptationSet><Representation id='1' bandwidth='1'><BaseURL>{url}</BaseURL></Representation>"
        "</AdaptationSet></Period></MPD>",
        '<svg xmlns="http://www.w3.org/2000/svg"><image href="{url}" width="9" height="9"/></svg>',
    ],
)
@pytest.mark.parametrize("kind", ["video/mp4", "video/x-matroska", "image/png"])
def test_what_a_file_names_is_not_fetched(
    http: httpx.Client, trap: socket.socket, text: str, kind: str
) -> None:
    """A3: playlists and other texts that lead elsewhere, whatever they call themselves."""
    port = trap.getsockname()[1]
    url = data_uri(text.format(url=f"http://127.0.0.1:{port}/1.ts", port=port).encode(), kind)
    is_video = kind.startswith("video")
    part = (
        {"type": "video_url", "video_url": {"url": url}}
        if is_video
        else image(url)["messages"][0]["content"][1]
    )
    assert refused(http, user(part))["code"] in ("invalid_image", "invalid_video")


def test_pictures_in_other_roles_are_refused(http: httpx.Client) -> None:
    message = image(data_uri(encoded(quadrants(64, 64))))["messages"][0] | {"role": "system"}
    assert refused(http, {"messages": [message]})["param"] == "messages[0].content[1]"


def test_too_many_pictures(http: httpx.Client) -> None:
    part = {"type": "image_url", "image_url": {"url": data_uri(encoded(quadrants(64, 64)))}}
    error = refused(http, user(*[part] * 17))
    assert "more than 16 images" in error["message"]
    assert error["param"] == "messages[0].content[16]"


def test_cameras_that_cannot_be_looked_at(http: httpx.Client) -> None:
    error = refused(http, user({"type": "camera", "camera": "garden"}))
    assert "no camera 'garden'; cameras: street, yard" in error["message"]
    assert (error["param"], error["code"]) == ("messages[0].content[0].camera", "camera_not_found")
    error = refused(http, user({"type": "camera", "camera": "yard"}), 503)
    assert error["code"] == "camera_not_ready"


SMALL = [(1, 1), (1, 150), (26, 28), (257, 27)]
MODES = ["L", "LA", "RGBA", "P", "CMYK", "1", "I;16"]


@pytest.mark.parametrize("size", SMALL)
def test_small_pictures_are_answered(http: httpx.Client, size: tuple[int, int]) -> None:
    """I1"""
    reply = http.post("/v1/chat/completions", json=GOOD | image(data_uri(encoded(Image.new("RGB", size)))))
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("size", [(499, 1), (1093, 5)])
def test_extreme_pictures(http: httpx.Client, size: tuple[int, int]) -> None:
    """I1, I2"""
    error = refused(http, image(data_uri(encoded(Image.new("RGB", size)))))
    assert error["param"] == "messages[0].content[1].image_url"
    assert error["code"] == "invalid_image"
    assert "200 times" in error["message"]


@pytest.mark.parametrize("mode", MODES)
def test_pictures_of_every_mode_are_answered(http: httpx.Client, mode: str) -> None:
    """I3"""
    data = encoded(Image.new(mode, (64, 64)), "JPEG" if mode == "CMYK" else "PNG")
    reply = http.post("/v1/chat/completions", json=GOOD | image(data_uri(data)))
    assert reply.status_code == 200, reply.text


def test_a_turned_picture_is_seen_upright(http: httpx.Client) -> None:
    """I4: as many image tokens, and the same answer, as the upright picture."""
    upright = quadrants(160, 64)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(upright.rotate(90, expand=True), "PNG", exif=exif)
    request = GOOD | {"temperature": 0, "max_tokens": 16}
    answers = [
        http.post("/v1/chat/completions", json=request | image(data_uri(data))).json()
        for data in (encoded(upright), turned)
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (encoded(quadrants(200, 200), "JPEG")[:-128], "cut short"),
        (b"", "empty"),
        (b"I am a text file.", "not a JPEG"),
        (giant_png_header(), "40000×40000"),
    ],
)
def test_what_is_no_picture(http: httpx.Client, data: bytes, message: str) -> None:
    """I5, I6"""
    error = refused(http, image(data_uri(data, "image/jpeg")))
    assert message in error["message"]
    assert error["param"] == "messages[0].content[1].image_url"


def test_one_bad_picture_among_good_ones(http: httpx.Client) -> None:
    """E24: nine at once; eight are answered."""
    pictures = [encoded(quadrants(64 + 8 * number, 64)) for number in range(8)]
    bodies = [GOOD | image(data_uri(data)) for data in (*pictures[:4], pictures[0][:-128], *pictures[4:])]
    with ThreadPoolExecutor(9) as pool:
        replies = list(pool.map(lambda body: http.post("/v1/chat/completions", json=body), bodies))
    assert [reply.status_code for reply in replies] == [200] * 4 + [400] + [200] * 4
    assert replies[4].json()["error"]["param"] == "messages[0].content[1].image_url"


def test_an_animation_is_answered(http: httpx.Client) -> None:
    """I7"""
    frames = [quadrants(64, 64).rotate(90), quadrants(64, 64).rotate(180)]
    data = encoded(quadrants(64, 64), "GIF", save_all=True, append_images=frames)
    reply = http.post("/v1/chat/completions", json=GOOD | image(data_uri(data, "image/gif")))
    assert reply.status_code == 200, reply.text


def test_data_uris(http: httpx.Client) -> None:
    """I8"""
    payload = data_uri(encoded(quadrants(64, 64))).partition(",")[2]
    for header in ("data:image/png;charset=utf-8;base64,", "DATA:image/png;base64,"):
        reply = http.post("/v1/chat/completions", json=GOOD | image(header + payload))
        assert reply.status_code == 200, reply.text
    parts = (payload[:9], payload[9:])
    broken = [f"data:image/png;base64,{between.join(parts)}" for between in ("*", " ", "\n")]
    for bad in ("data:,x", f"data:image/png,{payload}", *broken):
        assert refused(http, image(bad))["code"] == "invalid_image"


def test_six_megabytes_of_noise(http: httpx.Client, server: Running) -> None:
    """I9; and nothing of all the refused requests is left in the engine."""
    body = GOOD | image(data_uri(os.urandom(6_000_000)))
    started = time.process_time()
    reply = http.post("/v1/chat/completions", json=body)
    assert time.process_time() - started < 2, "includes making and sending 8 MB"
    assert reply.status_code == 400
    assert is_idle(server.engine)
    assert server.services.num_chats == 0
