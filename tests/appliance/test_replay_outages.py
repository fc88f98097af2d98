"""`replay` through a Redis that is away for a while, and told to stop."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import av
import pytest
import redis

from appliance.recordings import find_recordings
from appliance.replay import ReplayOptions, run_replay
from appliance.settings import load_settings
from tests.appliance.running import START_S, running, until
from tests.queues.servers import Server, started

STREET = "synthetic://street?seed=3&fps=5&frames=150"
YARD = "synthetic://yard?seed=11&fps=5&frames=20"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A Redis that keeps what it has acknowledged."""
    server = Server(tmp_path, "valkey", ["appendonly yes", "appendfsync always"])
    # why: the first of an option's lines would not count.
    config = server.folder / "server.conf"
    config.write_text(config.read_text().replace("appendonly no\n", ""))
    with started(server):
        yield server


def settings_of(checkpoint: Path, server: Server) -> dict[str, dict[str, object]]:
    return {
        "engine": {"model": str(checkpoint), "device": "cpu", "kv_cache_tokens": 4096, "num_threads": 1},
        "detector": {"device": "cpu", "imgsz": 320},
        "describe": {"max_tokens": 4, "cooldown_s": 0, "min_hits": 1, "context": False, "concurrency": 1},
        "redis": {"url": f"redis://127.0.0.1:{server.port}"},
    }


def num_frames(path: Path) -> int:
    """Frames that can be played."""
    with av.open(str(path)) as video:
        return sum(1 for _ in video.decode(video=0))


def num_put(server: Server) -> int:
    """Jobs that were put by replays which have not ended."""
    try:
        with server.client() as client:
            return sum(int(client.hget(key, "put") or 0) for key in client.scan_iter("*:counts"))
    except redis.RedisError:
        return 0


def test_a_redis_that_is_away_costs_nothing(
    qwen3_vl_checkpoint: Path, tmp_path: Path, server: Server
) -> None:
    """It is killed while jobs are put, and once more while the last are described."""
    settings = load_settings(None, settings_of(qwen3_vl_checkpoint, server))
    counts: list[int] = []

    def disturb() -> None:
        for least in (2, 5):
            counts.append(until(lambda least=least: num_put(server) >= least and num_put(server), START_S))
            server.kill()
            time.sleep(1.5)
            server.start()

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    output = tmp_path / "descriptions.jsonl"

    assert run_replay(settings, find_recordings([STREET]), ReplayOptions(output=output)) == 0

    disturbing.join()
    ids = [json.loads(line)["job_id"] for line in output.read_text().splitlines()]
    assert len(ids) == len(set(ids)) > counts[-1]
    assert all(json.loads(line)["description"] for line in output.read_text().splitlines())
    with server.client() as client:
        left = [key for key in client.scan_iter() if b":job:" not in key and b":hand:" not in key]
    assert left == []


@pytest.mark.e2e
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_and_says_what_is_not_described(
    qwen3_vl_checkpoint: Path, tmp_path: Path, server: Server, number: signal.Signals, code: int
) -> None:
    config = tmp_path / "settings.yaml"
    settings = settings_of(qwen3_vl_checkpoint, server)
    settings["describe"]["max_tokens"] = 100
    config.write_text(json.dumps(settings))
    endless = STREET.replace("frames=150", "frames=100000")
    output = tmp_path / "descriptions.jsonl"
    saved = tmp_path / "saved"
    arguments = ("-c", str(config), "-o", str(output), "--save", str(saved))
    with running(tmp_path, "replay", YARD, endless, *arguments) as command:
        until(lambda: output.exists() and '"camera":"street"' in output.read_text(), START_S)
        until(lambda: f"saved {saved}/yard-annotated.mp4: 20 frames" in command.stderr)
        assert num_frames(saved / "yard-annotated.mp4") == 20
        until(lambda: len(list(saved.glob("street-*.jpg"))))
        until(lambda: num_put(server) > output.read_text().count("\n"))
        command.process.send_signal(number)
        assert command.process.wait(START_S) == code
        assert f"appliance: stopped by {number.name}" in command.stderr
        assert "stopped in street: " in command.stderr
        assert " not described" in command.stderr
        assert "Traceback" not in command.stderr
        num_lines = output.read_text().count("\n")
        assert f"saved in {saved}: {num_lines} snapshots, 2 videos" in command.stderr
    assert len(list(saved.glob("*.jpg"))) == num_lines
    assert 0 < num_frames(saved / "street-annotated.mp4") < 100_000
    assert f"street-annotated.mp4: {num_frames(saved / 'street-annotated.mp4')} frame" in command.stderr
    assert all(json.loads(line)["description"] for line in output.read_text().splitlines())
    with server.client() as client:
        assert not [key for key in client.scan_iter() if b":job:" not in key and b":hand:" not in key]
