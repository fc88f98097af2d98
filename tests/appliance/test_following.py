"""What the front reads from Redis' streams becomes events, once, and is news only when it is new."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from appliance.events import EventFilter, EventStore
from appliance.following import GAPS, Follower, store_change
from appliance.jobs import encode_change
from appliance.tasks import end_all
from queues import EmbeddedServer, JobProducer, QueueConfig, ResultReader
from tests.appliance.descriptions import begun

CONFIG = QueueConfig(max_block_s=0.2)


@pytest.fixture
def producer() -> Iterator[JobProducer]:
    with EmbeddedServer() as server, JobProducer(server.url, CONFIG) as producer:
        yield producer


def tell(producer: JobProducer, *event_ids: str) -> None:
    for event_id in event_ids:
        producer.tell(event_id, "street", encode_change(begun(event_id)))


class Front:
    """What it has shown and owed at its end."""

    shown: set[str]
    owed: list[str]

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def look(self, store: EventStore) -> None:
        self.shown = {event.event_id for event in store.newest(EventFilter(), 100)}
        rows = store._database.execute("SELECT event_id FROM outbox ORDER BY id").fetchall()
        self.owed = [event_id for (event_id,) in rows]


@asynccontextmanager
async def front(
    producer: JobProducer, path: Path | None = None, *, has_history: bool = True
) -> AsyncIterator[Front]:
    """A front that follows what producers tell until all of it is stored, with an output that wants all."""
    result = Front()
    with closing(EventStore(path)) as store:
        store.outbox.connect({"all": lambda kind, body: True})
        async with ResultReader(producer._url, CONFIG, stream=CONFIG.told) as reader:
            follower = Follower(
                reader, store_change, store, has_history=has_history, num_failures=result.counts
            )
            await follower.begin()
            task = asyncio.create_task(follower.run())
            yield result
            async with asyncio.timeout(120):
                while not await follower.is_through():
                    await asyncio.sleep(0.01)
            await end_all([task])
        result.look(store)


async def test_a_restart_without_a_file_tells_nothing_twice(producer: JobProducer) -> None:
    """The streams of one's own Redis outlive the appliance: what was told before is shown and not sent."""
    async with front(producer) as before:
        tell(producer, "a", "b")
    tell(producer, "c")
    async with front(producer) as after:
        tell(producer, "d")
    assert (before.shown, before.owed) == ({"a", "b"}, ["a", "b"])
    assert (after.shown, after.owed) == ({"a", "b", "c", "d"}, ["d"])


async def test_what_came_while_the_front_began_with_its_own_server_is_news(producer: JobProducer) -> None:
    tell(producer, "a")
    async with front(producer, has_history=False) as first:
        tell(producer, "b")
    assert first.owed == ["a", "b"]


async def test_a_restart_with_a_file_goes_on_where_it_was(producer: JobProducer, tmp_path: Path) -> None:
    """What came while it was away is news; what it has forgotten meanwhile does not come again."""
    path = tmp_path / "events.db"
    async with front(producer, path):
        tell(producer, "a", "b")
    with closing(EventStore(path)) as store:
        store._database.execute("DELETE FROM events WHERE id = 'a'")
    tell(producer, "c")
    async with front(producer, path) as again:
        pass
    assert (again.shown, again.owed) == ({"b", "c"}, ["a", "b", "c"])


async def test_what_redis_forgot_while_nobody_followed_is_told(
    producer: JobProducer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps the newest only; a restart that finds all says nothing."""
    path = tmp_path / "events.db"
    async with front(producer, path):
        tell(producer, "a", "b")
    tell(producer, "c")
    async with front(producer, path):
        pass
    assert not caplog.messages
    tell(producer, "lost", "d")
    producer._client.xtrim(CONFIG.told, maxlen=1, approximate=False)
    async with front(producer, path) as again:
        pass
    assert again.shown == {"a", "b", "c", "d"}
    assert "Redis has forgotten some of what came since" in caplog.text
    assert again.counts[GAPS] == 1


async def test_a_stream_that_began_anew_is_read_from_its_start(producer: JobProducer, tmp_path: Path) -> None:
    """Redis came back empty, with a clock that is behind what was read before."""
    path = tmp_path / "events.db"
    async with front(producer, path):
        tell(producer, "a")
    with closing(EventStore(path)) as store:
        query = "SELECT name FROM marks WHERE name LIKE '%told%'"
        ((name,),) = store._database.execute(query).fetchall()
        store.set_mark(name, "99999999999999-0")
    async with front(producer, path) as again:
        tell(producer, "b")
    assert again.owed == ["a", "b"]


async def test_what_nobody_can_read_is_passed_over(
    producer: JobProducer, caplog: pytest.LogCaptureFixture
) -> None:
    async with front(producer) as seen:
        producer.tell("junk", "street", b"{")
        tell(producer, "a")
    assert seen.shown == {"a"}
    assert caplog.text.count("job=junk: what") == 1
