"""What the event store lets go of, and when; what files of older versions become."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from appliance import event_schema
from appliance.event_schema import sizes
from appliance.events import DAY_S, EventFilter, EventStore, Retention
from appliance.retention import SteadyClock
from tests.appliance.descriptions import begun, description

EVERYTHING = EventFilter()


def ids(store: EventStore) -> list[str]:
    return [event.event_id for event in store.newest(EVERYTHING, 1000)]


@pytest.fixture
def store() -> Iterator[EventStore]:
    with closing(EventStore()) as store:
        yield store


def test_the_store_is_bounded() -> None:
    with closing(EventStore(retention=Retention(max_events=3))) as store:
        for name in "abcde":
            store.add(description(name), name.encode())
        assert ids(store) == ["e", "d", "c"]
        assert [store.snapshot(name) for name in "abcde"] == [None, None, b"c", b"d", b"e"]


def test_bytes_are_bounded_and_snapshots_go_first(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    with closing(EventStore(path, Retention(max_bytes=500_000))) as store:
        for number in range(100):
            store.add(description(f"{number}"), b"x" * 20_000)
        assert len(ids(store)) == 100
        kept = [store.snapshot(f"{number}") is not None for number in range(100)]
        assert kept == sorted(kept)
        assert 1 <= sum(kept) < 25
        for number in range(100, 800):
            store.add(description(f"{number}", text="word " * 200))
        assert ids(store)[0] == "799"
        assert store.find("0") is None
        assert store.newest(EventFilter(q="walks"), 10) == []
    assert path.stat().st_size < 700_000, "an empty one has 100 KB"


def test_what_is_owed_to_an_output_pushes_no_event_out(tmp_path: Path) -> None:
    """A receiver that is away for days has room of its own, and no event goes for it."""
    with closing(EventStore(tmp_path / "events.db", Retention(max_bytes=2_000_000))) as store:
        store.outbox.connect({"away": lambda kind, body: True})
        for number in range(400):
            store.add(description(f"{number}", text="word " * 400))
            store.add(description(f"{number} failed", text=None, error="word " * 2000))
            store._database.execute("DELETE FROM events WHERE id LIKE '%failed'")
        assert sizes(store._database, "to away")[1] > 2 * 2_000_000
        assert len(ids(store)) > 190
        assert recounted(store._database) == counted(store._database)


def test_what_is_older_than_the_days_goes(tmp_path: Path) -> None:
    """At a sweep, though nothing new comes."""
    path = tmp_path / "events.db"
    with closing(EventStore(path)) as store:
        store.sweep()
        for name in ("old", "new", "goes on", "waits"):
            store.add(description(name), name.encode())
            store.end(name)
        store.change(begun("goes on 2"))
        store.change(begun("waits"))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE events SET stored_at = stored_at - 3 * 86400 WHERE id != 'new'")
        database.execute("UPDATE events SET is_open = 1 WHERE id = 'goes on'")
        database.execute("UPDATE events SET is_pending = 1 WHERE id = 'waits'")
    with closing(EventStore(path, Retention(days=2))) as store:
        store.sweep()
        assert set(ids(store)) == {"new", "goes on", "goes on 2", "waits"}
        assert [store.snapshot("old"), store.snapshot("new")] == [None, b"new"]


def test_limits_that_were_lowered_hold_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    with closing(EventStore(path)) as store:
        for number in range(60):
            store.add(description(f"{number}"), b"x" * 20_000)
    with closing(EventStore(path, Retention(max_events=50, max_bytes=400_000))) as store:
        store.sweep()
        assert len(ids(store)) == 50
        assert 5 < sum(store.snapshot(f"{number}") is not None for number in range(60)) < 20


class Clock:
    """A wall clock and a monotonic one that a test turns."""

    def __init__(self) -> None:
        self.wall, self.monotonic = 1.8e9, 5e5

    def go(self, seconds: float, *, jump: float = 0.0) -> None:
        self.monotonic += seconds
        self.wall += seconds + jump

    def steady(self, seen: float | None) -> SteadyClock:
        return SteadyClock(seen, DAY_S, lambda: self.wall, lambda: self.monotonic)


def test_a_clock_is_believed_when_it_goes_steadily() -> None:
    clock = Clock()
    assert not clock.steady(None).look()
    assert not clock.steady(clock.wall - 40 * DAY_S).look()
    assert not clock.steady(clock.wall + 40 * DAY_S).look()
    steady = clock.steady(clock.wall - 3600)
    assert steady.look()
    clock.go(3600)
    assert steady.look()
    clock.go(3600, jump=40 * DAY_S)
    assert not steady.look()
    clock.go(3600, jump=-40 * DAY_S)
    assert not steady.look()
    clock.go(DAY_S - 60)
    assert not steady.look()
    clock.go(60)
    assert steady.look()


def test_a_clock_that_jumps_by_days_and_back_empties_no_store(store: EventStore) -> None:
    clock, real = Clock(), time.time
    store._retention, store._clock = Retention(days=30), clock.steady(clock.wall)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real() - 1.8e9 + clock.wall)
        store.add(description("before"))
        store.end("before")
        store.sweep()
        clock.go(600, jump=40 * DAY_S)
        store.add(description("meanwhile"))
        store.end("meanwhile")
        store.sweep()
        clock.go(600, jump=-40 * DAY_S)
        store.sweep()
        assert ids(store) == ["meanwhile", "before"]
        for _ in range(31 * 24):
            clock.go(3600)
            store.sweep()
        assert ids(store) == ["meanwhile"], "which is of a time that has yet to come"


def test_an_event_that_had_to_go_is_not_lost(store: EventStore) -> None:
    """Its end comes later, and no description is awaited any more: nobody is told an error that is none."""
    store._retention = Retention(max_events=2)
    store.outbox.connect({"all": lambda kind, body: True})
    store.change(begun("a"))
    store.add(description("a"))
    for name in "bc":
        store.change(begun(name))
    assert store.find("a") is None
    assert not store.change(begun("a", num=1, state="end"))
    assert not store.give_up("a", "expired", 5.0)
    assert store.find("a") is None
    store.change(begun("d"))
    assert store.find("b") is None
    assert store.add(description("b"))
    found = store.find("b")
    assert found is not None
    body = msgspec.json.decode(found.body)
    assert (body["state"], body["description"]) == ("end", "A person walks.")
    assert "b" not in store.open_events()
    kinds = store._database.execute("SELECT event_id, kind FROM outbox ORDER BY id").fetchall()
    assert kinds[-1] == ("b", "described")
    assert not [row for row in kinds if row[1] == "failed"]


def test_what_goes_on_is_forgotten_last(store: EventStore) -> None:
    store._retention = Retention(max_events=3)
    store.change(begun("goes on"))
    for name in "abcde":
        store.add(description(name))
        store.end(name)
    assert ids(store) == ["e", "d", "goes on"]


def test_an_older_file_knows_what_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it left open of late is ended as all others are; of long ago it is no news."""
    path = tmp_path / "events.db"
    with older(path, 4, monkeypatch) as database:
        for name, state, ago_s in (("late", "new", 0), ("past", "new", 86_400), ("over", "end", 0)):
            put_row(database, name, time.time() - ago_s, state=state)
    with closing(EventStore(path)) as store:
        assert store.open_events() == {"late": "street"}
        bodies = [msgspec.json.decode(event.body) for event in store.newest(EVERYTHING, 3)]
        assert {body["id"]: body["state"] for body in bodies} == {"late": "new", "past": "end", "over": "end"}


