"""The event store: what was described, one row an event, readable later and followed live.

SQLite holds it, in memory or in a file. An event is JSON (`appliance.event_bodies`), and its id is the job's:
a redelivered job changes nothing. Each change gives it a new number, under which it is told again.
"""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from appliance import event_bodies
from appliance.event_bodies import Body
from appliance.jobs import Description, EventChange

SCHEMA_VERSION = 1
_SCHEMA = f"""
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    camera TEXT NOT NULL,
    label TEXT NOT NULL,
    captured_at REAL NOT NULL,
    is_described INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX events_by_camera ON events (camera, seq);
CREATE TABLE snapshots (seq INTEGER PRIMARY KEY, jpeg BLOB NOT NULL);
PRAGMA user_version = {SCHEMA_VERSION};
"""
_COLUMNS = "events.seq, events.id, events.body"


class EventStoreError(Exception):
    """The store's file cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events are wanted; None wants all. `since` is a capture time in unix seconds, inclusive."""

    camera: str | None = None
    label: str | None = None
    since: float | None = None

    def _where(self) -> tuple[str, dict[str, Any]]:
        tests = {"camera": "camera = :camera", "label": "label = :label", "since": "captured_at >= :since"}
        values = {name: getattr(self, name) for name in tests if getattr(self, name) is not None}
        return "".join(f" AND {tests[name]}" for name in values), values


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One event as it is sent: `seq` grows with every change of the store, `body` is JSON in UTF-8."""

    seq: int
    event_id: str
    body: bytes


class EventStore:
    """Keeps the newest `max_events` events and the newest `max_snapshots` JPEGs; every method is thread-safe.

    `path` None keeps them in memory. Raises `EventStoreError` when the file is not such a store.
    """

    def __init__(
        self, path: Path | None = None, *, max_events: int = 10_000, max_snapshots: int = 1_000
    ) -> None:
        self._max_events = max_events
        self._max_snapshots = max_snapshots
        self._lock = threading.Lock()
        self._followers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._database = _open_database(path)

    def add(self, description: Description, snapshot: bytes | None = None) -> bool:
        """Join a description to its event, with a JPEG of what it describes; False when it is there already.

        A text replaces an earlier error of the same job; nothing else is replaced.
        """
        return self._put(description.job_id, lambda body: event_bodies.described(body, description), snapshot)

    def change(self, change: EventChange, snapshot: bytes | None = None) -> bool:
        """Store how an event stands, with a JPEG of it; False when the store has that, or knows better."""
        return self._put(change.event_id, lambda body: event_bodies.changed(body, change), snapshot)

    def _put(self, event_id: str, join: Callable[[Body | None], Body | None], snapshot: bytes | None) -> bool:
        with self._lock, self._database as database:
            body, kept = _take_out(database, event_id)
            after = join(body)
            if after is None:
                database.rollback()
                return False
            seq = _insert(database, after)
            if snapshot or kept:
                database.execute("INSERT INTO snapshots VALUES (?, ?)", (seq, snapshot or kept))
            _forget_oldest(database, "events", self._max_events)
            _forget_oldest(database, "snapshots", self._max_snapshots)
            self._wake_all()
        return True

    def newest(self, wanted: EventFilter, limit: int) -> list[StoredEvent]:
        """The newest events that match, newest first."""
        where, values = wanted._where()
        return self._select(f"1{where} ORDER BY seq DESC LIMIT :limit", values | {"limit": limit})

    def after(self, seq: int, wanted: EventFilter, limit: int) -> list[StoredEvent]:
        """The events behind `seq` that match, oldest first."""
        where, values = wanted._where()
        return self._select(
            f"seq > :seq{where} ORDER BY seq LIMIT :limit", values | {"seq": seq, "limit": limit}
        )

    def find(self, event_id: str) -> StoredEvent | None:
        """The event with this id, or None."""
        return next(iter(self._select("id = :id", {"id": event_id})), None)

    def snapshot(self, event_id: str) -> bytes | None:
        """The JPEG that was stored with an event, or None when there is (no longer) one."""
        query = "SELECT jpeg FROM snapshots JOIN events USING (seq) WHERE id = ?"
        with self._lock:
            row = self._database.execute(query, (event_id,)).fetchone()
        return None if row is None else bytes(row[0])

    def last_seq(self) -> int:
        """The `seq` of the newest event ever stored, or where a store without any starts to count."""
        with self._lock:
            (seq,) = self._database.execute("SELECT seq FROM sqlite_sequence").fetchone()
        return int(seq)

    @contextmanager
    def changes(self) -> Iterator[asyncio.Event]:
        """An `asyncio.Event` of the running loop that is set whenever something was added.

        Clear it, then read `after` the last known `seq`: that order misses nothing.
        """
        follower = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._followers.add(follower)
        try:
            yield follower[1]
        finally:
            with self._lock:
                self._followers.discard(follower)

    def wake_followers(self) -> None:
        """Set every follower's `asyncio.Event`, as if something had been added."""
        with self._lock:
            self._wake_all()

    def close(self) -> None:
        """Close the database; the store cannot be used any more."""
        with self._lock:
            self._database.close()

    def _select(self, condition: str, values: dict[str, Any]) -> list[StoredEvent]:
        with self._lock:
            rows = self._database.execute(
                f"SELECT {_COLUMNS} FROM events WHERE {condition}", values
            ).fetchall()
        return [StoredEvent(seq, event_id, bytes(body)) for seq, event_id, body in rows]

    def _wake_all(self) -> None:
        for loop, changed in self._followers:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)


