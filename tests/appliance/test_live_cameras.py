"""The vision worker with live cameras: they fail and return each by itself, and no password is told."""

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from appliance.camera import Camera
from appliance.camera_settings import CameraSettings
from appliance.ingest import VisionWorker
from appliance.jobs import CameraStatus
from appliance.settings import load_settings
from queues import EmbeddedServer
from tests.appliance.running import until
from tests.vision.rtsp_server import Deaf, RtspServer, encoded
from vision.pipeline import Pipeline

HARD = "p@s/w?o#r:d"
LEAK_ROUNDS = int(os.environ.get("APPLIANCE_TEST_LEAK_ROUNDS", "60"))
"""The cases V4 and V5 say 1,000."""
STREAM = {"open_s": 60.0, "first_frame_s": 60.0, "silence_s": 60.0}
"""So patient that a camera is away only when a test says so, however busy the machine is."""
QUICK = {"open_s": 2.0, "first_frame_s": 2.0, "silence_s": 1.0}


def camera(source: str, **more: Any) -> Camera:
    settings = {"source": source, "stream": STREAM} | more
    return Camera("gate", CameraSettings.model_validate(settings), threading.Event())


@contextmanager
def started(source: str, **more: Any) -> Iterator[Camera]:
    gate = camera(source, **more)
    gate.start()
    try:
        yield gate
    finally:
        gate.reader.stop(20.0)


def state_is(gate: Camera, state: str) -> Callable[[], bool]:
    return lambda: gate.status({}).state == state


@contextmanager
def worker(server: EmbeddedServer, cameras: dict[str, Any]) -> Iterator[VisionWorker]:
    settings = load_settings(None, {"detector": {"device": "cpu", "imgsz": 64}, "cameras": cameras})
    running, stop = VisionWorker(settings, server.url), threading.Event()
    thread = threading.Thread(target=running.run, args=(stop,))
    thread.start()
    try:
        yield running
    finally:
        stop.set()
        thread.join(120)
        assert not thread.is_alive()


def test_a_camera_returns_with_another_size(caplog):
    """V1: stalled while it is away, not one frame meanwhile, then the new size.

    How soon it is tried again, `test_a_camera_that_ran_is_stalled_and_tried_again_soon` tells.
    """
    with RtspServer() as server, started(server.url("john.doe:s3cret/x")) as gate:
        until(lambda: gate.reader.num_read > 3)
        assert gate.reader.take().image.shape == (96, 160, 3)
        server.kill()
        until(state_is(gate, "stalled"))
        gate.reader.take()
        num_read = gate.reader.num_read
        until(lambda: gate.reader.error is not None and "refused" in gate.reader.error)
        assert gate.reader.num_read == num_read
        server.behaviour.video = encoded((240, 160))
        server.revive()
        until(state_is(gate, "running"))
        until(lambda: (frame := gate.reader.take()) is not None and frame.image.shape == (160, 240, 3))
        status = gate.status({})

    assert status.num_openings == 2
    assert status.frame_age_s is not None
    assert "s3cret" not in caplog.text


def test_a_host_that_was_switched_off_returns():
    """V1: nothing answers, not even with a refusal; the camera is back soon after that changes."""
    with RtspServer() as server, started(server.url()) as gate:
        until(lambda: gate.reader.num_read > 3)
        server.kill()
        with Deaf(server.port):
            until(lambda: gate.reader.error is not None and "gave no answer" in gate.reader.error)
        server.revive()
        until(state_is(gate, "running"))


def test_a_camera_that_falls_silent_is_opened_again():
    """V3."""
    with RtspServer(silent_after="PLAY:3") as server, started(server.url(), stream=QUICK) as gate:
        until(lambda: server.num_connections >= 3)
        until(lambda: gate.status({}).state in {"running", "stalled"})
        num_before = gate.reader.num_read
        server.behaviour.silent_after = None
        until(lambda: gate.reader.num_read > num_before + 10)


@pytest.mark.parametrize(
    "behaviour",
    [{"silent_after": "OPTIONS"}, {"silent_after": "PLAY:0"}, {}, {"silent_after": "PLAY:4"}],
    ids=["connecting", "first frame", "running", "stalled"],
)
def test_stop_in_every_state_leaves_nothing(behaviour):
    """V6."""
    num_threads, children = threading.active_count(), psutil.Process().children()
    with RtspServer(**behaviour) as server:
        with started(server.url(), stream=QUICK) as gate:
            until(lambda: server.num_connections > 0)
            if "silent_after" not in behaviour:
                until(state_is(gate, "running"))
        assert gate.status({}).state == "stopped"
    until(lambda: threading.active_count() <= num_threads)
    assert set(psutil.Process().children()) <= set(children)


