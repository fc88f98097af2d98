"""The event store: what was described, one row an event, readable later and followed live.

SQLite holds it, in memory or in a file. An event is JSON (`appliance.event_bodies`), and its id is the job's:
a redelivered job changes nothing. Each change gives it a new number, under which it is told again.
"""

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from appliance import event_bodies
from appliance.event_bodies import Body
from appliance.event_queries import EventFilter, SearchError
from appliance.event_schema import (
    EventStoreError,
    is_forgotten,
    keep_fate,
    open_database,
    searchable,
    take_fate,
    transaction,
    why_not_written,
)
from appliance.jobs import Description, EventChange
from appliance.logs import Complaints
from appliance.outputs.outbox import Kind, Outbox
from appliance.retention import Retention, SteadyClock, forget_old, forget_too_much

__all__ = ["EventFilter", "EventStore", "EventStoreError", "Place", "Retention", "SearchError", "StoredEvent"]

logger = logging.getLogger(__name__)

DAY_S = 86_400.0
PROBLEM_S = 15.0
COMPLAIN_EVERY_S = 60.0

_COLUMNS = "seq, id, body, captured_at, born, kind"
_ROUNDS_A_CHANGE = 8
_MAX_MARKS = 100
_MOST_LOST = 500
_MOST_OPEN = 5000
_CLOCK = "clock"

Place = tuple[float, int]
"""Where an event stands in time: its capture in unix seconds, then its first number."""


class StoredEvent(NamedTuple):
    """One event as it is sent: `seq` grows with every change of the store, `body` is JSON in UTF-8.

    Its `place` among all events is by its capture, and no change moves it. `kind` is its newest change.
    """

    seq: int
    event_id: str
    body: bytes
    captured_at: float
    born: int
    kind: Kind

    @property
    def place(self) -> Place:
        """Where it stands in time."""
        return self.captured_at, self.born


@dataclass(frozen=True, slots=True)
class _Known:
    """What is stored of an event before a change."""

    seq: int
    born: int
    is_news: bool
    body: Body


