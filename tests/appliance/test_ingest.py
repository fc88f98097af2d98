"""The vision worker against a real Valkey: jobs, newest frames, and how the cameras are doing."""

import asyncio
import io
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from appliance.board import MAX_ASKED, AskedTooOftenError, BoardReader, BoardWriter
from appliance.collecting import collect_s
from appliance.ingest import VisionWorker, _follow_changes
from appliance.jobs import CameraStatus, decode_change, decode_job, frame_key
from appliance.permits import TELL_AGAIN_S, Permits, permit_of
from appliance.settings import Settings, load_settings, to_json
from appliance.view_settings import PrivacySettings
from queues import EmbeddedServer, JobConsumer, JobProducer, QueueUnavailable, connect
from tests.appliance.running import until
from tests.queues.helpers import kill_server, make_job
from tests.queues.servers import Server, started
from vision import sources
from vision.errors import UnknownClass

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
    assert frame.jpeg.startswith(b"\xff\xd8")
    assert broken.error is not None
    assert "missing.mp4" in broken.error
    assert not thread.is_alive()


async def test_frames_are_shown_more_often_while_somebody_looks(server, monkeypatch):
    """One that nobody wants to see costs no JPEG."""
    monkeypatch.setattr("appliance.showing.FRAME_EVERY_S", 1e9)
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
        while (frame := await board.frame("desk")) is None or frame.jpeg == shown:
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
    frame = await board.frame("front")
    assert frame is not None
    assert frame.jpeg == b"jpeg"
    assert 0 <= frame.age_s < 10
    writer._redis.pexpire(frame_key("front"), 20_000)
    frame = await board.frame("front")
    assert frame is not None
    assert 10 <= frame.age_s < 20
    assert await board.frame("back") is None
    assert await board.frame("other") is None
    assert writer.watched(("front", "back", "other")) == {"front", "back"}
    assert (writer.watched(()), writer.take_asked(())) == (set(), {})
    assert writer.watched(("back",)) == {"back"}, "no camera is no outage"
    assert [(s.name, s.state, s.num_frames) for s in await board.statuses()] == [
        ("front", "running", 3),
        ("back", "connecting", 0),
    ]
    writer.close()
    await board.close()


async def test_two_workers_with_a_camera_of_one_name_are_told_of_each_other(server, caplog):
    """Each is named where the other's users look, and again not once one of them is gone."""
    now, (name,) = 0.0, ("shared",)
    one, other = (BoardWriter(server.url, lambda: now) for _ in range(2))
    other._rivals._who = "process 7 on elsewhere"
    board, status = BoardReader(server.url, (name,)), CameraStatus(name=name, state="running")
    told = []
    for writer in [one, other] * 5:
        writer.write_status(status)
        told += [(shown.worker, shown.error) for shown in await board.statuses()]
    assert told[0][1] is None
    assert "process 7 on elsewhere runs a camera of this name too: give one" in told[-2][1]
    assert one._rivals._who in told[-1][1]
    one.write_status(CameraStatus(name=name, state="stalled", error="no picture comes"))
    assert [shown.error for shown in await board.statuses()] == ["no picture comes"]
    now = 20.0
    one.write_status(status)
    assert [shown.error for shown in await board.statuses()] == [None]
    assert len([line for line in caplog.messages if f"camera={name} process" in line]) == 2
    for writer in (one, other):
        writer.close()
    await board.close()


async def test_a_worker_in_place_of_one_that_ended_has_no_rival(server, caplog):
    """It finds the other's status, and its last words; a Redis that was away changes nothing in that."""
    board, status = BoardReader(server.url, ("handed-on",)), CameraStatus(name="handed-on", state="running")
    before, after = BoardWriter(server.url), BoardWriter(server.url)
    for writer in (before, after, before, after, after, after):
        writer.write_status(status)
    assert [shown.error for shown in await board.statuses()] == [None]
    assert not [line for line in caplog.messages if "another name" in line]
    for writer in (before, after):
        writer.close()
    await board.close()


