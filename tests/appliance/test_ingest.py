"""The vision worker against a real Valkey: jobs, newest frames, and how the cameras are doing."""

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from appliance.board import BoardReader, BoardWriter
from appliance.ingest import VisionWorker, collect_s
from appliance.jobs import CameraStatus, decode_job, frame_key
from appliance.settings import Settings, load_settings
from queues import EmbeddedServer, JobConsumer, QueueUnavailable
from tests.appliance.running import until
from tests.queues.servers import Server, started

VIDEO = "synthetic://street?seed=3&fps=5&frames=40"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


def settings(name: str, **cameras: str) -> Settings:
    return load_settings(
        None,
        {
            "detector": {"device": "cpu", "imgsz": 320},
            "describe": {"cooldown_s": 0, "min_hits": 2},
            "queue": {"stream": name},
            "cameras": {name: {"source": source} for name, source in cameras.items()},
        },
    )


async def test_cameras_end_and_fail_each_by_themselves(server, monkeypatch, tmp_path):
    """V2, V17: two good cameras with tracks of their own, one whose file is not there."""
    monkeypatch.setattr("vision.sources.PacedSource.__iter__", lambda self: iter(self._source))
    missing = str(tmp_path / "missing.mp4")
    chosen = settings("ends", left=VIDEO, right=VIDEO.replace("seed=3", "seed=4"), broken=missing)
    worker, stop = VisionWorker(chosen, server.url), threading.Event()
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    board = BoardReader(server.url, tuple(chosen.cameras))
    async with JobConsumer(server.url, chosen.queue) as consumer:
        try:
            jobs = []
            while {s.name: s.state for s in await board.statuses()} != {
                "left": "ended",
                "right": "ended",
                "broken": "not_found",
            }:
                jobs += [decode_job(delivery.job.body) for delivery in await consumer.take(8, 200)]
            frame = await board.frame("left")
        finally:
            stop.set()
            thread.join()
        jobs += [decode_job(delivery.job.body) for delivery in await consumer.take(8, 0)]
        left, right, broken = await board.statuses()
        await board.close()

    assert {job.camera for job in jobs} == {"left", "right"}
    assert len({job.job_id for job in jobs}) == len(jobs) == left.num_jobs + right.num_jobs
    assert left.num_frames == right.num_frames == 40
    assert left.num_dropped == 0
    assert frame is not None
    assert frame.startswith(b"\xff\xd8")
    assert broken.error is not None
    assert "missing.mp4" in broken.error
    assert not thread.is_alive()


async def test_frames_are_shown_more_often_while_somebody_looks(server, monkeypatch):
    """One that nobody wants to see costs no JPEG."""
    monkeypatch.setattr("appliance.ingest.FRAME_EVERY_S", 1e9)
    chosen = settings("looks", desk="synthetic://street?seed=3&fps=10")
    worker, stop = VisionWorker(chosen, server.url), threading.Event()
    board, camera = BoardReader(server.url, tuple(chosen.cameras)), worker._cameras["desk"]
    newest = partial(worker._board._redis.get, frame_key("desk"))
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        shown = until(newest)
        until(lambda: camera.rate.fps > 0 and camera.reader.num_read > 8)
        assert newest() == shown
        while await board.frame("desk") == shown:
            await asyncio.sleep(0.05)
    finally:
        stop.set()
        thread.join()
        await board.close()


async def test_the_board_knows_the_configured_cameras_only(server):
    writer, board = BoardWriter(server.url), BoardReader(server.url, ("front", "back"))
    writer.write_frame("front", b"jpeg")
    writer.write_frame("other", b"jpeg")
    writer.write_status(CameraStatus(name="front", state="running", num_frames=3))

    assert writer.watched(("front", "back")) == set()
    assert await board.frame("front") == b"jpeg"
    assert await board.frame("back") is None
    assert await board.frame("other") is None
    assert writer.watched(("front", "back", "other")) == {"front", "back"}
    assert [(s.name, s.state, s.num_frames) for s in await board.statuses()] == [
        ("front", "running", 3),
        ("back", "connecting", 0),
    ]
    writer.close()
    await board.close()


async def test_the_board_survives_an_outage(tmp_path: Path, caplog):
    """Q6: frames and statuses are skipped while Redis is away, and one line is logged, not one a frame."""
    now = 0.0
    with EmbeddedServer() as server:
        writer, board = BoardWriter(server.url, lambda: now), BoardReader(server.url, ("front",))
        server.close()
        for _ in range(20):
            writer.write_frame("front", b"jpeg")
        assert await board.frame("front") is None
        assert writer.watched(("front",)) == set()
        assert [status.state for status in await board.statuses()] == ["connecting"]
        assert len(caplog.records) == 1
        server.ensure_running()
        now = 10.0
        writer.write_frame("front", b"jpeg")
        assert await board.frame("front") == b"jpeg"
    writer.close()
    await board.close()


def test_a_worker_waits_for_its_redis(tmp_path, caplog):
    """Q6: a worker that was started again while Redis is away is there when that is back."""
    server, stop, made = Server(tmp_path, "valkey", []), threading.Event(), []
    chosen = settings("waits", left=VIDEO)
    url = f"redis://127.0.0.1:{server.port}/0"
    with pytest.raises(QueueUnavailable):
        VisionWorker(chosen, url)
    thread = threading.Thread(target=lambda: made.append(VisionWorker(chosen, url, stop)))
    thread.start()
    until(lambda: "the cameras wait for the queue" in caplog.text)
    with started(server):
        thread.join(60)
        (worker,) = made
        stop.set()
        worker.run(stop)


@pytest.mark.parametrize(
    ("rates", "last_batch_s", "expected_s"),
    [
        ([5.0] * 8, 0.06, 0.07),
        ([1.0, 0.5], 0.06, 0.1),
        ([30.0, 5.0], 0.026, 0.01),
        ([5.0, 5.0], 0.5, 0.01),
        ([0.0, 0.0], 0.0, 0.01),
        ([], 0.0, 0.01),
    ],
)
def test_a_batch_waits_for_other_cameras_while_none_is_late(rates, last_batch_s, expected_s):
    """Half of what is left until the fastest camera's next frame; never so long that this is late."""
    assert collect_s(rates, last_batch_s) == pytest.approx(expected_s)
