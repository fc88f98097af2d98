"""`appliance ingest`, the whole command: cameras of its own file, read again at SIGHUP, and a clean end."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.board import BoardReader
from queues import EmbeddedServer
from tests.appliance.running import START_S, running, until
from tests.vision.rtsp_server import RtspServer, encoded

STREAM = {"open_s": 20, "first_frame_s": 20, "silence_s": 20}


def states(url: str, *names: str) -> dict[str, str]:
    async def ask() -> dict[str, str]:
        board = BoardReader(url, names)
        try:
            return {name: one.status.state for name, one in (await board.told()).items()}
        finally:
            await board.close()

    return asyncio.run(ask())


def frame_shape(url: str, name: str) -> tuple[int, ...] | None:
    import cv2
    import numpy as np

    async def ask() -> bytes | None:
        board = BoardReader(url, (name,))
        try:
            frame = await board.frame(name)
        finally:
            await board.close()
        return frame and frame.jpeg

    jpeg = asyncio.run(ask())
    return None if jpeg is None else cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR).shape


@pytest.mark.e2e
def test_cameras_are_renamed_while_others_run_on(tmp_path: Path) -> None:
    """V2, V6: a wrong address beside them, one stream under another name; one connection is kept."""
    config = tmp_path / "cameras.yaml"
    with (
        RtspServer(fps=5) as steady,
        RtspServer(fps=5) as small,
        RtspServer(fps=5, video=encoded((240, 160))) as large,
        EmbeddedServer() as redis,
    ):

        def write(**sources: str) -> None:
            cameras: dict[str, Any] = {n: {"source": s, "stream": STREAM} for n, s in sources.items()}
            cameras["lost"] = {"source": steady.url(path="/elsewhere"), "stream": STREAM}
            detector = {"device": "cpu", "imgsz": 64, "runtime": "torch"}
            config.write_text(yaml.safe_dump({"detector": detector, "cameras": cameras}))

        def shows(**shapes: tuple[int, ...]) -> Callable[[], bool]:
            return lambda: all(frame_shape(redis.url, name) == shape for name, shape in shapes.items())

        write(steady=steady.url(), a=small.url(), b=large.url())
        with running(tmp_path, "ingest", "-c", str(config), "--redis", redis.url) as command:
            until(shows(steady=(96, 160, 3), a=(96, 160, 3), b=(160, 240, 3)), START_S)
            until(lambda: states(redis.url, "steady", "lost") == {"steady": "running", "lost": "not_found"})
            write(steady=steady.url(), a=large.url(), c=small.url())
            command.process.send_signal(signal.SIGHUP)
            until(shows(steady=(96, 160, 3), a=(160, 240, 3), c=(96, 160, 3)))
            until(lambda: frame_shape(redis.url, "b") is None)
            config.write_text("cameras: {steady: {sorce: x}}")
            command.process.send_signal(signal.SIGHUP)
            until(lambda: "sorce: unknown key" in command.stderr)
            until(shows(steady=(96, 160, 3), a=(160, 240, 3), c=(96, 160, 3)))
            num_steady = sum(transport == "tcp" for transport in steady.transports)
            assert command.stop() == 0
            command.assert_nothing_is_left()

    assert num_steady == 1, "it was never opened again"
    assert "Traceback" not in command.stderr
