"""The event store's tables, and how an older file becomes a newer one.

`user_version` counts the migrations that a file has been through. Each runs in one transaction, so a file is
never between two versions, whenever the process dies.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

BUSY_S = 5.0
MAX_FATES = 5000
MAX_FORGOTTEN = 10_000

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
        database = sqlite3.connect(path or ":memory:", BUSY_S, check_same_thread=False, isolation_level=None)
        _migrate(database)
        # why: an event that is lost with the machine's power is worth less than a disk flush for every event
        database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;")
    except (sqlite3.Error, EventStoreError) as error:
        if database is not None:
            database.close()
        reason = why_not_written(error) if isinstance(error, sqlite3.Error) else error
        raise EventStoreError(f"{path}: cannot be used as event store: {reason}") from error
    return database


def why_not_written(error: sqlite3.Error) -> str:
    """What SQLite says, and what to do about it where that is plain."""
    # why: the lowest byte is the kind of error, the others which one of it
    kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if kind == sqlite3.SQLITE_FULL:
        return f"{error}: make room on the disk of events.path"
    if kind == sqlite3.SQLITE_IOERR:
        return f"{error}: see that the disk of events.path has room and is sound"
    return str(error)


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


def keep_forgotten(database: sqlite3.Connection, event_ids: Iterable[str]) -> None:
    """Remember events that had to go before all was told of them; the newest are kept."""
    database.executemany("INSERT OR REPLACE INTO forgotten VALUES (?)", [(one,) for one in event_ids])
    oldest = "SELECT rowid FROM forgotten ORDER BY rowid DESC LIMIT -1 OFFSET ?"
    database.execute(f"DELETE FROM forgotten WHERE rowid IN ({oldest})", (MAX_FORGOTTEN,))


def is_forgotten(database: sqlite3.Connection, event_id: str) -> bool:
    """Whether `keep_forgotten` remembers it."""
    query = "SELECT 1 FROM forgotten WHERE id = ?"
    return database.execute(query, (event_id,)).fetchone() is not None


def sizes(database: sqlite3.Connection, name: str, *, is_dead: bool = False) -> tuple[int, int]:
    """Rows and bytes of `events`, `snapshots`, or of what is owed `to OUTPUT`; `_add_sizes` says which."""
    query = "SELECT num, bytes FROM sizes WHERE name = ? AND is_dead = ?"
    row: tuple[int, int] | None = database.execute(query, (name, is_dead)).fetchone()
    return row or (0, 0)


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


def _add_sizes(database: sqlite3.Connection) -> None:
    """What is kept and what is owed, counted apart by triggers, and a place in time that changes do not move.

    Sizes are what a row takes in the file, about: its content, its words and twice as much for the index of
    words, its other columns and entries in indexes, and half a page of what is larger than one.
    """
    for column in ("born INTEGER NOT NULL DEFAULT 0", "is_news INTEGER NOT NULL DEFAULT 1"):
        database.execute(f"ALTER TABLE events ADD COLUMN {column}")
    database.execute("UPDATE events SET born = seq")
    database.execute("CREATE INDEX events_by_capture ON events (captured_at, born)")
    database.execute("CREATE INDEX events_by_camera_capture ON events (camera, captured_at, born)")
    database.execute("CREATE TABLE forgotten (id TEXT PRIMARY KEY)")
    database.execute("ALTER TABLE outbox ADD COLUMN owed_since REAL NOT NULL DEFAULT 0")
    database.execute("UPDATE outbox SET owed_since = created_at")
    columns = "name TEXT, is_dead INTEGER, num INTEGER NOT NULL, bytes INTEGER NOT NULL"
    database.execute(f"CREATE TABLE sizes ({columns}, PRIMARY KEY (name, is_dead))")
    text = "3 * length(CAST({}.text AS BLOB))"
    _count_rows(database, "events", f"length({{}}.body) + {text} + 600", "body, text")
    _count_rows(database, "snapshots", "length({}.jpeg) + 2048", "jpeg")
    _count_rows(
        database,
        "outbox",
        "length({}.body) + 400",
        "body, output, is_dead",
        name="'to ' || {}.output",
        is_dead="{}.is_dead",
    )


def _count_rows(
    database: sqlite3.Connection,
    table: str,
    size: str,
    columns: str,
    *,
    name: str | None = None,
    is_dead: str = "0",
) -> None:
    """Triggers that keep rows of `sizes` by what `{}`, a row, is in SQL: its name, whether dead, its size.

    The last two change with `columns` only; without a `name` it is the table's.
    """
    terms = (name or f"'{table}'", is_dead, size)

    def add(row: str, sign: str) -> str:
        who, dead, num_bytes = (term.replace("{}", row) for term in terms)
        return f"""INSERT INTO sizes VALUES ({who}, {dead}, {sign}1, {sign}({num_bytes}))
            ON CONFLICT DO UPDATE SET num = num + excluded.num, bytes = bytes + excluded.bytes;"""

    for event, when, what in (
        ("insert", "INSERT", add("new", "")),
        ("delete", "DELETE", add("old", "-")),
        ("update", f"UPDATE OF {columns}", add("old", "-") + add("new", "")),
    ):
        trigger = f"CREATE TRIGGER {table}_sizes_{event} AFTER {when} ON {table}"
        database.execute(f"{trigger} BEGIN {what} END")
    who, dead, num_bytes = (term.replace("{}", table) for term in terms)
    counted = f"SELECT {who}, {dead}, count(*), sum({num_bytes}) FROM {table} GROUP BY 1, 2"
    database.execute(f"INSERT INTO sizes {counted}")


def _add_kind(database: sqlite3.Connection) -> None:
    """What changed last, as outputs call it; of older events as far as their body tells."""
    database.execute("ALTER TABLE events ADD COLUMN kind TEXT NOT NULL DEFAULT 'described'")
    described_at, state = (
        f"json_extract(CAST(body AS TEXT), '$.{key}')" for key in ("described_at", "state")
    )
    kind = f"iif({described_at} IS NULL, {state}, 'failed')"
    database.execute(f"UPDATE events SET kind = {kind} WHERE NOT is_described")


# invariant: only appended to; what stands here has run on somebody's file.
_MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (
    _create,
    _add_search,
    _add_outbox,
    _add_fates,
    _add_open,
    _add_sizes,
    _add_kind,
)
