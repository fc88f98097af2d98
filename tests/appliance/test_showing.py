"""When cameras' frames are shown on the board."""

from collections.abc import Iterator

import numpy as np
import pytest

from appliance.board import BoardWriter
from appliance.jobs import frame_key
from appliance.showing import FRAME_EVERY_S, WATCHED_FRAME_EVERY_S, Showing
from queues import EmbeddedServer
from vision.types import Frame


class Clock:
    """Seconds that pass when a test says so."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def board(server: EmbeddedServer) -> Iterator[BoardWriter]:
    writer = BoardWriter(server.url)
    writer._redis.flushall()
    yield writer
    writer.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def frame(grey: int, camera: str = "gate") -> Frame:
    return Frame(camera, grey, 0.0, 0.0, np.full((32, 48, 3), grey, np.uint8))


def shown(board: BoardWriter, camera: str = "gate") -> bytes | None:
    return board._redis.get(frame_key(camera))


def test_one_that_nobody_looks_at_is_shown_now_and_then(board, clock):
    showing = Showing(board, clock)
    showing.see(frame(1))
    first = shown(board)
    assert first

    clock.now_s += FRAME_EVERY_S - 0.1
    showing.see(frame(60))
    assert shown(board) == first
    clock.now_s += 0.2
    showing.see(frame(120))
    assert shown(board) not in (None, first)


def test_who_begins_to_look_sees_the_newest_frame_without_waiting_for_the_next(board, clock):
    showing = Showing(board, clock)
    showing.see(frame(1))
    first = shown(board)
    clock.now_s += 1
    showing.see(frame(200))
    assert shown(board) == first

    showing.watched = frozenset({"gate"})
    showing.show("gate")
    newer = shown(board)
    assert newer not in (None, first)
    board.forget_frame("gate")
    clock.now_s += 1
    showing.show("gate")
    assert shown(board) is None, "a frame is shown once, else it would seem newer than it is"

    showing.see(frame(100))
    assert shown(board) not in (None, first, newer)
    latest = shown(board)
    clock.now_s += WATCHED_FRAME_EVERY_S / 2
    showing.see(frame(30))
    assert shown(board) == latest


def test_a_camera_that_is_forgotten_shows_nothing_of_before(board, clock):
    showing = Showing(board, clock)
    showing.see(frame(1))
    clock.now_s += 1
    showing.see(frame(2))
    showing.see(frame(3, camera="yard"))

    showing.forget("gate")
    showing.watched = frozenset({"gate", "yard"})
    showing.show("gate")
    assert shown(board) is None
    assert shown(board, "yard")
    showing.see(frame(4))
    assert shown(board)
