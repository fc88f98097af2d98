"""Events whose worker is gone: the front ends them, once, and no others."""

from pathlib import Path

import msgspec

from appliance.board import BoardReader, BoardWriter
from appliance.events import EventFilter, EventStore
from appliance.jobs import CameraStatus, status_key
from appliance.orphans import ORPHAN_AFTER_S, Orphans
from queues import EmbeddedServer
from tests.appliance.descriptions import description
from tests.queues.helpers import kill_server


class Front:
    """A front whose clock a test turns; the cameras are none of its own."""

    def __init__(self, url: str, path: Path | None = None) -> None:
        self.now = 0.0
        self.events = EventStore(path)
        self.board = BoardReader(url, ())
        self.orphans = Orphans(self.events, self.board, lambda: self.now)

    async def look(self, after_s: float = ORPHAN_AFTER_S) -> list[str]:
        """What is ended by looking now, and again after so long."""
        await self.orphans.look()
        self.now += after_s
        before = self.events.last_seq()
        await self.orphans.look()
        ended = self.events.after(before, EventFilter(), 10)
        assert all(msgspec.json.decode(event.body)["state"] == "end" for event in ended)
        return [event.event_id for event in ended]

    async def close(self) -> None:
        await self.board.close()
        self.events.close()


def running(*events: str) -> CameraStatus:
    return CameraStatus(name="street", state="running", open_events=list(events))


async def test_what_a_worker_left_behind_ends_once():
    """It is killed, and the one that is started again knows nothing of its events."""
    with EmbeddedServer() as server:
        front, board = Front(server.url), BoardWriter(server.url)
        board.write_status(running("first", "second"))
        for name in ("first", "second"):
            front.events.add(description(name))
        assert await front.look() == []
        board.write_status(running("second"))
        assert await front.look(ORPHAN_AFTER_S - 1) == []
        assert await front.look() == ["first"]
        board._redis.delete(status_key("street"))
        assert await front.look() == ["second"]
        assert await front.look() == []
        board.close()
        await front.close()


async def test_what_was_open_when_the_appliance_ended_ends(tmp_path: Path):
    with EmbeddedServer() as server:
        before = Front(server.url, tmp_path / "events.db")
        before.events.add(description("left"))
        await before.close()
        after = Front(server.url, tmp_path / "events.db")
        assert await after.look() == ["left"]
        await after.close()


async def test_in_an_outage_nobody_is_known_to_be_gone():
    """Q6: nor right after, when the worker has not yet told anew; an older worker never names its events."""
    with EmbeddedServer() as server:
        front = Front(server.url)
        front.events.add(description("goes-on"))
        await front.look(ORPHAN_AFTER_S - 1)
        kill_server(server)
        assert await front.look() == []
        server.ensure_running()
        assert await front.look(ORPHAN_AFTER_S - 1) == []
        board = BoardWriter(server.url)
        board.write_status(CameraStatus(name="street", state="running"))
        assert await front.look() == []
        board.close()
        await front.close()
