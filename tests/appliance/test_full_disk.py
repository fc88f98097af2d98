"""A disk that is full under the event file: nothing is lost uncounted, and all goes on when there is room."""

import asyncio
import os
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from itertools import count
from pathlib import Path

import pytest

from appliance import following
from appliance.events import EventFilter, EventStore, EventStoreError
from appliance.file_lock import sole_use
from appliance.following import UNSTORED, Follower, store_change
from appliance.jobs import encode_change
from appliance.output_settings import OutputSettings
from appliance.outputs import delivery
from appliance.outputs.runner import Outputs
from appliance.serve import open_events
from appliance.settings import SettingsError, load_settings
from appliance.tasks import end_all
from queues import EmbeddedServer, JobProducer, QueueConfig, ResultReader
from tests.appliance.descriptions import begun, description
from tests.appliance.outputs.conftest import until_async, webhook
from tests.appliance.outputs.receiver import receiving
from tests.disks import Disk, small_disk

CONFIG = QueueConfig(max_block_s=0.2, result_max_len=10)
JPEG = b"\xff\xd8" + os.urandom(20_000)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", "24m") as disk:
        yield disk


@pytest.fixture
def store(disk: Disk) -> Iterator[EventStore]:
    with closing(EventStore(disk.folder / "events.db")) as store:
        store.outbox.connect({"all": lambda kind, body: True})
        yield store


def ids(store: EventStore) -> list[str]:
    return [event.event_id for event in store.newest(EventFilter(), 10_000)][::-1]


def add_until_full(store: EventStore, first: int) -> int:
    """The number of the first event that was refused."""
    for number in count(first):
        try:
            store.add(description(f"{number}"), JPEG)
        except EventStoreError as error:
            problem = str(error)
            break
    assert "disk is full: make room on the disk of events.path" in problem
    return number


def test_what_was_stored_stays_and_what_was_refused_can_come_again(
    disk: Disk, store: EventStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Again and again; what `add` has returned for is there once, whole, and owed; one line tells."""
    number = 0
    for _ in range(4):
        disk.fill(but=50)
        number = add_until_full(store, number)
        disk.fill()
        for _ in range(20):
            with pytest.raises(EventStoreError):
                store.add(description(f"{number}"), JPEG)
        assert "make room" in str(store.problem)
        assert ids(store) == [f"{n}" for n in range(number)]
        disk.make_room()
        assert store.add(description(f"{number}"), JPEG)
        number += 1
    assert number > 8
    assert all(store.snapshot(f"{n}") == JPEG for n in range(number))
    assert store.outbox.statuses()["all"].num_waiting == number
    assert caplog.text.count("make room") == 1
    store.close()
    with closing(sqlite3.connect(disk.folder / "events.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@asynccontextmanager
async def following_told(producer: JobProducer, store: EventStore) -> AsyncIterator[Counter[str]]:
    """What could not be stored, counted, while a front follows what producers tell."""
    counts = Counter[str]()
    async with ResultReader(producer._url, CONFIG, stream=CONFIG.told) as reader:
        follower = Follower(reader, store_change, store, num_failures=counts)
        await follower.begin()
        task = asyncio.create_task(follower.run())
        yield counts
        async with asyncio.timeout(60):
            while not await follower.is_through():
                await asyncio.sleep(0.01)
        await end_all([task])


@pytest.fixture
def producer() -> Iterator[JobProducer]:
    with EmbeddedServer() as server, JobProducer(server.url, CONFIG) as producer:
        yield producer


@pytest.mark.parametrize("room", [None, 30_000])
async def test_what_comes_meanwhile_is_held_or_counted(
    disk: Disk,
    store: EventStore,
    producer: JobProducer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    room: int | None,
) -> None:
    """Longer than Redis keeps it; with too little room here too, the oldest are counted."""
    monkeypatch.setattr(following, "STORE_AGAIN_S", 0.1)
    if room is not None:
        monkeypatch.setattr(following, "MAX_HELD_BYTES", room)
    async with following_told(producer, store) as counts:
        disk.fill()
        for number in range(600):
            name = f"{number}"
            await asyncio.to_thread(producer.tell, name, "street", encode_change(begun(name)))
            if number % 20 == 0:
                # why: as slowly as cameras tell, so that the front has read it before Redis forgets it.
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        assert "make room" in str(store.problem)
        disk.make_room()
    assert ids(store) == [f"{n}" for n in range(counts[UNSTORED], 600)]
    assert (counts[UNSTORED] == 0) == (room is None)
    assert caplog.text.count("are lost") == (room is not None)
    assert store.outbox.statuses()["all"].num_waiting == 600 - counts[UNSTORED]


async def test_a_message_that_was_taken_is_not_sent_again_and_again(
    disk: Disk, store: EventStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receiver has confirmed it, and only that cannot be noted down."""
    monkeypatch.setattr(delivery, "LOOK_AGAIN_S", 0.02)
    with receiving() as receiver:
        outputs = Outputs(OutputSettings(webhooks=[webhook(receiver)]), store, ())  # type: ignore[list-item]
        for name in ("1", "2"):
            store.add(description(name))
        disk.fill()
        looks: list[int] = []
        taken = store.outbox.sent
        monkeypatch.setattr(store.outbox, "sent", lambda message: (looks.append(message.id), taken(message)))
        task = asyncio.create_task(outputs.run())
        await until_async(lambda: len(looks) > 5)
        assert receiver.ids == ["1"]
        disk.make_room()
        await until_async(lambda: store.outbox.statuses()["webhook"].num_sent == 2)
        await end_all([task])
        assert receiver.ids == ["1", "2"]


def test_a_start_on_a_full_disk_says_so(disk: Disk, tmp_path: Path) -> None:
    """In one line; a file of before is opened as soon as there is room."""
    path = disk.folder / "events.db"
    with closing(EventStore(path)) as store:
        store.add(description("1"), JPEG)
    config = tmp_path / "config.yaml"
    config.write_text(f"events: {{path: {path}}}")
    settings = load_settings(config)
    disk.fill()
    with sole_use(path), pytest.raises(SettingsError, match=r"events\.path: .* has room") as caught:
        open_events(settings)
    assert "\n" not in str(caught.value)
    disk.make_room()
    with closing(open_events(settings)) as store:
        assert ids(store) == ["1"]