class EventStore:
    """Keeps events and their JPEGs as long as `retention` says; every method is thread-safe.

    `path` None keeps them in memory. What `add` has returned for survives the process, however it ends.
    `outbox` holds what is owed to outputs.

    Raises:
        EventStoreError: The file is not such a store, or, by any method, cannot be read or written.
    """

    def __init__(self, path: Path | None = None, retention: Retention | None = None) -> None:
        self._retention = retention or Retention()
        self._lock = threading.Lock()
        self._followers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._database = open_database(path)
        self._problem, self._failed_at = "", float("-inf")
        # why: whoever uses it tries again and again, for as long as that lasts.
        self._complaints = Complaints(logger, COMPLAIN_EVERY_S, level=logging.ERROR)
        self.outbox = Outbox(self._database, self._lock)
        seen = self.mark(_CLOCK)
        self._clock = SteadyClock(None if seen is None else float(seen), DAY_S)

    def add(self, description: Description, snapshot: bytes | None = None, *, is_news: bool = True) -> bool:
        """Join a description to its event, with a JPEG of what it describes; False when it is there already.

        A text replaces an earlier error of the same job; nothing else is replaced. Outputs are owed it if it
        `is_news`. Raises `EventStoreError` when the file cannot be written, and then nothing has changed.
        """
        kind: Kind = "failed" if description.text is None else "described"

        def join(body: Body | None) -> Body | None:
            joined = event_bodies.described(body, description)
            if joined is not None and body is None and is_forgotten(self._database, description.job_id):
                # why: of its course nothing is known, and its end may have been told
                joined = joined | {"state": "end"}
            return joined

        return self._put(kind, description.job_id, join, snapshot, is_news=is_news)

    def change(self, change: EventChange, snapshot: bytes | None = None, *, is_news: bool = True) -> bool:
        """Store how an event stands, with a JPEG of it; False when the store has that, or knows better.

        One that had to go before its end stays forgotten.
        """

        def join(body: Body | None) -> Body | None:
            if body is None and is_forgotten(self._database, change.event_id):
                return None
            return event_bodies.changed(body, change)

        is_new = self._put(change.state, change.event_id, join, snapshot, is_news=is_news)
        if change.error is not None:
            self.give_up(change.event_id, change.error, change.changed_at, is_news=is_news)
        return is_new

    def give_up(self, event_id: str, error: str, given_up_at: float, *, is_news: bool | None = None) -> bool:
        """Say why an event will not be described; one that is not here yet is told when it comes.

        Without `is_news` it is news if the event was. False when it is described, or has an error, already.
        """

        def join(body: Body | None) -> Body | None:
            if body is not None:
                return event_bodies.given_up(body, error, given_up_at)
            if not is_forgotten(self._database, event_id):
                keep_fate(self._database, event_id, error, given_up_at)
            return None

        return self._put("failed", event_id, join, None, is_news=is_news)

    def open_events(self) -> dict[str, str]:
        """The camera of each event that has not ended, by id; some of them where there are very many."""
        query = "SELECT id, camera FROM events WHERE is_open ORDER BY seq LIMIT ?"
        return dict(self._rows(query, (_MOST_OPEN,)))

    def end(self, event_id: str) -> bool:
        """End an event of whose course nothing more is known; False when it has ended, or is not here."""
        return self._put("end", event_id, lambda body: body and event_bodies.ended(body), None, is_news=None)

    def give_up_lost(self, before: float, error: str) -> int:
        """Say so of the events that have waited since before that time (unix seconds); how many.

        Both their capture and their arrival here count, since the camera's clock may be another one.
        """
        query = "SELECT id FROM events WHERE is_pending AND captured_at < ? AND stored_at < ? LIMIT ?"
        rows = self._rows(query, (before, before, _MOST_LOST))
        return sum(self.give_up(event_id, error, time.time()) for (event_id,) in rows)

    @property
    def problem(self) -> str | None:
        """What could not be done with the file within the last `PROBLEM_S`, and what to do; or None."""
        return self._problem if time.monotonic() - self._failed_at < PROBLEM_S else None

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """All or nothing of what is written inside; raises `EventStoreError` that begins with `what`."""
        with self._using(what), transaction(self._database):
            yield

    @contextmanager
    def _using(self, what: str) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except sqlite3.Error as error:
            self._problem, self._failed_at = f"{what}: {why_not_written(error)}", time.monotonic()
            self._complaints.tell("file", "%s", self._problem)
            raise EventStoreError(self._problem) from error

    def sweep(self) -> None:
        """Let go of what is too much or too old; for the start, and every hour or so.

        invariant: nothing is too old by a clock that has jumped within the last day, as far as is known.
        """
        is_steady, days = self._clock.look(), self._retention.days
        before = time.time() - DAY_S * days if days is not None and is_steady else 0.0
        while self._forget(before):
            # why: others want the lock too
            time.sleep(0.001)
        self.set_mark(_CLOCK, f"{time.time()}")

    def _forget(self, before: float) -> bool:
        with self._writing("old events cannot be removed"):
            (newest,) = self._database.execute("SELECT max(seq) FROM events").fetchone()
            return newest is not None and (
                forget_old(self._database, before) or forget_too_much(self._database, self._retention, newest)
            )

    def _put(
        self,
        kind: Kind,
        event_id: str,
        join: Callable[[Body | None], Body | None],
        snapshot: bytes | None,
        *,
        is_news: bool | None,
    ) -> bool:
        with self._writing(f"the event {event_id} cannot be stored"):
            known = _read(self._database, event_id)
            after = join(known.body if known else None)
            if after is not None:
                if is_news is None:
                    is_news = known is None or known.is_news
                self._store(kind, known, after, snapshot, is_news=is_news)
                fate = None if known else take_fate(self._database, event_id)
                given_up = fate and event_bodies.given_up(after, *fate)
                if given_up:
                    known = _read(self._database, event_id)
                    self._store("failed", known, given_up, None, is_news=is_news)
        if after is not None:
            self.wake_followers()
        return after is not None

    def _store(
        self, kind: Kind, known: _Known | None, body: Body, snapshot: bytes | None, *, is_news: bool
    ) -> None:
        seq = _replace(self._database, kind, known, body, is_news=is_news)
        if snapshot:
            # why: REPLACE would remove the old one without the trigger that counts
            upsert = "INSERT INTO snapshots VALUES (?, ?) ON CONFLICT DO UPDATE SET jpeg = excluded.jpeg"
            self._database.execute(upsert, (seq, snapshot))
        if is_news:
            self.outbox.put(kind, body)
        for _ in range(_ROUNDS_A_CHANGE):
            if not forget_too_much(self._database, self._retention, seq):
                break

    def newest(self, wanted: EventFilter, limit: int, before: int | None = None) -> list[StoredEvent]:
        """The events that changed last and match, newest first; with `before` those whose `seq` is smaller.

        Raises `SearchError` when `wanted.q` asks for too much.
        """
        where, values = wanted.where()
        values |= {"limit": limit, "before": 2**62 if before is None else before}
        return self._select(f"seq < :before{where} ORDER BY seq DESC LIMIT :limit", values)

    def latest(self, wanted: EventFilter, limit: int, before: Place | None = None) -> list[StoredEvent]:
        """The events that were captured last and match, latest first; with `before` those of earlier places.

        Raises `SearchError` when `wanted.q` asks for too much.
        """
        where, values = wanted.where()
        captured_at, born = (1e300, 0) if before is None else before
        values |= {"limit": limit, "captured_at": captured_at, "born": born}
        order = "ORDER BY captured_at DESC, born DESC LIMIT :limit"
        return self._select(f"(captured_at, born) < (:captured_at, :born){where} {order}", values)

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
        return next((bytes(jpeg) for (jpeg,) in self._rows(query, (event_id,))), None)

    def last_seq(self) -> int:
        """The `seq` of the newest event ever stored, or where a store without any starts to count."""
        ((seq,),) = self._rows("SELECT seq FROM sqlite_sequence WHERE name = 'events'")
        return int(seq)

    def mark(self, name: str) -> str | None:
        """What `set_mark` has kept under this name."""
        rows = self._rows("SELECT value FROM marks WHERE name = ?", (name,))
        return next((str(value) for (value,) in rows), None)

    def set_mark(self, name: str, value: str) -> None:
        """Keep how far something was read; the newest marks are kept."""
        oldest = "SELECT rowid FROM marks ORDER BY rowid DESC LIMIT -1 OFFSET ?"
        with self._writing(f"{name} cannot be stored"):
            self._database.execute("INSERT OR REPLACE INTO marks VALUES (?, ?)", (name, value))
            self._database.execute(f"DELETE FROM marks WHERE rowid IN ({oldest})", (_MAX_MARKS,))

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
        rows = self._rows(f"SELECT {_COLUMNS} FROM events WHERE {condition}", values)
        return [StoredEvent(*row) for row in rows]

    def _rows(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        with self._using("events cannot be read"):
            return self._database.execute(query, values).fetchall()


def _read(database: sqlite3.Connection, event_id: str) -> _Known | None:
    query = "SELECT seq, born, is_news, body FROM events WHERE id = ?"
    row = database.execute(query, (event_id,)).fetchone()
    return None if row is None else _Known(row[0], row[1], bool(row[2]), msgspec.json.decode(row[3]))


def _replace(
    database: sqlite3.Connection, kind: Kind, known: _Known | None, body: Body, *, is_news: bool
) -> int:
    """Stores `body` under a new number, which its snapshot follows, in place of the row `known`."""
    row = {
        "kind": kind,
        "id": body["id"],
        "camera": body["camera"],
        "label": body["label"],
        "zones": msgspec.json.encode(body["zones"]).decode(),
        "captured_at": body["captured_at"],
        "stored_at": time.time(),
        "is_described": body["description"] is not None,
        "is_pending": body["described_at"] is None,
        "is_open": body["state"] != "end",
        "is_news": is_news,
        "born": known.born if known else 0,
        "text": searchable(body),
        "body": msgspec.json.encode(body),
    }
    if known:
        database.execute("DELETE FROM events WHERE seq = ?", (known.seq,))
    columns = f"({', '.join(row)}) VALUES ({', '.join(f':{name}' for name in row)})"
    seq = database.execute(f"INSERT INTO events {columns}", row).lastrowid
    assert seq is not None
    if known:
        database.execute("UPDATE snapshots SET seq = ? WHERE seq = ?", (seq, known.seq))
    else:
        database.execute("UPDATE events SET born = seq WHERE seq = ?", (seq,))
    return seq
