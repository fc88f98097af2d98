"""Live streams against servers on loopback: what comes, what is lost, what is said when nothing comes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, pairwise
from urllib.parse import quote

import numpy as np
import pytest

from tests.vision.http_cameras import HttpCameras
from tests.vision.rtsp_server import RtspServer, encoded
from tests.vision.videos import corner, turned_jpeg
from vision.errors import (
    SourceAuthFailed,
    SourceError,
    SourceNotFound,
    SourceUnreadable,
    SourceUnsupported,
)
from vision.options import SourceOptions, StreamConfig
from vision.sources import FrameSource, open_source
from vision.streams import LiveStream

HARD = "p@s/w?o#r:d"
QUICK = StreamConfig(open_s=20.0, first_frame_s=1.0, silence_s=1.0)
PATIENT = StreamConfig(open_s=60.0, first_frame_s=60.0, silence_s=60.0)


@contextmanager
def frames_of(uri: str, config: StreamConfig = PATIENT) -> Iterator[tuple[FrameSource, Iterator[object]]]:
    source = open_source(uri, camera="gate", options=SourceOptions(stream=config))
    frames = iter(source)
    try:
        yield source, frames
    finally:
        frames.close()  # type: ignore[attr-defined]


def failure(uri: str, config: StreamConfig = PATIENT) -> SourceError:
    """What the stream raises in the end, whatever comes before."""
    with frames_of(uri, config) as (_, frames), pytest.raises(SourceError) as raised:
        for _ in frames:
            pass
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    return raised.value


@pytest.fixture
def camera() -> Iterator[RtspServer]:
    with RtspServer() as server:
        yield server


@pytest.mark.parametrize("transport", ["tcp", "udp"])
def test_rtsp_gives_pictures_with_the_times_of_the_camera(camera, transport):
    with frames_of(camera.url(), replace(PATIENT, transport=transport)) as (source, frames):
        taken = list(islice(frames, 6))

    assert isinstance(source, FrameSource)
    assert source.is_live
    assert source.fps == pytest.approx(10)
    assert camera.transports == [transport]
    assert {frame.image.shape for frame in taken} == {(96, 160, 3)}
    # why: the very first RTP packet comes without a time.
    steps = [b.time_s - a.time_s for a, b in pairwise(taken[1:])]
    assert steps == pytest.approx([0.1] * 4, abs=0.02)
    assert all(abs(time.time() - frame.captured_at) < 60 for frame in taken)


@pytest.mark.parametrize("password", [HARD, quote(HARD, safe="")])
def test_a_password_of_any_kind_lets_in(camera, password):
    camera.behaviour.login = ("john.doe", HARD)
    with frames_of(camera.url(f"john.doe:{password}")) as (_, frames):
        assert next(frames)


@pytest.mark.parametrize("login", ["", "john.doe:wr@ng/secret"])
def test_a_wrong_password_is_said_without_saying_it(camera, login):
    """A2."""
    camera.behaviour.login = ("john.doe", HARD)
    error = failure(camera.url(login))

    assert isinstance(error, SourceAuthFailed)
    assert str(error) == f"rtsp://127.0.0.1:{camera.port}/… refuses access: check user and password"


def test_a_path_that_is_not_there(camera):
    assert isinstance(failure(camera.url(path="/secret-key")), SourceNotFound)
    assert "secret-key" not in str(failure(camera.url(path="/secret-key")))


def test_a_host_that_does_not_listen(camera):
    camera.kill()
    error = failure(camera.url("john.doe:secret"))

    assert isinstance(error, SourceUnreadable)
    assert "Connection refused" in str(error)
    assert "secret" not in str(error)


@pytest.mark.parametrize("silent_after", ["OPTIONS", "DESCRIBE", "PLAY:0", "PLAY:4"])
@pytest.mark.parametrize("transport", ["tcp", "udp"])
def test_silence_ends_at_its_deadline(camera, silent_after, transport):
    """V3: a camera that holds the connection and says nothing does not hold its reader."""
    camera.behaviour.silent_after = silent_after
    config = StreamConfig(transport=transport, open_s=0.5, first_frame_s=0.5, silence_s=0.5)
    started_at = time.monotonic()

    assert isinstance(failure(camera.url(), config), SourceUnreadable)
    assert time.monotonic() - started_at < PATIENT.silence_s / 2


@pytest.mark.parametrize("transport", ["tcp", "udp"])
def test_silence_after_pictures_ends_sooner_than_opening_may_take(camera, transport):
    """V3: FFmpeg itself would wait for as long as an answer may take."""
    camera.behaviour.fps = 50
    config = replace(PATIENT, transport=transport, silence_s=0.5)
    with frames_of(camera.url(), config) as (_, frames):
        next(frames)
        camera.behaviour.fps = 0.001
        started_at = time.monotonic()
        with pytest.raises(SourceUnreadable, match=r"no answer for 0\.5 s"):
            list(frames)
    assert time.monotonic() - started_at < PATIENT.open_s / 2


@pytest.mark.parametrize("transport", ["tcp", "udp"])
@pytest.mark.parametrize("fault", ["damage", "loss"])
def test_damaged_packets_are_counted_and_passed_over(camera, fault, transport):
    """V7: pictures of several packets, some of which are wrong or never come."""
    noise = np.random.default_rng(0).integers(0, 256, (96, 400, 3), np.uint8)
    camera.behaviour.video = encoded(pictures=[noise[:, 8 * i : 8 * i + 160].copy() for i in range(10)])
    setattr(camera.behaviour, fault, 0.05)
    camera.behaviour.fps = 50
    with frames_of(camera.url(), replace(PATIENT, transport=transport)) as (source, frames):
        taken = list(islice(frames, 40))

    assert len(taken) == 40
    assert source.losses["damaged"] > 0
    assert {frame.image.shape for frame in taken} == {(96, 160, 3)}


def test_nothing_but_damage_is_silence(camera):
    camera.behaviour.damage = 1.0
    camera.behaviour.fps = 50

    assert isinstance(failure(camera.url(), QUICK), SourceUnreadable)


@pytest.mark.parametrize("jump_s", [7200.0, 8.0, -8.0, -7200.0])
def test_times_that_jump_are_not_believed(camera, jump_s):
    """V11: time goes on by the local clock, and no frame is from the future."""
    camera.behaviour.jump_s = 10_000.0
    with frames_of(camera.url()) as (_, frames):
        before = list(islice(frames, 3))
        camera.behaviour.jump_s += jump_s
        after = list(islice(frames, 6))

    times = [frame.time_s for frame in before + after]
    assert times == sorted(times)
    assert times[0] == pytest.approx(0)
    assert times[-1] < 7
    assert times[-1] - times[3] > 0.4
    assert all(frame.captured_at <= time.time() for frame in after)


def test_a_size_that_changes_in_the_stream(camera):
    """V13."""
    with frames_of(camera.url()) as (_, frames):
        assert next(frames).image.shape == (96, 160, 3)
        camera.behaviour.video = encoded((240, 160))
        sizes = {frame.image.shape for frame in islice(frames, 25)}

    assert (160, 240, 3) in sizes
    assert sizes <= {(96, 160, 3), (160, 240, 3)}


def test_only_so_many_frames_a_second_are_handed_on(camera):
    camera.behaviour.fps = 20
    with frames_of(camera.url(), replace(PATIENT, max_fps=5.0)) as (_, frames):
        taken = list(islice(frames, 4))

    steps = [b.index - a.index for a, b in pairwise(taken)]
    assert steps[1:] == [4, 4]


def test_frames_are_turned_and_made_smaller(camera):
    options = SourceOptions(rotate=90, max_width=64, max_height=80, stream=PATIENT)
    source = open_source(camera.url(), camera="gate", options=options)
    frame = next(iter(source))
    source.close()

    assert frame.image.shape == (80, 48, 3)


def test_close_ends_a_stream_that_runs(camera):
    """V6."""
    source = open_source(camera.url(), camera="gate", options=SourceOptions(stream=PATIENT))
    frames = iter(source)
    next(frames)
    source.close()

    assert list(frames) == []


def test_mjpeg_by_http():
    with HttpCameras() as http, frames_of(http.url("/mjpeg")) as (source, frames):
        taken = list(islice(frames, 8))

    assert taken[0].image.shape == (96, 160, 3)
    assert taken[-1].time_s < 60
    assert source.losses["damaged"] == 0


def test_parts_that_ask_to_be_turned_are():
    """V10: many cameras and phones write EXIF into each picture."""
    with HttpCameras([turned_jpeg(corner(160, 96), 6)]) as http, frames_of(http.url("/mjpeg")) as (_, frames):
        image = next(frames).image

    assert image.shape == (160, 96, 3)
    assert image[:70, 52:].min() > 200
    assert image[90:].max() < 60


def test_parts_without_their_end_are_skipped_and_counted():
    """V8: a part cut off, one without its end marker, an empty one; the whole ones come."""
    whole = encoded(codec="mjpeg")
    parts = [whole[0], whole[1][:-300], whole[2][:-2], b"", whole[3]]
    with HttpCameras(parts, fps=50) as http, frames_of(http.url("/mjpeg")) as (source, frames):
        taken = list(islice(frames, 12))

    assert len(taken) == 12
    assert source.losses["damaged"] >= 8


def test_parts_may_be_filled_up():
    """To a size of the camera's own, whatever that is."""
    parts = [part + b"\0" * 20_000 for part in encoded(codec="mjpeg")]
    with HttpCameras(parts) as http, frames_of(http.url("/mjpeg")) as (source, frames):
        taken = list(islice(frames, 4))

    assert len(taken) == 4
    assert source.losses["damaged"] == 0


