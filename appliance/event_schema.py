"""The event store's tables, and how an older file becomes a newer one.

`user_version` counts the migrations that a file has been through. Each runs in one transaction, so a file is
never between two versions, whenever the process dies.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

MAX_FATES = 1000

_NEWS_S = 3600.0

_NO_COURSE: dict[str, Any] = {"state": "end", "num_changes": 0, "zones": []}


class EventStoreError(Exception):
    """The store's file cannot be used; the message names it."""


def open_database(path: Path | None) -> sqlite3.Connection:
    """The database at `path` (None: in memory), brought to the newest version; raises `EventStoreError`.

    Transactions are explicit (`transaction`), any thread may use it while it is the only one.
    """
    database = None
    try:
        database = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
        _migrate(database)
        # why: an event that is lost with the machine's power is worth less than a disk flush for every event
        database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;")
    except (sqlite3.Error, EventStoreError) as error:
        if database is not None:
            database.close()
        raise EventStoreError(f"{path}: cannot be used as event store: {error}") from error
    return database


def searchable(body: Mapping[str, Any]) -> str:
    """The words of an event that `q` looks in."""
    words = (body["camera"], body["label"], *body["zones"], body["description"])
    return " ".join(word for word in words if word)


def keep_fate(database: sqlite3.Connection, event_id: str, error: str, given_up_at: float) -> None:
    """Remember why an event that has yet to come will not be described; the newest are kept."""
    database.execute("INSERT OR REPLACE INTO fates VALUES (?, ?, ?)", (event_id, error, given_up_at))
    oldest = "SELECT rowid FROM fates ORDER BY rowid DESC LIMIT -1 OFFSET ?"
    database.execute(f"DELETE FROM fates WHERE rowid IN ({oldest})", (MAX_FATES,))


