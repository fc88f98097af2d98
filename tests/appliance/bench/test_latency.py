"""The load generator against the real API, and what it says when nothing can be measured."""

import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from appliance.bench.load import Load
from appliance.bench.metrics import measurements
from appliance.bench.plan import LoadPlan
from appliance.bench.target import Target
from appliance.bench.traffic import MAX_FRAMES, frame_jpeg, num_frames_to_make
from appliance.cli import app
from tests.appliance.api.serving import MODEL, Running, Servers

SHORT = (
    "--seconds",
    "2",
    "--warm-up",
    "0.2",
    "--image",
    "64x64",
    "--chat-tokens",
    "8",
    "--frame-tokens",
    "2",
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def refusal(*arguments: str) -> str:
    """The one line with which a command refuses."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    line = result.stderr.splitlines()[-1]
    assert line.startswith("appliance: ")
    return line


@pytest.fixture(scope="module")
def measured(server: Running, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A short run with chats and frames, and what it printed."""
    path = tmp_path_factory.mktemp("bench") / "mixed.json"
    result = run("latency", "--url", server.base_url, "--frame-rate", "4", "--json", str(path), *SHORT)
    assert result.exit_code == 0, result.output
    return path, result


def test_chats_and_frames_are_measured(measured):
    told = json.loads(measured[0].read_text())
    chat, frames = told["chat"], told["frames"]

    assert chat["num_tokens"] >= 8
    assert chat["are_tokens_told"]
    assert chat["itl_ms"]["n"] > 0
    assert 0 < chat["itl_ms"]["p50"] <= chat["itl_ms"]["p99"] <= chat["itl_ms"]["max"]
    assert chat["ttft_ms"]["p50"] > 0
    assert 7 <= frames["num_sent"] <= 9
    assert frames["num_done"] == frames["num_sent"]
    assert frames["latency_ms"]["p95"] > 0
    assert frames["server_ms"]["prefill_ms"] > 0
    assert told["errors"] == {"num": 0, "messages": {}}


def test_a_result_tells_where_and_how_it_was_measured(measured):
    told = json.loads(measured[0].read_text())

    assert told["kind"] == "latency"
    assert told["target"]["model"] == MODEL
    assert told["arguments"]["frame_rate"] == 4
    assert told["arguments"]["image_size"] == [64, 64]
    assert told["arguments"]["seed"] > 0
    assert told["machine"]["cpu"]
    assert told["machine"]["cores"] >= 1
    assert told["versions"]["torch"]
    assert "commit" in told


def test_the_table_has_the_numbers(measured):
    lines = measured[1].stdout.splitlines()

    assert any(line.startswith("chat ITL, ms") for line in lines)
    assert any(line.startswith("frame latency, ms") for line in lines)
    assert "errors: none" in lines


def test_closed_loop_frames_without_chats(server):
    result = run(
        "latency", "--url", server.url, "--chats", "0", "--frame-concurrency", "2", "--plain", *SHORT
    )

    assert result.exit_code == 0, result.output
    assert "chat ITL" not in result.stdout
    assert "frames/s" in result.stdout


def test_a_key_is_sent_and_not_written(servers: Servers, tmp_path):
    locked = servers.start(api_key="hush-hush")
    path = tmp_path / "result.json"
    arguments = (
        "--chats",
        "1",
        "--json",
        str(path),
        "--seconds",
        "0.5",
        "--warm-up",
        "0",
        "--chat-tokens",
        "2",
    )
    url = locked.url.replace("http://", "http://me:word@")

    assert "401" in refusal("latency", "--url", locked.url, *arguments)
    assert run("latency", "--url", locked.url, "--api-key", "hush-hush", *arguments).exit_code == 0
    assert "hush" not in path.read_text()
    refused = refusal("latency", "--url", url, *arguments)
    assert "word" not in refused
    servers.stop(locked)


def test_nobody_answers():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"

        assert f"no server answers at {url}" in refusal("latency", "--url", url)


@pytest.fixture
def broken_url() -> Iterator[str]:
    """A server that breaks off every answer after its first token."""
    chunk = json.dumps({"choices": [{"delta": {"content": "Hi"}}]})

    class Broken(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(json.dumps({"data": [{"id": "m"}]}))

        def do_POST(self) -> None:
            self._answer(f"data: {chunk}\n\n")

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, text: str) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_answer_that_breaks_off_is_an_error(broken_url):
    line = refusal("latency", "--url", broken_url, *SHORT)

    assert "does not answer a chat: the stream ended before its [DONE]" in line


async def test_errors_during_a_run_are_counted_and_told(broken_url):
    plan = LoadPlan(num_chats=1, frame_rate=4, seconds=1, warm_up_s=0, image_size=(64, 64))
    target = Target(broken_url)
    recording = await Load(target, plan, "m", [b"{}"]).run()
    await target.close()

    told = measurements(recording)

    assert told["frames"]["num_sent"] == 4
    assert told["frames"]["num_done"] == 0
    assert told["errors"]["messages"] == {"the stream ended before its [DONE]": told["errors"]["num"]}
    assert told["errors"]["num"] > 4


def test_an_unknown_model_is_told_with_those_that_are_served(server):
    line = refusal("latency", "--url", server.url, "--model", "gpt-9")

    assert "--model gpt-9: not served at" in line
    assert f"there is {MODEL}" in line


def test_a_load_that_the_server_refuses_is_told_before_the_run(server):
    line = refusal("latency", "--url", server.url, "--frame-rate", "1", *SHORT, "--image", "8192x16")

    assert "does not answer a question about a picture: 400" in line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--chats", "0"], "no load"),
        (["--frame-rate", "1", "--frame-concurrency", "1"], "choose one of them"),
        (["--image", "big"], "--image big: write width x height"),
        (["--url", "http://127.0.0.1:1", "--vlm", "x"], "leave out --url"),
        (["--model", "x"], "give its --url"),
        (["--set", "engine"], "--set engine: write part.key=value"),
        (["--set", "engine.sheduler=static"], "engine.sheduler: unknown key"),
        (["--set", "engine.model=a", "--set", "engine.model.b=1"], "model is set to a value already"),
        (["--json", "no-folder/a.json"], "there is no folder no-folder"),
    ],
)
def test_mistakes(arguments, line):
    assert line in refusal("latency", *arguments)


def test_pictures_come_from_the_seed():
    first = frame_jpeg((64, 48), seed=1, index=0)

    assert first == frame_jpeg((64, 48), seed=1, index=0)
    assert first != frame_jpeg((64, 48), seed=2, index=0)
    assert first != frame_jpeg((64, 48), seed=1, index=1)
    assert Image.open(io.BytesIO(first)).size == (64, 48)


def test_every_frame_of_a_run_has_a_picture_of_its_own():
    assert num_frames_to_make(LoadPlan(frame_rate=0.5, seconds=60, warm_up_s=5)) == 33
    assert num_frames_to_make(LoadPlan(frame_rate=100, seconds=60)) == MAX_FRAMES
    assert num_frames_to_make(LoadPlan()) == 0