async def test_no_more_is_asked_for_than_may_wait(server):
    """What was promised comes; what is not taken frees its place when the worker takes another."""
    writer, board = BoardWriter(server.url), BoardReader(server.url, ("asked",))
    ids = [await board.ask("asked") for _ in range(MAX_ASKED)]
    with pytest.raises(AskedTooOftenError):
        await board.ask("asked")
    assert [writer.take_asked(("asked",))["asked"] for _ in range(MAX_ASKED)] == ids
    assert writer.take_asked(("asked",)) == {}
    writer.close()
    await board.close()


async def test_the_board_survives_an_outage(tmp_path: Path, caplog):
    """Q6: frames and statuses are skipped while Redis is away, and one line is logged, not one a frame."""
    now = 0.0
    with EmbeddedServer() as server:
        writer, board = BoardWriter(server.url, lambda: now), BoardReader(server.url, ("front",))
        kill_server(server)
        for second in (*[0] * 10, *range(1, 10)):
            now = float(second)
            writer.write_frame("front", b"jpeg")
        assert await board.frame("front") is None
        assert writer.watched(("front",)) == set()
        assert [status.state for status in await board.statuses()] == ["connecting"]
        assert len(caplog.records) == 1
        server.ensure_running()
        now = 10.0
        writer.write_frame("front", b"jpeg")
        assert await board.frame("front") is not None
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
        thread.join(240)
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


@contextmanager
def running(worker: VisionWorker) -> Iterator[None]:
    """The worker in a thread, which has to be alive at the end."""
    stop = threading.Event()
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        yield
        assert thread.is_alive()
    finally:
        stop.set()
        thread.join()


LIVE = "synthetic://street?seed=3&fps=10"


def test_what_one_camera_fails_by_ends_no_other(server, monkeypatch):
    """V17: while it is added, looked at or reported; it comes back by itself."""
    worker = VisionWorker(settings("alone", good=LIVE, weak=LIVE), server.url)
    good, weak, inner = worker._cameras["good"], worker._cameras["weak"], worker._pipeline._cameras["weak"]
    configure = worker._config
    with running(worker):
        with monkeypatch.context() as failing:
            failing.setattr(inner, "process", lambda *_: 1 / 0)
            failing.setattr(weak.reader, "watch", lambda: 1 / 0)
            until(lambda: weak.num_failed > 3)
            status = weak.status({})
            assert status.error == "ZeroDivisionError: division by zero"
            assert status.dropped["failed"] > 3
        until(lambda: weak.status({}).error is None)

        monkeypatch.setattr(worker, "_config", lambda name: 1 / 0 if name == "odd" else configure(name))
        worker.change(settings("alone", good=LIVE, weak=LIVE, odd=LIVE, torn="synthetic://["))
        until(lambda: "torn" in worker._cameras and worker._cameras["torn"].status({}).state == "unsupported")
        assert worker._cameras["odd"].status({}).state == "unsupported"
        num_seen = good.status({}).num_frames
        until(lambda: good.status({}).num_frames > num_seen + 2)
        assert worker._cameras["good"] is good


def test_what_one_camera_fails_by_at_the_first_start_ends_no_other(server, monkeypatch):
    """V2: nobody foresaw it; what somebody did, a class that is not known, ends the start and says so."""
    configure = VisionWorker._config
    with monkeypatch.context() as failing:
        failing.setattr(
            VisionWorker, "_config", lambda self, name: 1 / 0 if name == "odd" else configure(self, name)
        )
        worker = VisionWorker(settings("first", good=LIVE, odd=LIVE, stuck=LIVE), server.url)
    monkeypatch.setattr(worker._cameras["stuck"].reader, "start", lambda: 1 / 0)
    with running(worker):
        until(lambda: worker._cameras["good"].status({}).num_frames > 2)
        odd, stuck = (worker._cameras[name].status({}) for name in ("odd", "stuck"))
    assert (odd.state, odd.error) == ("unsupported", "ZeroDivisionError: division by zero")
    assert stuck.error == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    "looked_at",
    [
        {"objects": {"track": ["unicorn"]}},
        {"objects": {"track": ["person"]}, "describe": {"objects": ["person", "unicorn"]}},
        {"describe": {"object_prompts": {"scene": "What?", "unicorn": "Where?"}}},
    ],
)
def test_a_class_that_is_not_known_ends_the_start(server, looked_at):
    """V18: also one that is only to be described, and is not tracked either."""
    cameras = {"good": {"source": LIVE} | looked_at}
    wrong = load_settings(None, {"detector": {"device": "cpu", "imgsz": 64}, "cameras": cameras})
    with pytest.raises(UnknownClass, match=r"'good'.* no class 'unicorn'\. It knows: person"):
        VisionWorker(wrong, server.url)


