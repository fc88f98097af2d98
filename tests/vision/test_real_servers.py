"""Streams of servers that others wrote, RTSP by GStreamer, RTMP by ffmpeg; skipped where there are none."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from tests.appliance.running import until
from tests.ports import free_port
from vision.errors import SourceAuthFailed, SourceError, SourceNotFound, SourceUnreadable
from vision.options import SourceOptions, StreamConfig
from vision.sources import open_source
from vision.types import Frame

HARD = "p@s/w?o#r:d"
SERVER = Path(__file__).with_name("gst_server.py")
_NEEDS = (
    "import gi; gi.require_version('GstRtspServer', '1.0'); from gi.repository import Gst, GstRtspServer; "
)
_NEEDS += "Gst.init(None); assert all(map(Gst.ElementFactory.find, ('x264enc', 'rtph264pay', 'alawenc')))"
CONFIG = StreamConfig(open_s=20, first_frame_s=20, silence_s=20)


@cache
def python_with_gstreamer() -> str:
    for python in (sys.executable, "/usr/bin/python3"):
        found = os.path.exists(python) and subprocess.run(
            [python, "-c", _NEEDS], check=False, capture_output=True, timeout=60
        )
        if found and not found.returncode:
            return python
    pytest.skip(
        "no GStreamer: install gir1.2-gst-rtsp-server-1.0, python3-gi, gstreamer1.0-plugins-{good,ugly}"
    )


@contextmanager
def gstreamer(port: int, size: str = "320x240", *login: str) -> Iterator[None]:
    command = [python_with_gstreamer(), str(SERVER), str(port), size, *login]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()


def taken(uri: str, num: int = 8, config: StreamConfig = CONFIG) -> list[Frame]:
    source = open_source(uri, camera="gate", options=SourceOptions(stream=config))
    frames = iter(source)
    try:
        return list(islice(frames, num))
    finally:
        frames.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("transport", ["tcp", "udp"])
def test_rtsp_with_a_digest_login(transport):
    port = free_port()
    with gstreamer(port, "320x240", "john.doe", HARD):
        config = StreamConfig(transport=transport, open_s=20, first_frame_s=20, silence_s=20)
        frames = taken(f"rtsp://john.doe:{HARD}@127.0.0.1:{port}/cam", config=config)
        with pytest.raises(SourceAuthFailed):
            taken(f"rtsp://john.doe:wrong@127.0.0.1:{port}/cam")

    assert {frame.image.shape for frame in frames} == {(240, 320, 3)}
    assert frames[-1].time_s == pytest.approx(7 / 15, abs=0.2)
    assert frames[-1].image.max() > 200


def test_rtsp_that_is_killed_and_returns_with_another_size():
    """V1."""
    port = free_port()
    uri = f"rtsp://127.0.0.1:{port}/cam"
    source = open_source(uri, camera="gate", options=SourceOptions(stream=CONFIG))
    with gstreamer(port):
        frames = iter(source)
        assert next(frames).image.shape == (240, 320, 3)
        with pytest.raises(SourceNotFound):
            taken(f"rtsp://127.0.0.1:{port}/other")
    with pytest.raises(SourceUnreadable):
        list(frames)
    with gstreamer(port, "160x120"):
        assert taken(uri)[0].image.shape == (120, 160, 3)


def test_rtmp():
    if shutil.which("ffmpeg") is None:
        pytest.skip("no ffmpeg command: install ffmpeg")
    port = free_port()
    uri = f"rtmp://127.0.0.1:{port}/live/secret-key"
    text = (
        "ffmpeg -nostdin -loglevel quiet -re -f lavfi -i testsrc=size=160x96:rate=15 -c:v libx264 "
        "-preset ultrafast -tune zerolatency -g 15 -f flv -listen 1 "
    )
    with pytest.raises(SourceUnreadable, match=r"rtmp://127\.0\.0\.1:\d+/… .*refused"):
        taken(uri)
    with subprocess.Popen([*text.split(), uri]) as publisher:
        try:
            frames: list[Frame] = []
            until(lambda: frames or frames.extend(_or_none(uri)) or frames)
        finally:
            publisher.kill()

    assert frames[0].image.shape == (96, 160, 3)


def _or_none(uri: str) -> list[Frame]:
    try:
        return taken(uri)
    except SourceError:
        return []