def _open_database(path: Path | None) -> sqlite3.Connection:
    database = None
    try:
        database = sqlite3.connect(path or ":memory:", check_same_thread=False)
        _prepare(database)
    except (sqlite3.Error, EventStoreError) as error:
        if database is not None:
            database.close()
        raise EventStoreError(f"{path}: cannot be used as event store: {error}") from error
    return database


def _prepare(database: sqlite3.Connection) -> None:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version == 0:
        _create(database)
    elif version != SCHEMA_VERSION:
        raise EventStoreError(f"it has version {version}, this is for {SCHEMA_VERSION}")
    # why: an event that is lost with the machine's power is worth less than a disk flush for every event
    database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;")


def _create(database: sqlite3.Connection) -> None:
    database.executescript(_SCHEMA)
    # why: a reader that resumes with the number of a store that is gone must get everything, not nothing
    first_seq = int(time.time() * 1000)
    with database:
        database.execute("INSERT INTO sqlite_sequence VALUES ('events', ?)", (first_seq,))


def _take_out(database: sqlite3.Connection, event_id: str) -> tuple[Body | None, bytes | None]:
    """An event's body and snapshot, which are not in the store any more."""
    row = database.execute("DELETE FROM events WHERE id = ? RETURNING seq, body", (event_id,)).fetchone()
    if row is None:
        return None, None
    kept = database.execute("DELETE FROM snapshots WHERE seq = ? RETURNING jpeg", row[:1]).fetchone()
    return msgspec.json.decode(row[1]), kept and kept[0]


def _insert(database: sqlite3.Connection, body: Body) -> int:
    values = (
        body["id"],
        body["camera"],
        body["label"],
        body["captured_at"],
        body["description"] is not None,
        msgspec.json.encode(body),
    )
    columns = "id, camera, label, captured_at, is_described, body"
    cursor = database.execute(f"INSERT INTO events ({columns}) VALUES (?, ?, ?, ?, ?, ?)", values)
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def _forget_oldest(database: sqlite3.Connection, table: str, num_kept: int) -> None:
    oldest = f"SELECT seq FROM {table} ORDER BY seq DESC LIMIT 1 OFFSET {num_kept}"
    database.execute(f"DELETE FROM {table} WHERE seq <= ({oldest})")