def test_a_file_that_hangs_holds_up_no_other(server, monkeypatch, tmp_path):
    """V2, V3: at the start and when it is added; whoever opens a file on a drive that is away is held."""
    monkeypatch.setattr("appliance.camera.OPEN_S", 0.05)
    open_path, released, far = sources._open_path, threading.Event(), tmp_path / "far.mp4"
    monkeypatch.setattr(
        sources,
        "_open_path",
        lambda path, camera: released.wait() if path == far else open_path(path, camera),
    )
    worker = VisionWorker(settings("far", good=LIVE, far=str(far)), server.url)
    try:
        with running(worker):
            until(lambda: worker._cameras["good"].status({}).num_frames > 2)
            worker.change(settings("far", good=LIVE, far=str(far), also=str(far)))
            until(lambda: "also" in worker._cameras)
            num_seen = worker._cameras["good"].status({}).num_frames
            until(lambda: worker._cameras["good"].status({}).num_frames > num_seen + 2)
            assert {worker._cameras[name].status({}).state for name in ("far", "also")} == {"connecting"}
    finally:
        released.set()


def told(server: EmbeddedServer, chosen: Settings) -> dict[str, list[str]]:
    """The states of each event, in order."""
    with closing(connect(server.url, chosen.queue)) as client:
        changes = [decode_change(fields[b"body"]) for _, fields in client.xrange(chosen.queue.told)]
    states: dict[str, list[str]] = {}
    for change in changes:
        states.setdefault(change.event_id, []).append(change.state)
    return states


def test_every_event_ends(server, monkeypatch):
    """With its recording, with a camera that stays away, with the worker."""
    monkeypatch.setattr("vision.sources.PacedSource.__iter__", lambda self: iter(self._source))
    monkeypatch.setattr("appliance.ingest.GONE_S", 0.1)
    monkeypatch.setattr("appliance.reader.STALE_AFTER_S", 0.1)
    monkeypatch.setattr("appliance.ingest.STATUS_EVERY_S", 0.1)
    chosen = settings("ending", over=VIDEO, away=VIDEO.replace("=40", "=4000"), on=LIVE)
    worker = VisionWorker(chosen, server.url)
    open_events, away = worker._courses.open_events, worker._cameras["away"].reader
    with running(worker):
        until(lambda: worker._cameras["over"].reader.is_done and not open_events("over"))
        until(lambda: open_events("away"))
        away.request_stop()
        until(lambda: not open_events("away"))
        until(lambda: open_events("on"))

    states = told(server, chosen)
    assert {event_id.partition("-")[0] for event_id in states} == set(chosen.cameras)
    assert all(
        (of_one[0], of_one[-1], of_one.count("end")) == ("new", "end", 1) for of_one in states.values()
    )


def test_no_frame_of_before_stays_when_a_camera_is_paused_or_masked(server):
    chosen = settings("paused", other=LIVE, yard=LIVE)
    worker = VisionWorker(chosen, server.url)
    newest = partial(worker._board._redis.get, frame_key("yard"))
    with running(worker):
        until(newest)
        yard = chosen.cameras["yard"].model_copy(update={"enabled": False})
        worker.change(chosen.model_copy(update={"cameras": {**chosen.cameras, "yard": yard}}))
        until(lambda: newest() is None)


MASK = "0.1,0.1,0.4,0.1,0.4,0.4"


