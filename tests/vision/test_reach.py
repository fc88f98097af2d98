"""A camera's host is asked for a moment before its stream is opened again."""

import socket
import threading
from pathlib import Path

import pytest

from tests.vision.rtsp_server import Deaf, RtspServer
from vision.errors import SourceUnreadable
from vision.reach import check_reach, within


def test_a_host_that_gives_no_answer_is_told_without_its_password() -> None:
    with Deaf() as deaf, pytest.raises(SourceUnreadable, match=f"127.0.0.1:{deaf.port}/… gave no") as told:
        check_reach(f"rtsp://user:s3cret@127.0.0.1:{deaf.port}/cam", 0.2)
    assert "s3cret" not in str(told.value)


def test_what_answers_or_is_no_stream_is_let_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is wrong, opening the stream tells better."""
    with RtspServer() as server:
        check_reach(server.url(), 5.0)
    check_reach(server.url(), 5.0)
    check_reach("rtsp://no-such-host.invalid/cam", 5.0)
    check_reach(str(tmp_path / "video.mp4"), 0.2)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with Deaf() as deaf:
        check_reach(f"http://127.0.0.1:{deaf.port}/cam.mjpeg", 0.2)


def test_ipv6_hosts_are_asked_too() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with listener:
        check_reach(f"rtsp://[::1]:{listener.getsockname()[1]}/cam", 5.0)


def test_what_does_not_come_back_is_left_behind() -> None:
    """V3: what a disk that hangs does to whoever opens a file on it."""
    released = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.05, released.wait)
    released.set()
    assert within(20.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(20.0, lambda: 1 // 0)