@pytest.mark.parametrize("silent_after", ["OPTIONS", "DESCRIBE", "PLAY:30"])
def test_stop_waits_for_no_deadline(silent_after):
    """V3, V6: readers that are held for minutes yet are left behind by who stops."""
    patient = {"open_s": 120.0, "first_frame_s": 120.0, "silence_s": 600.0}
    with RtspServer(silent_after=silent_after) as server, EmbeddedServer() as redis:
        with worker(redis, {"gate": {"source": server.url(), "stream": patient}}) as running:
            until(lambda: server.num_connections > 0)
            if silent_after == "PLAY:30":
                until(lambda: running._cameras["gate"].reader.num_read > 0)
        assert running._cameras["gate"].status({}).state == "stopped"


def _grown(action: Callable[[], None], num: int) -> tuple[float, int, int]:
    """MB, threads and open files that `num` times `action` have added, after some to warm up."""
    process = psutil.Process()
    for _ in range(max(20, num // 4)):
        action()
    gc.collect()
    before, num_threads, num_files = process.memory_info().rss, threading.active_count(), process.num_fds()
    for _ in range(num):
        action()
    gc.collect()
    grown_mb = (process.memory_info().rss - before) / 2**20
    return grown_mb, threading.active_count() - num_threads, process.num_fds() - num_files


def _fail_to_connect(uri: str) -> Callable[[], None]:
    gate = camera(uri)

    def connect() -> None:
        with pytest.raises(Exception, match=r"rtsp://"):
            next(iter(gate._open()))

    return connect


@pytest.mark.parametrize("kind", ["refused", "401", "404"])
def test_failed_connects_leave_nothing(kind):
    """V4."""
    children = psutil.Process().children()
    with RtspServer(login=("john.doe", HARD) if kind == "401" else None) as server:
        uri = server.url(path="/other") if kind == "404" else server.url()
        if kind == "refused":
            server.kill()
        grown_mb, num_threads, num_files = _grown(_fail_to_connect(uri), LEAK_ROUNDS)

    assert grown_mb < 24
    assert num_threads <= 2
    assert num_files <= 4
    assert set(psutil.Process().children()) <= set(children)


def test_cameras_that_come_and_go_leave_nothing():
    """V5."""
    with RtspServer(fps=100) as server:

        def come_and_go() -> None:
            with started(server.url()) as gate:
                until(lambda: gate.reader.num_read > 0)

        grown_mb, num_threads, num_files = _grown(come_and_go, LEAK_ROUNDS)

    assert grown_mb < 24
    assert num_threads <= 2
    assert num_files <= 4


def test_one_bad_camera_touches_no_other_and_no_password_is_told(caplog, capfd, monkeypatch):
    """V2, A2: a wrong password, a wrong host and a wrong path beside a camera that runs at its full rate.

    V1: when that was away, in the same size too, its tracks are forgotten.
    """
    caplog.set_level(logging.DEBUG)
    forgotten: list[str] = []
    reset = Pipeline.reset
    monkeypatch.setattr(Pipeline, "reset", lambda *args: (forgotten.append(args[1]), reset(*args)))
    with RtspServer(login=("john.doe", HARD), fps=6) as server, EmbeddedServer() as redis:
        cameras = {
            "good": server.url(f"john.doe:{HARD}"),
            "intruder": server.url("john.doe:wr@ng/pass?word"),
            "lost": server.url(f"john.doe:{HARD}", path="/elsewhere"),
            "away": f"rtsp://john.doe:{HARD}@127.0.0.2:9/cam",
            "odd": "/dev/video77",
        }
        entries = {name: {"source": source, "stream": STREAM} for name, source in cameras.items()}
        with worker(redis, entries | {"off": {"source": server.url(), "enabled": False}}) as running:
            states = {
                "good": "running",
                "intruder": "auth_failed",
                "lost": "not_found",
                "away": "connecting",
                "odd": "not_found",
                "off": "stopped",
            }
            until(lambda: {name: s.state for name, s in statuses(running).items()} == states)
            # why: whoever waits for the others, two seconds at a time, has less than one
            until(lambda: statuses(running)["good"].fps > 2)
            assert not forgotten
            server.kill()
            server.revive()
            until(lambda: forgotten == ["good"])
            told = [caplog.text, *capfd.readouterr(), *(repr(s) for s in statuses(running).values())]

    for text in told:
        for secret in ("john.doe", HARD, "p%40s", "wr@ng", "wr%40ng", "elsewhere"):
            assert secret not in text


def statuses(running: VisionWorker) -> dict[str, CameraStatus]:
    return {name: camera.status({}) for name, camera in running._cameras.items()}


def test_cameras_change_without_touching_the_others(caplog):
    """A camera comes, is paused, changes and goes while another one runs through on one connection."""
    with RtspServer(fps=20) as server, RtspServer(fps=20) as other, EmbeddedServer() as redis:
        steady = {"source": server.url(), "stream": STREAM}
        guest = {"source": other.url(), "stream": STREAM}
        with worker(redis, {"steady": steady}) as running:

            def change(cameras: dict[str, Any]) -> None:
                detector = {"device": "cpu", "imgsz": 64}
                running.change(load_settings(None, {"detector": detector, "cameras": cameras}))

            def guest_state() -> str | None:
                # why: for a moment of a change the camera is not there
                status = statuses(running).get("guest")
                return status and status.state

            def guest_has_frames() -> bool:
                status = statuses(running).get("guest")
                return status is not None and status.num_frames > 3

            until(lambda: statuses(running)["steady"].num_frames > 3)
            change({"steady": steady, "guest": guest})
            until(guest_has_frames)
            change({"steady": steady, "guest": guest | {"enabled": False}})
            until(lambda: guest_state() == "stopped")
            change({"steady": steady, "guest": guest | {"objects": {"track": ["unicorn"]}}})
            until(lambda: guest_state() == "unsupported")
            change({"steady": steady, "guest": guest | {"rotate": 90}})
            until(guest_has_frames)
            change({"steady": steady})
            until(lambda: "guest" not in statuses(running))
            until(lambda: not running._ending)
            num_frames = statuses(running)["steady"].num_frames
            until(lambda: statuses(running)["steady"].num_frames > num_frames)

    assert server.num_connections == 1
    assert other.num_connections == 2
    assert "unicorn" in caplog.text


def changed(running: VisionWorker, cameras: dict[str, Any]) -> Camera:
    """The camera `gate` once it is as is wanted by these."""
    wanted = load_settings(None, {"detector": {"device": "cpu", "imgsz": 64}, "cameras": cameras})
    running.change(wanted)

    def gate() -> Camera | None:
        camera = running._cameras.get("gate")
        return camera if camera and camera.settings is wanted.cameras["gate"] else None

    found = until(gate)
    assert found is not None
    return found


def gives_frames(gate: Camera, num_frames: int) -> None:
    until(lambda: gate.status({}).num_frames > num_frames)


def test_what_does_not_concern_its_stream_changes_beside_it(caplog):
    """Names, prompts and cooldowns touch no track either; with zones and filters tracking begins anew."""
    zone = {"zones": {"porch": {"coordinates": "0,0,1,0,1,1", "objects": ["person"]}}}
    steps: list[tuple[dict[str, Any], bool, bool]] = [
        ({"friendly_name": "Gate"}, True, True),
        (
            {"describe": {"prompt": "What is new?", "cooldown": {"object": 1, "camera": 2, "track": 3}}},
            True,
            True,
        ),
        ({"describe": {"max_side": 640}, "snapshots": {"enabled": False}}, True, False),
        (zone, True, False),
        ({"objects": {"track": ["person"], "filters": {"person": {"min_score": 0.9}}}}, True, False),
        ({"privacy": {"mask": "0,0,1,0,1,1"}}, False, False),
    ]
    with RtspServer(fps=20) as server, EmbeddedServer() as redis:
        gate = {"source": server.url(), "stream": STREAM}
        with worker(redis, {"gate": gate}) as running:
            until(lambda: statuses(running)["gate"].num_frames > 3)
            for keys, has_its_stream, has_its_tracks in steps:
                before, tracks = running._cameras["gate"], running._pipeline._cameras["gate"]
                num_frames, life_id = before.status({}).num_frames, before.life_id
                now = changed(running, {"gate": gate | keys})
                assert (now is before, now.life_id == life_id) == (has_its_stream, has_its_stream), keys
                gives_frames(now, num_frames if now is before else 0)
                assert (running._pipeline._cameras["gate"] is tracks) == has_its_tracks, keys
                assert running._pipeline._cameras["gate"]._config == running._config("gate"), keys

    assert server.num_connections == 2
    assert "Traceback" not in caplog.text


def test_a_change_that_fails_beside_the_stream_ends_the_camera_with_its_reason():
    """A detector of which the front knows no classes; what is right again runs again."""
    live = {"source": "synthetic://street?seed=3&fps=10"}
    with EmbeddedServer() as redis, worker(redis, {"gate": live}) as running:
        for track, state in ((["unicorn"], "unsupported"), (["person"], "running")):
            until(state_is(changed(running, {"gate": live | {"objects": {"track": track}}}), state))
