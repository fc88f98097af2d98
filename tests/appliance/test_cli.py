"""The command line: what a mistake looks like (one line, exit code 2), and how a run ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from appliance.cli import app
from tests.appliance.running import START_S, running, until

COMMANDS = ("replay", "serve", "ingest", "chat", "demo")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refusal(*arguments: str) -> str:
    """The one line with which a command refuses its arguments."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("appliance: ")
    return line


@pytest.fixture
def video(tmp_path: Path) -> str:
    path = tmp_path / "notes.mp4"
    path.write_text("this is no video\n" * 100)
    return str(path)


STREET = "synthetic://street?frames=5"


def test_help_tells_every_command_and_option():
    assert all(command in run("--help").output for command in COMMANDS)
    for option in (
        "--describe",
        "--prompt",
        "--cooldown",
        "--speed",
        "--detector",
        "--vlm",
        "--config",
        "--save",
    ):
        assert option in run("replay", "--help").output
    for command in COMMANDS:
        assert run(command, "-h").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--config", "none.yaml", "a.mp4"], "none.yaml: no such file: check --config"),
        (["none.mp4"], "no file or folder none.mp4: check the path"),
    ],
)
def test_a_mistake_is_said_before_anything_heavy_is_loaded(arguments, line):
    code = (
        f"import sys; sys.argv = {['appliance', 'replay', *arguments]}\n"
        "try:\n    from appliance.cli import main; main()\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules, 'ultralytics' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["2", "False", "False"]
    assert done.stderr == f"appliance: {line}\n"


def test_version():
    assert run("--version").output.startswith("appliance 0.")


def test_no_source_is_a_usage_error():
    assert run("replay").exit_code == 2
    assert run("replay", STREET, "--speed", "2x").exit_code == 2
    assert run("replay", STREET, "--cooldown", "-1").exit_code == 2


def test_a_missing_file(tmp_path):
    path = tmp_path / "none.mp4"

    assert f"no file or folder {path}" in refusal("replay", str(path))


def test_names_that_are_no_utf8_are_shown(tmp_path):
    """The real command: what the terminal cannot take is known to it alone."""
    config = tmp_path / os.fsdecode(b"caf\xe9.yaml")
    config.write_text("cameras: {}\n")
    for arguments, told in (
        (["config", "check", config], rf"{tmp_path}/caf\xe9.yaml can be used:"),
        (["replay", tmp_path / os.fsdecode(b"\xe9.mp4")], rf"no file or folder {tmp_path}/\xe9.mp4: check"),
        (["config", "check", tmp_path / os.fsdecode(b"\xe9.yaml")], rf"{tmp_path}/\xe9.yaml: no such file"),
        (["replay", STREET, "--vlm", os.fsdecode(b"\xe9")], "engine.model: is no UTF-8, as settings have to"),
    ):
        code = "from appliance.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False)
        assert told in (done.stdout + done.stderr).decode()


def test_an_unreadable_video(video):
    assert video in refusal("replay", video)


def test_an_unsupported_source():
    assert "rtsp://camera/… is a live stream" in refusal("replay", "rtsp://me:secret@camera/1")
    assert "secret" not in refusal("replay", "rtsp://me:secret@camera/1")


def test_an_unknown_class():
    """V18: the names that are known stand in the message."""
    line = refusal("replay", STREET, "--describe", "person,unicorn")

    assert "has no class 'unicorn'. It knows: person, bicycle" in line


def test_a_missing_detector():
    assert "no detection model at nothing.pt" in refusal("replay", STREET, "--detector", "nothing.pt")


def test_a_broken_detector(media):
    """V21."""
    broken = str(media / "broken_yolo26n_int8.tflite")

    assert broken in refusal("replay", STREET, "--detector", broken)


def test_a_missing_vision_language_model(tmp_path):
    path = str(tmp_path / "no-model")

    assert path in refusal("replay", STREET, "--vlm", path)


def test_a_folder_that_is_no_model(tmp_path):
    assert str(tmp_path) in refusal("replay", STREET, "--vlm", str(tmp_path))


def test_mistakes_in_a_config_come_all_at_once(tmp_path):
    path = tmp_path / "box.yaml"
    path.write_text("cameras: {front: {sorce: a}}\ndescribe: {cooldown_s: soon}\n")
    result = run("replay", STREET, "--config", str(path))

    assert result.exit_code == 2
    cooldown, missing, unknown = result.stderr.splitlines()
    assert cooldown == (
        f"appliance: {path}: describe.cooldown_s: Input should be a valid number, "
        "unable to parse string as a number, got 'soon'"
    )
    assert missing == f"appliance: {path}: cameras.front.source: is missing and has no default"
    assert unknown.startswith(
        f"appliance: {path}: cameras.front.sorce: unknown key; allowed here: describe, "
    )


def test_config_check_tells_what_is_used():
    result = run("config", "check", str(Path(__file__).parents[2] / "configs" / "cameras.yaml"))

    assert result.exit_code == 0
    for line in (
        "zone      crossing: person, after 2 frames and 0 s",
        "describe  person: new_track, dwell of 3 s",
    ):
        assert line in result.stdout


def test_config_check_tells_every_problem_and_no_password(tmp_path):
    path = tmp_path / "box.yaml"
    path.write_text("cameras: {a: {source: 'rtsp://u:s3cret@h/', record: {enabled: true}, fps: 0}}\n")
    result = run("config", "check", str(path))

    assert result.exit_code == 1
    fps, record = sorted(line for line in result.stderr.splitlines() if line.startswith("appliance: "))
    assert fps.startswith(f"appliance: {path}: cameras.a.fps: Input should be greater than 0")
    assert "cameras.a.record: a key of Frigate's that is not supported" in record
    assert "s3cret" not in result.output


def test_an_output_that_cannot_be_written(tmp_path):
    assert "choose another --output" in refusal("replay", STREET, "--output", str(tmp_path))
    file = tmp_path / "file"
    file.touch()
    assert "choose another --save" in refusal("replay", STREET, "--save", str(file / "folder"))


def test_a_redis_that_is_not_there(qwen3_vl_checkpoint):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{closed.getsockname()[1]}"

        line = refusal("replay", STREET, "--vlm", str(qwen3_vl_checkpoint), "--redis", url)

    assert "cannot be reached" in line
    assert "must match" not in line


def test_a_redis_that_is_no_redis():
    assert "settings: redis.url: " in refusal("replay", STREET, "--redis", "http://here")


def test_ingest_needs_a_redis_and_cameras():
    assert "redis.url is missing" in refusal("ingest")
    assert "cameras is empty" in refusal("ingest", "--redis", "redis://127.0.0.1:1")


def test_demo_needs_a_camera(tmp_path):
    file = tmp_path / "none.yaml"
    file.write_text("server: {port: 0}")

    assert "cameras is empty" in refusal("demo", "--config", str(file))


def test_serve_on_a_network_needs_a_key():
    assert "api_key" in refusal("serve", "--host", "0.0.0.0", "--port", "0")


def test_chat_with_nobody():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"

        line = refusal("chat", "--url", url, "Hello?")

    assert f"no appliance answers at {url}" in line
    assert "appliance serve" in line


def test_chat_in_what_is_no_utf8():
    half = os.fsdecode(b"caf\xe9?")

    assert refusal("chat", half).endswith(
        r"the question is no UTF-8, as text to a server has to be: caf\xe9?"
    )
    assert r"--camera is no UTF-8" in refusal("chat", "--camera", half, "What?")


def test_chat_with_two_pictures_or_none(tmp_path):
    assert "choose one of them" in refusal("chat", "--image", "a.jpg", "--camera", "front", "What?")


@pytest.mark.e2e
def test_ctrl_c_ends_a_replay_with_130_and_keeps_what_was_written(qwen3_vl_checkpoint, tmp_path):
    output = tmp_path / "out.jsonl"
    arguments = ("--vlm", str(qwen3_vl_checkpoint), "--cooldown", "0", "--output", str(output))
    with running(tmp_path, "replay", "synthetic://street?seed=3&fps=5&frames=100000", *arguments) as command:
        until(lambda: output.exists() and output.stat().st_size > 0, START_S)

        assert command.stop(signal.SIGINT) == 130

        command.assert_nothing_is_left()
    assert re.fullmatch(
        r"(street: frame .*\n)*stopped in street: .*\nappliance: stopped by SIGINT\n", command.stderr
    )
    assert all(json.loads(line)["description"] for line in output.read_text().splitlines())