async def test_jobs_of_before_are_dropped_when_a_camera_is_masked_paused_or_removed(server, monkeypatch):
    """Recordings, so that no frame comes after: what waits shows what is to be hidden now."""
    monkeypatch.setattr("vision.sources.PacedSource.__iter__", lambda self: iter(self._source))
    chosen = settings("withdrawn", kept=VIDEO, masked=VIDEO, paused=VIDEO, gone=VIDEO)
    chosen = chosen.model_copy(update={"describe": chosen.describe.model_copy(update={"max_age_s": 600})})
    worker = VisionWorker(chosen, server.url)
    async with JobConsumer(server.url, chosen.queue) as consumer:
        with running(worker):
            await asyncio.to_thread(until, lambda: worker._is_done)
            before = (await consumer.status()).waiting
            assert set(before) == set(chosen.cameras)
            camera = chosen.cameras["kept"]
            masked = camera.model_copy(update={"privacy": PrivacySettings(mask=MASK), "source": LIVE})
            cameras = {
                "kept": camera,
                "masked": masked,
                "paused": camera.model_copy(update={"enabled": False}),
            }
            worker.change(chosen.model_copy(update={"cameras": cameras}))
            async with asyncio.timeout(120):
                while set((status := await consumer.status()).waiting) != {"kept", "masked"}:
                    await asyncio.sleep(0.05)
        assert status.dropped["withdrawn"] == sum(before[name] for name in ("masked", "paused", "gone"))
        jobs = [delivery.job for delivery in await consumer.take(50)]
    assert {job.permit for job in jobs} == {permit_of(camera), permit_of(masked)} == {"", permit_of(masked)}


async def test_what_is_hidden_stays_so_when_redis_comes_back_empty():
    """A frame of before the mask is still with the model, and the queue has forgotten that there is one."""
    chosen, now = settings("hidden", yard=LIVE), 0.0
    masked = {"yard": chosen.cameras["yard"].model_copy(update={"privacy": PrivacySettings(mask=MASK)})}
    with EmbeddedServer() as server, JobProducer(server.url, chosen.queue) as producer:
        async with JobConsumer(server.url, chosen.queue) as consumer:
            permits = Permits(producer, chosen.cameras, lambda: now)
            permits.tell()
            producer.put(make_job("before", key="yard"))
            [in_hand] = await consumer.take(1, 20_000)
            permits.change(chosen.cameras, masked)
            assert await consumer.is_withdrawn(in_hand)
            await asyncio.to_thread(kill_server, server)
            assert await asyncio.to_thread(server.ensure_running)
            now = TELL_AGAIN_S
            async with asyncio.timeout(30):
                while not await consumer.is_withdrawn(in_hand):
                    await asyncio.to_thread(permits.tell)
                    now += TELL_AGAIN_S


def test_a_worker_waits_for_cameras_that_are_paused(server, monkeypatch):
    """It may go on with them; it ends when all sources have."""
    monkeypatch.setattr("vision.sources.PacedSource.__iter__", lambda self: iter(self._source))
    chosen = settings("paused", left=VIDEO.replace("frames=40", "frames=2"))
    paused = {"left": chosen.cameras["left"].model_copy(update={"enabled": False})}
    worker = VisionWorker(chosen.model_copy(update={"cameras": paused}), server.url)
    turn, numbers = worker._turn, iter(range(3))

    def turn_and_go_on() -> None:
        turn()
        if next(numbers, None) == 1:
            worker.change(chosen)

    monkeypatch.setattr(worker, "_turn", turn_and_go_on)
    worker.run(threading.Event(), until_ended=True)

    assert worker._cameras["left"].status({}).num_frames == 2


def test_a_change_that_cannot_be_read_does_not_stop_those_after(monkeypatch, caplog):
    chosen, seen = settings("told", left=LIVE), []
    good = to_json(chosen).decode()
    bad = good.replace('"synthetic', r'"\ud83d rtsp://me:s3cret@host')
    assert bad != good
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{bad}\n{good}\n"))
    monkeypatch.setattr(VisionWorker, "change", lambda self, settings: seen.append(settings))
    _follow_changes(object.__new__(VisionWorker))

    assert seen == [chosen]
    assert "not read again" in caplog.text
    assert "s3cret" not in caplog.text
