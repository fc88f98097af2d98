"""`demo`, as a newcomer sees it: where to look, descriptions, chat, a live line, and a clean end."""

import re
import signal
from pathlib import Path

import pytest
import yaml

from tests.appliance.running import START_S, running, until

pytestmark = pytest.mark.e2e

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


@pytest.fixture
def config(qwen3_vl_checkpoint: Path, tmp_path: Path) -> str:
    """The demo's own configuration on a free port, with a tiny model that says nonsense at once."""
    settings = yaml.safe_load(DEMO.read_text())
    settings["server"]["port"] = 0
    settings["engine"] = {
        "model": str(qwen3_vl_checkpoint),
        "device": "cpu",
        "kv_cache_tokens": 4096,
        "num_threads": 1,
    }
    path = tmp_path / "demo.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


EVENT_LINE = r"\d\d:\d\d:\d\d \[(street|yard)\] (person|car|bus|truck|bicycle|dog) #\d+: "


def test_the_demo_shows_everything_and_leaves_nothing(config, tmp_path):
    with running(tmp_path, "demo", "--config", config) as command:
        until(lambda: "described" in command.stdout and "yard > " in command.stdout, START_S)
        until(lambda: re.search(EVENT_LINE, command.stdout), START_S)
        until(lambda: re.search(r"token to token: p50 [1-9]\d* ms, p99 [1-9]\d* ms", command.stdout), START_S)

        assert command.stop(signal.SIGINT) == 0

        command.assert_nothing_is_left()
    shown = command.stdout
    assert "The appliance is up after " in shown
    assert re.search(r"page +http://127\.0\.0\.1:\d+/", shown)
    assert re.search(r"appliance chat --url http://127\.0\.0\.1:\d+ --camera street", shown)
    assert "curl -s http://127.0.0.1:" in shown
    assert "street > How many people are there?" in shown
    assert "chat > What can you do?" in shown
    assert re.search(r"cameras \d+\.\d frames/s", shown)
    assert shown.endswith("stopped\n")
    told = command.stderr.splitlines()
    assert any(line.startswith("appliance: all is up after ") for line in told)
    assert all(line.startswith("appliance: ") for line in told)


@pytest.mark.parametrize("is_own", [True, False])
def test_the_demo_ends_by_itself_when_told_so(config, tmp_path, is_own):
    """Without a file it has its own cameras, wherever it is called."""
    given = ["--config", config] if is_own else ["--port", "0"]
    with running(tmp_path, "demo", *given, "--seconds", "1") as command:
        until(lambda: len(command.family()) > 1)
        assert command.process.wait(START_S) == 0
        command.assert_nothing_is_left()
    assert "2 cameras are watched" in command.stdout


def test_a_demo_that_cannot_start_says_why(config, tmp_path):
    file = tmp_path / "events.db"
    file.write_text("this is no database\n" * 100)
    settings = yaml.safe_load(Path(config).read_text()) | {"events": {"path": str(file)}}
    Path(config).write_text(yaml.safe_dump(settings))
    with running(tmp_path, "demo", "--config", config) as command:
        until(lambda: len(command.family()) > 1)
        assert command.process.wait(START_S) == 2
        command.assert_nothing_is_left()
    assert "events.path: " in command.stderr
    assert "Traceback" not in command.stderr