def take_fate(database: sqlite3.Connection, event_id: str) -> tuple[str, float] | None:
    """What `keep_fate` has kept of an event, which is forgotten then."""
    query = "SELECT error, given_up_at FROM fates WHERE id = ?"
    fate: tuple[str, float] | None = database.execute(query, (event_id,)).fetchone()
    if fate is not None:
        database.execute("DELETE FROM fates WHERE id = ?", (event_id,))
    return fate


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """All or nothing of what is executed inside."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _migrate(database: sqlite3.Connection) -> None:
    version = _version(database)
    if version > len(_MIGRATIONS):
        raise EventStoreError(f"it has version {version}, this is for {len(_MIGRATIONS)} and older")
    for number, migration in enumerate(_MIGRATIONS[version:], version + 1):
        with transaction(database):
            migration(database)
            database.execute(f"PRAGMA user_version = {number}")


def _version(database: sqlite3.Connection) -> int:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    return int(version)


def _create(database: sqlite3.Connection) -> None:
    database.execute("""
        CREATE TABLE events (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            camera TEXT NOT NULL,
            label TEXT NOT NULL,
            captured_at REAL NOT NULL,
            is_described INTEGER NOT NULL,
            body BLOB NOT NULL
        )""")
    database.execute("CREATE INDEX events_by_camera ON events (camera, seq)")
    database.execute("CREATE TABLE snapshots (seq INTEGER PRIMARY KEY, jpeg BLOB NOT NULL)")
    # why: a reader that resumes with the number of a store that is gone must get everything, not nothing
    first_seq = int(time.time() * 1000)
    database.execute("INSERT INTO sqlite_sequence VALUES ('events', ?)", (first_seq,))


def _add_search(database: sqlite3.Connection) -> None:
    """Words to search in, zones as a JSON list, and when each event was stored.

    Triggers keep the index true to the table, whoever writes there.
    """
    columns = ("text TEXT NOT NULL DEFAULT ''", "zones TEXT NOT NULL DEFAULT '[]'")
    for column in (*columns, "stored_at REAL NOT NULL DEFAULT 0"):
        database.execute(f"ALTER TABLE events ADD COLUMN {column}")
    for seq, body in database.execute("SELECT seq, body FROM events").fetchall():
        fields = msgspec.json.decode(body)
        fields = _NO_COURSE | {"changed_at": fields["captured_at"]} | fields
        values = (searchable(fields), fields["described_at"], msgspec.json.encode(fields), seq)
        database.execute("UPDATE events SET text = ?, stored_at = ?, body = ? WHERE seq = ?", values)
    database.execute("CREATE INDEX events_by_time ON events (stored_at)")
    database.execute("""
        CREATE VIRTUAL TABLE event_texts USING fts5(
            text, content = 'events', content_rowid = 'seq',
            tokenize = 'porter unicode61 remove_diacritics 2'
        )""")
    database.execute("INSERT INTO event_texts(event_texts) VALUES ('rebuild')")
    forget = "INSERT INTO event_texts(event_texts, rowid, text) VALUES ('delete', old.seq, old.text);"
    learn = "INSERT INTO event_texts(rowid, text) VALUES (new.seq, new.text);"
    for name, when, what in (
        ("insert", "INSERT", learn),
        ("delete", "DELETE", forget),
        ("update", "UPDATE OF seq, text", forget + learn),
    ):
        trigger = f"CREATE TRIGGER event_texts_{name} AFTER {when} ON events"
        database.execute(f"{trigger} BEGIN {what} END")


def _add_outbox(database: sqlite3.Connection) -> None:
    """Messages owed to outputs (`appliance.outputs.outbox`), and how far streams of others were read."""
    database.execute("""
        CREATE TABLE outbox (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            output TEXT NOT NULL,
            event_id TEXT NOT NULL,
            message_id TEXT NOT NULL,
            kind TEXT NOT NULL,
            body BLOB NOT NULL,
            created_at REAL NOT NULL,
            next_at REAL NOT NULL DEFAULT 0,
            num_tries INTEGER NOT NULL DEFAULT 0,
            is_dead INTEGER NOT NULL DEFAULT 0,
            error TEXT
        )""")
    database.execute("CREATE INDEX outbox_by_state ON outbox (output, is_dead, id)")
    database.execute("CREATE INDEX outbox_by_event ON outbox (output, event_id, id)")
    database.execute("CREATE TABLE marks (name TEXT PRIMARY KEY, value TEXT NOT NULL)")


def _add_fates(database: sqlite3.Connection) -> None:
    """Which events still wait for their description, and what is known of some that are yet to come."""
    database.execute("ALTER TABLE events ADD COLUMN is_pending INTEGER NOT NULL DEFAULT 0")
    # why: what was not described before that is no news, for outputs least of all
    query = "SELECT seq, body FROM events WHERE NOT is_described AND stored_at > strftime('%s', 'now') - 3600"
    for seq, body in database.execute(query).fetchall():
        is_pending = msgspec.json.decode(body).get("described_at") is None
        database.execute("UPDATE events SET is_pending = ? WHERE seq = ?", (is_pending, seq))
    database.execute("CREATE INDEX events_pending ON events (captured_at) WHERE is_pending")
    database.execute(
        "CREATE TABLE fates (id TEXT PRIMARY KEY, error TEXT NOT NULL, given_up_at REAL NOT NULL)"
    )


def _add_open(database: sqlite3.Connection) -> None:
    """Which events go on, as far as is known."""
    database.execute("ALTER TABLE events ADD COLUMN is_open INTEGER NOT NULL DEFAULT 0")
    recent = time.time() - _NEWS_S
    for seq, body, stored_at in database.execute("SELECT seq, body, stored_at FROM events").fetchall():
        fields = msgspec.json.decode(body)
        if fields["state"] == "end":
            continue
        # why: that one of long ago has ended is no news, for outputs least of all
        ended = body if stored_at > recent else msgspec.json.encode(fields | {"state": "end"})
        values = (stored_at > recent, ended, seq)
        database.execute("UPDATE events SET is_open = ?, body = ? WHERE seq = ?", values)
    database.execute("CREATE INDEX events_open ON events (seq) WHERE is_open")


# invariant: only appended to; what stands here has run on somebody's file.
_MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (
    _create,
    _add_search,
    _add_outbox,
    _add_fates,
    _add_open,
)