def test_hls_is_held_to_its_pace():
    with HttpCameras() as http, frames_of(http.url("/live.m3u8")) as (_, frames):
        started_at = time.monotonic()
        taken = list(islice(frames, 15))
        took_s = time.monotonic() - started_at

    assert taken[-1].time_s > 1.2
    assert took_s > 1.2


@pytest.mark.parametrize(
    ("path", "login", "kind"),
    [
        ("/nothing", "john.doe:" + HARD, SourceNotFound),
        ("/page", "john.doe:" + HARD, SourceUnsupported),
        ("/mjpeg", "john.doe:wrong", SourceAuthFailed),
    ],
)
def test_http_that_gives_no_video(path, login, kind):
    with HttpCameras(login="john.doe:" + HARD) as http:
        error = failure(http.url(path, login))

    assert isinstance(error, kind)
    assert "john" not in str(error)


def test_http_never_leads_to_a_file(tmp_path):
    """A4: a playlist of a stranger may name anything."""
    (tmp_path / "own.ts").write_bytes(b"\x47" * 188)
    with HttpCameras() as http:
        http.playlist = (
            f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{tmp_path}/own.ts\n#EXT-X-ENDLIST\n"
        )
        assert isinstance(failure(http.url("/live.m3u8")), SourceError)


@pytest.mark.parametrize(
    ("uri", "kind"),
    [
        ("/dev/video77", SourceNotFound),
        ("v4l2:///dev/video77?size=640x480", SourceNotFound),
        ("v4l2:///dev/null", SourceUnsupported),
        ("v4l2:///dev/video0?zoom=1", SourceUnsupported),
        ("rtsp://", SourceUnsupported),
    ],
)
def test_what_cannot_be_a_camera(uri, kind):
    with pytest.raises(kind):
        next(iter(open_source(uri, camera="gate")))


def test_an_address_is_only_connected_to_when_it_is_read():
    """V2: a camera that is away holds up nobody's start."""
    source = open_source("rtsp://john.doe:secret@192.0.2.1/live", camera="gate")

    assert isinstance(source, LiveStream)
    assert "secret" not in repr(source._address)