def test_an_older_file_knows_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.db"
    with older(path, 5, monkeypatch) as database:
        for name in "ab":
            put_row(database, name, time.time())
        database.execute("INSERT INTO snapshots SELECT seq, 'jpeg' FROM events")
        columns = "output, event_id, message_id, kind, body, created_at, is_dead"
        row = f"INSERT INTO outbox ({columns}) VALUES ('hook', ?, 'msg_1', 'described', '{{}}', 10.0, ?)"
        database.executemany(row, [("a", 0), ("b", 1), ("b", 1)])
    with closing(EventStore(path)) as store:
        database = store._database
        assert [sizes(database, name)[0] for name in ("events", "snapshots")] == [2, 2]
        assert [sizes(database, "to hook", is_dead=is_dead)[0] for is_dead in (False, True)] == [1, 2]
        assert [event.event_id for event in store.latest(EVERYTHING, 9)] == ["b", "a"]
        assert store.outbox.statuses()["hook"].oldest_age_s > 1e9
        store.add(description("c"))
        store.outbox.drop()
        assert recounted(database) == counted(database)


def test_an_older_file_knows_what_changed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.db"
    with older(path, 6, monkeypatch) as database:
        for name in ("described", "failed", "update"):
            described_at = None if name == "update" else 5.0
            put_row(database, name, time.time(), state="update", described_at=described_at)
        database.execute("UPDATE events SET is_described = 0 WHERE id != 'described'")
    with closing(EventStore(path)) as store:
        assert all(event.kind == event.event_id for event in store.newest(EVERYTHING, 9))


@contextmanager
def older(path: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    """A file as it was in that version, while the context lasts."""
    with monkeypatch.context() as patch, closing(event_schema_of(path, version, patch)) as database:
        yield database


def event_schema_of(path: Path, version: int, patch: pytest.MonkeyPatch) -> sqlite3.Connection:
    patch.setattr(event_schema, "_MIGRATIONS", event_schema._MIGRATIONS[:version])
    return event_schema.open_database(path)


def put_row(database: sqlite3.Connection, name: str, stored_at: float, **changes: object) -> None:
    fields = msgspec.to_builtins(description(name)) | {"id": name, "state": "end", "num_changes": 1} | changes
    columns = "(id, camera, label, captured_at, is_described, stored_at, body)"
    values = (name, stored_at, msgspec.json.encode(fields))
    database.execute(f"INSERT INTO events {columns} VALUES (?, 'street', 'cat', 10.0, 1, ?, ?)", values)


def counted(database: sqlite3.Connection) -> list[tuple[str, int, int, int]]:
    return database.execute("SELECT * FROM sizes WHERE num OR bytes ORDER BY 1, 2").fetchall()


def recounted(database: sqlite3.Connection) -> list[tuple[str, int, int, int]]:
    """What `sizes` should hold, by the rows that are there."""
    tables = ("events", "snapshots", "outbox")
    rows = {table: database.execute(f"SELECT * FROM {table}").fetchall() for table in tables}
    with closing(event_schema.open_database(None)) as again:
        for table in tables:
            for row in rows[table]:
                again.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        return counted(again)
