"""An event that will not be described says why, whatever became of its job."""

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance import event_schema
from appliance.events import EventStore
from appliance.fates import LOST, why_dropped
from appliance.following import Follower, store_drop
from appliance.tasks import end_all
from queues import EmbeddedServer, JobConsumer, JobProducer, QueueConfig, ResultReader
from tests.appliance.descriptions import begun, description
from tests.queues.helpers import make_job

CONFIG = QueueConfig(max_len=3, max_deliveries=1, max_block_s=0.5)


@pytest.fixture
def store() -> Iterator[EventStore]:
    with closing(EventStore()) as store:
        yield store


def body_of(store: EventStore, event_id: str) -> dict[str, Any]:
    event = store.find(event_id)
    assert event is not None
    return msgspec.json.decode(event.body)  # type: ignore[no-any-return]


def error_of(store: EventStore, event_id: str) -> str | None:
    return body_of(store, event_id)["error"]  # type: ignore[no-any-return]


def test_a_reason_is_no_description(store: EventStore) -> None:
    """The first reason stays; a text that comes all the same replaces it."""
    store.change(begun("a"))
    assert (body_of(store, "a")["description"], error_of(store, "a")) == (None, None)
    assert store.give_up("a", why_dropped("replaced"), 5.0)
    assert not store.give_up("a", why_dropped("expired"), 6.0)
    body = body_of(store, "a")
    assert (body["description"], body["described_at"], body["state"]) == (None, 5.0, "new")
    assert body["error"] == "replaced: a newer frame took its place in the queue (describe.replace)"
    store.change(begun("a", num=1, state="end"))
    assert (body_of(store, "a")["state"], error_of(store, "a")) == ("end", body["error"])
    assert store.add(description("a"))
    assert (body_of(store, "a")["description"], error_of(store, "a")) == ("A person walks.", None)
    assert not store.give_up("a", why_dropped("expired"), 7.0)


def test_outputs_are_told(store: EventStore) -> None:
    store.outbox.connect({"hook": lambda kind, body: True})
    store.change(begun("a"))
    store.give_up("a", why_dropped("overflow"), 5.0)
    store.give_up("late", why_dropped("expired"), 6.0)
    store.change(begun("late"))
    sent = []
    while message := store.outbox.next_due("hook"):
        sent.append((message.kind, message.event_id, msgspec.json.decode(message.body)["error"]))
        store.outbox.sent(message)
    full, old = why_dropped("overflow"), why_dropped("expired")
    assert sent == [("new", "a", None), ("failed", "a", full), ("new", "late", None), ("failed", "late", old)]


def test_a_reason_that_comes_before_its_event_survives_a_restart(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(event_schema, "MAX_FATES", 2)
    with closing(EventStore(tmp_path / "events.db")) as store:
        for name in "abc":
            assert not store.give_up(name, why_dropped("expired"), 6.0)
    with closing(EventStore(tmp_path / "events.db")) as store:
        for name in "abc":
            store.change(begun(name))
        assert [error_of(store, name) for name in "abc"] == [None, *[why_dropped("expired")] * 2]


def test_an_observation_that_was_not_queued(store: EventStore) -> None:
    store.change(begun("a", error=why_dropped("refused")))
    assert error_of(store, "a") == "refused: the queue did not take it"
    assert "error" in body_of(store, "a")
    assert body_of(store, "a")["described_at"] == 1_700_000_000.0


def test_what_nothing_is_heard_of_is_given_up(store: EventStore) -> None:
    now = time.time()
    store.change(begun("old", captured_at=now - 1000))
    store.change(begun("young", captured_at=now - 10))
    store.change(begun("of another clock", captured_at=now - 1000))
    store.add(description("described", captured_at=now - 1000))
    arrived_long_ago(store, "old", "young", "described")
    assert store.give_up_lost(now - 900, LOST) == 1
    assert store.give_up_lost(now - 900, LOST) == 0
    assert (error_of(store, "old"), error_of(store, "young")) == (LOST, None)
    assert error_of(store, "described") is None
    assert error_of(store, "of another clock") is None


def arrived_long_ago(store: EventStore, *names: str) -> None:
    for name in names:
        store._database.execute("UPDATE events SET stored_at = stored_at - 1000 WHERE id = ?", (name,))


def test_older_files_know_what_waits(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "events.db"
    monkeypatch.setattr(event_schema, "_MIGRATIONS", event_schema._MIGRATIONS[:3])
    with closing(event_schema.open_database(path)) as database:
        now = time.time()
        for name, described_at, ago_s in (("waits", None, 60), ("failed", 5.0, 60), ("past", None, 86400)):
            fields = msgspec.to_builtins(description(name)) | {
                "description": None,
                "id": name,
                "state": "new",
            }
            values = (name, now - ago_s, msgspec.json.encode(fields | {"described_at": described_at}))
            columns = "(id, camera, label, captured_at, is_described, stored_at, body)"
            database.execute(
                f"INSERT INTO events {columns} VALUES (?, 'street', 'cat', 10.0, 0, ?, ?)", values
            )
    monkeypatch.undo()
    with closing(EventStore(path)) as store:
        assert store.give_up_lost(now, LOST) == 1
        assert error_of(store, "waits") == LOST
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_whatever_becomes_of_a_job_its_event_says_it(store: EventStore) -> None:
    """Replaced, pushed out, too old in line and in hand, given up: each by the queue's own steps."""
    with EmbeddedServer() as server, JobProducer(server.url, CONFIG) as producer:
        async with (
            JobConsumer(server.url, CONFIG) as worker,
            ResultReader(server.url, CONFIG, stream=CONFIG.dropped) as dropped,
        ):
            following = asyncio.create_task(Follower(dropped, store_drop, store).run())
            try:
                await asyncio.to_thread(_put_all, producer)
                late, bad, left = await worker.take(3)
                await worker.drop(late, "expired")
                await worker.fail(bad, "CUDA out of memory")
                for name in ("replaced", "expired", "overflow", "late", "bad", "left"):
                    store.change(begun(name))
                async with asyncio.timeout(120):
                    while error_of(store, "bad") is None:
                        await asyncio.sleep(0.01)
            finally:
                with suppress(asyncio.CancelledError):
                    await end_all([following])
    for name in ("replaced", "expired", "overflow"):
        assert error_of(store, name) == why_dropped(name)
    assert error_of(store, "late") == why_dropped("expired")
    assert error_of(store, "bad") == "dead: CUDA out of memory"
    assert left.job.job_id == "left"
    assert error_of(store, "left") is None


def _put_all(producer: JobProducer) -> None:
    """Leaves three jobs that can be taken: `late`, `bad`, `left`."""
    producer.put(make_job("replaced", slot="one"))
    producer.put(make_job("expired", slot="one", expires_in_s=-1.0))
    for name in ("overflow", "late", "bad", "left"):
        producer.put(make_job(name))
