import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from queues import EmbeddedServer, JobProducer, ServerStartFailed
from tests.children import HEAR_SIGINT
from tests.queues.helpers import FAST, is_alive, kill_server, make_job, raw_client, wait_until

ROOT = Path(__file__).resolve().parents[2]
PARENT = """
{hear_sigint}
import sys, time
from pathlib import Path
import redis
from queues import EmbeddedServer
server = EmbeddedServer()
try:
    print(redis.Redis.from_url(server.url).info("server")["process_id"], server.url, flush=True)
    {then}
except KeyboardInterrupt:
    print(server.is_running, flush=True)
"""


def start_parent(then: str) -> tuple["subprocess.Popen[str]", int, Path]:
    command = [sys.executable, "-c", PARENT.format(hear_sigint=HEAR_SIGINT, then=then)]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout
    process_id, url = parent.stdout.readline().split()
    return parent, int(process_id), Path(urlsplit(url).path).parent


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_with_a_killed_parent(number: signal.Signals) -> None:
    """However the parent dies, no server and no folder are left behind."""
    parent, process_id, folder = start_parent("time.sleep(600)")
    with parent:
        assert is_alive(process_id)
        parent.send_signal(number)
    wait_until(lambda: not is_alive(process_id) and not folder.exists())


def test_the_server_ends_at_its_parents_exit() -> None:
    parent, process_id, folder = start_parent("sys.exit(3)")
    with parent:
        assert parent.wait(30) == 3
    wait_until(lambda: not is_alive(process_id) and not folder.exists())


def test_ctrl_c_reaches_the_server_through_its_parent_only() -> None:
    """The terminal's interrupt goes to the whole group; the queue must outlive those that still use it."""
    parent, process_id, _ = start_parent("time.sleep(600)")
    with parent:
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout
        assert parent.stdout.readline() == "True\n"
    wait_until(lambda: not is_alive(process_id))


def test_close_ends_the_server_and_removes_its_folder(server: EmbeddedServer) -> None:
    with raw_client(server) as client:
        process_id = client.info("server")["process_id"]
    server.close()
    server.close()
    assert not is_alive(process_id)
    assert not server.is_running
    assert not Path(urlsplit(server.url).path).parent.exists()


def test_the_server_outlives_the_thread_that_started_it() -> None:
    started: list[EmbeddedServer] = []
    thread = threading.Thread(target=lambda: started.append(EmbeddedServer()))
    thread.start()
    thread.join()
    with started[0] as server, JobProducer(server.url, FAST) as producer:
        assert producer.put(make_job())


def test_a_crashed_server_is_started_again_at_the_same_place(server: EmbeddedServer) -> None:
    """Q6"""
    url = server.url
    assert not server.ensure_running()
    kill_server(server)
    assert server.ensure_running()
    assert server.url == url
    with JobProducer(url, FAST) as producer:
        assert producer.status().is_idle


def test_nothing_is_written_and_only_the_owner_may_connect(server: EmbeddedServer) -> None:
    socket = Path(urlsplit(server.url).path)
    with raw_client(server) as client:
        assert client.config_get("save")["save"] == ""
        assert client.config_get("appendonly")["appendonly"] == "no"
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        assert int(client.config_get("maxmemory")["maxmemory"]) == 512 * 2**20
        assert client.info("server")["tcp_port"] == 0
    assert socket.stat().st_mode & 0o077 == 0
    assert socket.parent.stat().st_mode & 0o077 == 0


def test_a_server_that_does_not_start_is_a_clear_error(tmp_path: Path) -> None:
    binary = tmp_path / "server"
    binary.write_text("#!/bin/sh\necho cannot run here >&2\nexit 1\n")
    binary.chmod(0o755)
    with pytest.raises(ServerStartFailed, match=r"did not start.*\n.*cannot run here"):
        EmbeddedServer(binary)


def test_two_servers_do_not_meet(server: EmbeddedServer) -> None:
    with EmbeddedServer() as other, JobProducer(other.url, FAST) as producer:
        producer.put(make_job())
        with JobProducer(server.url, FAST) as mine:
            assert mine.status().is_idle


def test_a_long_temporary_folder_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path has at most 108 bytes."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with EmbeddedServer() as server:
        assert server.is_running
    assert not list(long.iterdir())


def test_no_place_for_it_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(ServerStartFailed, match="make room, or name another in TMPDIR"):
        EmbeddedServer()


def test_no_room_for_its_log_is_a_clear_error() -> None:
    with EmbeddedServer() as server:
        kill_server(server)
        folder = server._folder
        (folder / "server.log").unlink()
        (folder / "server.log").mkdir()
        with pytest.raises(ServerStartFailed, match="cannot be started in"):
            server.ensure_running()
        (folder / "server.log").rmdir()
        assert server.ensure_running()
