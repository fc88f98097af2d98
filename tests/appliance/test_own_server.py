"""The embedded server of `serve` is started again beside everything else that the front does."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.serve import _keep_running
from appliance.tasks import end_all
from queues import EmbeddedServer, JobProducer
from tests.queues.helpers import kill_server, make_job, wait_until_async
from tests.queues.servers import binary_of

SLOW = """#!/bin/sh
touch {folder}/begun
while [ ! -e {folder}/may-start ]; do sleep 0.02; done
exec {binary} "$@"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a server that says that it begins, and starts when it may."""
    binary = tmp_path / "server"
    binary.write_text(SLOW.format(folder=tmp_path, binary=binary_of("valkey")))
    binary.chmod(0o755)
    (tmp_path / "may-start").touch()
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(folder / "server") as server:
        kill_server(server)
        for name in ("begun", "may-start"):
            (folder / name).unlink()
        yield server


async def test_the_front_goes_on_while_its_server_starts(
    server: EmbeddedServer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Q6: it starts only when this loop lets it, which a loop that waits for it could not."""
    keeping = asyncio.create_task(_keep_running(server))
    await wait_until_async((folder / "begun").exists)
    (folder / "may-start").touch()
    await wait_until_async(lambda: "was started again" in caplog.text)
    await end_all([keeping])
    assert "cannot be started" not in caplog.text
    with JobProducer(server.url) as producer:
        assert producer.put(make_job())


async def test_a_front_that_ends_meanwhile_leaves_no_server(server: EmbeddedServer, folder: Path) -> None:
    """`close` gives up the start, rather than wait for it or leave it behind."""
    keeping = asyncio.create_task(_keep_running(server))
    await wait_until_async((folder / "begun").exists)
    await end_all([keeping])
    await asyncio.to_thread(server.close)
    assert not server.is_running
    assert not server.ensure_running()
    assert not (folder / "may-start").exists()
