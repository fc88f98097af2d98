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
from appliance.event_queries import EventFilter, SearchError
from appliance.event_schema import (
    EventStoreError,
    keep_fate,
    open_database,
    searchable,
    take_fate,
    transaction,
)
from appliance.jobs import Description, EventChange
from appliance.outputs.outbox import Kind, Outbox

__all__ = ["EventFilter", "EventStore", "EventStoreError", "Retention", "SearchError", "StoredEvent"]

_COLUMNS = "events.seq, events.id, events.body"
_SWEEP = 16
_MAX_MARKS = 100
_MOST_LOST = 500
_MOST_OPEN = 5000


@dataclass(frozen=True, slots=True)
class Retention:
    """What a store keeps: events of the last `days` (None: no limit), the newest `max_events`.

    Over `max_bytes` the oldest snapshots go first, then the oldest events.
    """

    days: float | None = None
    max_events: int = 20_000
    max_bytes: int = 256 * 2**20


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One event as it is sent: `seq` grows with every change of the store, `body` is JSON in UTF-8."""

    seq: int
    event_id: str
    body: bytes


class EventStore:
    """Keeps events and their JPEGs as long as `retention` says; every method is thread-safe.

    `path` None keeps them in memory. What `add` has returned for survives the process, however it ends.
    Raises `EventStoreError` when the file is not such a store. `outbox` holds what is owed to outputs.
    """

    def __init__(self, path: Path | None = None, retention: Retention | None = None) -> None:
        self._retention = retention or Retention()
        self._lock = threading.Lock()
        self._followers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._database = open_database(path)
        self.outbox = Outbox(self._database, self._lock)

    def add(self, description: Description, snapshot: bytes | None = None) -> bool:
        """Join a description to its event, with a JPEG of what it describes; False when it is there already.

        A text replaces an earlier error of the same job; nothing else is replaced. Raises `EventStoreError`
        when the file cannot be written, and then nothing has changed.
        """
        kind: Kind = "failed" if description.text is None else "described"
        return self._put(
            kind, description.job_id, lambda body: event_bodies.described(body, description), snapshot
        )

    def change(self, change: EventChange, snapshot: bytes | None = None) -> bool:
        """Store how an event stands, with a JPEG of it; False when the store has that, or knows better."""
        is_new = self._put(
            change.state, change.event_id, lambda body: event_bodies.changed(body, change), snapshot
        )
        if change.error is not None:
            self.give_up(change.event_id, change.error, change.changed_at)
        return is_new

    def give_up(self, event_id: str, error: str, given_up_at: float) -> bool:
        """Say why an event will not be described; one that is not here yet is told when it comes.

        False when it is described, or has an error, already.
        """

        def join(body: Body | None) -> Body | None:
            if body is not None:
                return event_bodies.given_up(body, error, given_up_at)
            keep_fate(self._database, event_id, error, given_up_at)
            return None

        return self._put("failed", event_id, join, None)

    def open_events(self) -> dict[str, str]:
        """The camera of each event that has not ended, by id; some of them where there are very many.

        Raises:
            EventStoreError: The file cannot be read.
        """
        query = "SELECT id, camera FROM events WHERE is_open ORDER BY seq LIMIT ?"
        try:
            with self._lock:
                return dict(self._database.execute(query, (_MOST_OPEN,)).fetchall())
        except sqlite3.Error as problem:
            raise EventStoreError(f"events cannot be read: {problem}") from problem

    def end(self, event_id: str) -> bool:
        """End an event of whose course nothing more is known; False when it has ended, or is not here.

        Raises:
            EventStoreError: The file cannot be read or written.
        """
        return self._put("end", event_id, lambda body: body and event_bodies.ended(body), None)

    def give_up_lost(self, before: float, error: str) -> int:
        """Say so of the events that have waited since before that time (unix seconds); how many.

        Both their capture and their arrival here count, since the camera's clock may be another one.

        Raises:
            EventStoreError: The file cannot be read or written.
        """
        query = "SELECT id FROM events WHERE is_pending AND captured_at < ? AND stored_at < ? LIMIT ?"
        try:
            with self._lock:
                rows = self._database.execute(query, (before, before, _MOST_LOST)).fetchall()
        except sqlite3.Error as problem:
            raise EventStoreError(f"events cannot be read: {problem}") from problem
        return sum(self.give_up(event_id, error, time.time()) for (event_id,) in rows)

    def _put(
        self, kind: Kind, event_id: str, join: Callable[[Body | None], Body | None], snapshot: bytes | None
    ) -> bool:
        try:
            with self._lock, transaction(self._database):
                before, body = _read(self._database, event_id)
                after = join(body)
                if after is not None:
                    self._store(kind, before, after, snapshot)
                    fate = None if before else take_fate(self._database, event_id)
                    known = fate and event_bodies.given_up(after, *fate)
                    if known:
                        self._store("failed", _read(self._database, event_id)[0], known, None)
        except sqlite3.Error as error:
            raise EventStoreError(f"the event {event_id} cannot be stored: {error}") from error
        if after is not None:
            self.wake_followers()
        return after is not None

    def _store(self, kind: Kind, before: int | None, body: Body, snapshot: bytes | None) -> None:
        seq = _replace(self._database, before, body)
        if snapshot:
            self._database.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", (seq, snapshot))
        self.outbox.put(kind, seq, body)
        self._forget(seq)

    def newest(self, wanted: EventFilter, limit: int, before: int | None = None) -> list[StoredEvent]:
        """The newest events that match, newest first; with `before` those whose `seq` is smaller.

        Raises `SearchError` when `wanted.q` asks for too much.
        """
        where, values = wanted.where()
        values |= {"limit": limit, "before": 2**62 if before is None else before}
        return self._select(f"seq < :before{where} ORDER BY seq DESC LIMIT :limit", values)

    def after(self, seq: int, wanted: EventFilter, limit: int) -> list[StoredEvent]:
        """The events behind `seq` that match, oldest first."""
        where, values = wanted.where()
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

    def mark(self, name: str) -> str | None:
        """What `set_mark` has kept under this name."""
        with self._lock:
            row = self._database.execute("SELECT value FROM marks WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def set_mark(self, name: str, value: str) -> None:
        """Keep how far something was read; the newest marks are kept. Raises `EventStoreError`."""
        oldest = "SELECT rowid FROM marks ORDER BY rowid DESC LIMIT -1 OFFSET ?"
        try:
            with self._lock, transaction(self._database):
                self._database.execute("INSERT OR REPLACE INTO marks VALUES (?, ?)", (name, value))
                self._database.execute(f"DELETE FROM marks WHERE rowid IN ({oldest})", (_MAX_MARKS,))
        except sqlite3.Error as error:
            raise EventStoreError(f"{name} cannot be stored: {error}") from error

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
            for loop, changed in self._followers:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(changed.set)

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

    def _forget(self, newest_seq: int) -> None:
        database, kept = self._database, self._retention
        (num_events,) = database.execute("SELECT count(*) FROM events").fetchone()
        _drop_oldest(database, "events", newest_seq, num_events - kept.max_events)
        if kept.days is not None:
            oldest = time.time() - 86_400 * kept.days
            database.execute("DELETE FROM events WHERE stored_at < ?", (oldest,))
        database.execute("DELETE FROM snapshots WHERE seq < (SELECT min(seq) FROM events)")
        while _num_bytes(database) > kept.max_bytes:
            if not any(
                _drop_oldest(database, table, newest_seq, _SWEEP) for table in ("snapshots", "events")
            ):
                return


def _drop_oldest(database: sqlite3.Connection, table: str, before: int, number: int) -> int:
    """Deletes up to `number` of the oldest rows with a smaller `seq` than `before`; how many there were."""
    if number <= 0:
        return 0
    oldest = f"SELECT seq FROM {table} WHERE seq < ? ORDER BY seq LIMIT ?"
    return database.execute(f"DELETE FROM {table} WHERE seq IN ({oldest})", (before, number)).rowcount


def _num_bytes(database: sqlite3.Connection) -> int:
    """What the store's content takes, without pages that are free for new content."""
    (size, total, free) = (
        database.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_size", "page_count", "freelist_count")
    )
    return int(size * (total - free))


def _read(database: sqlite3.Connection, event_id: str) -> tuple[int | None, Body | None]:
    row = database.execute("SELECT seq, body FROM events WHERE id = ?", (event_id,)).fetchone()
    return (None, None) if row is None else (row[0], msgspec.json.decode(row[1]))


def _replace(database: sqlite3.Connection, before: int | None, body: Body) -> int:
    """Stores `body` under a new number, which its snapshot follows, in place of the row `before`."""
    row = {
        "id": body["id"],
        "camera": body["camera"],
        "label": body["label"],
        "zones": msgspec.json.encode(body["zones"]).decode(),
        "captured_at": body["captured_at"],
        "stored_at": time.time(),
        "is_described": body["description"] is not None,
        "is_pending": body["described_at"] is None,
        "is_open": body["state"] != "end",
        "text": searchable(body),
        "body": msgspec.json.encode(body),
    }
    database.execute("DELETE FROM events WHERE seq = ?", (before,))
    columns = f"({', '.join(row)}) VALUES ({', '.join(f':{name}' for name in row)})"
    seq = database.execute(f"INSERT INTO events {columns}", row).lastrowid
    assert seq is not None
    database.execute("UPDATE snapshots SET seq = ? WHERE seq = ?", (seq, before))
    return seq
