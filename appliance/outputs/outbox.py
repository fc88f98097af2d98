"""Messages that are owed to somebody outside, in the event store's own file.

A message is written in the transaction that changes its event, and goes when the receiver has confirmed it:
whenever the process dies, none is lost. One that was confirmed just before comes again, with the same
`message_id`. What nobody took for too long becomes a dead letter, as does the oldest that waits when an
output is owed more than `MAX_WAITING` messages or `MAX_WAITING_BYTES`.
"""

import hashlib
import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from appliance.event_schema import sizes, transaction
from appliance.logs import Complaints

logger = logging.getLogger(__name__)

Body = Mapping[str, Any]
Kind = Literal["new", "update", "end", "described", "failed"]
Wanted = Callable[[Kind, Body], bool]

MAX_WAITING = 10_000
MAX_WAITING_BYTES = 32 * 2**20
MAX_DEAD = 10_000
MAX_DEAD_BYTES = 16 * 2**20
LONGEST_WAIT_S = 3600.0
COMPLAIN_EVERY_S = 60.0

_COLUMNS = "id, output, event_id, message_id, kind, body, created_at, owed_since, num_tries, error"
# why: what is further ahead than any pause was put off by a clock that has been put back since
_IS_DUE = "NOT (next_at > ? AND next_at <= ?)"
_IN_TURN = """NOT EXISTS (
    SELECT 1 FROM outbox AS earlier WHERE earlier.output = outbox.output
    AND earlier.event_id = outbox.event_id AND earlier.is_dead = 0 AND earlier.id < outbox.id
)"""


@dataclass(frozen=True, slots=True)
class Message:
    """One change of one event, owed to one output; `body` is the event as JSON, times are unix seconds.

    It was `created_at` the change, and is owed since then, or since it was put back.
    """

    id: int
    output: str
    event_id: str
    message_id: str
    kind: Kind
    body: bytes
    created_at: float
    owed_since: float
    num_tries: int
    error: str | None


@dataclass(frozen=True, slots=True)
class OutputStatus:
    """How one output stands; `num_sent` and `num_overflowed` count since this process began."""

    num_waiting: int
    num_dead: int
    oldest_age_s: float
    num_sent: int = 0
    num_overflowed: int = 0


class Outbox:
    """The table `outbox` of a database that `lock` guards; every method but `put` takes the lock.

    Raises:
        sqlite3.Error: By any method: the file cannot be used now.
    """

    def __init__(self, database: sqlite3.Connection, lock: threading.Lock) -> None:
        self._database, self._lock = database, lock
        self._wanted: dict[str, Wanted] = {}
        self._num_sent: dict[str, int] = {}
        self._num_overflowed: dict[str, int] = {}
        self._complaints = Complaints(logger, COMPLAIN_EVERY_S)

    def connect(self, outputs: Mapping[str, Wanted]) -> None:
        """From now on fill these outputs; what is owed to others that are gone becomes dead letters."""
        self._wanted = dict(outputs)
        self._num_sent = dict.fromkeys(outputs, 0)
        self._num_overflowed = dict.fromkeys(outputs, 0)
        for output in self.statuses():
            if output in outputs:
                # why: what kept it away may have been repaired meanwhile
                self.hasten(output)
            else:
                self.give_up(output, math.inf, "no output of this name is configured any more")

    def put(self, kind: Kind, body: Body) -> None:
        """Owe a change to every output that wants it; inside the caller's lock and transaction."""
        for output, is_wanted in self._wanted.items():
            if is_wanted(kind, body):
                now = time.time()
                values = (
                    output,
                    body["id"],
                    _message_id(kind, body),
                    kind,
                    msgspec.json.encode(body),
                    now,
                    now,
                )
                columns = "output, event_id, message_id, kind, body, created_at, owed_since"
                self._database.execute(f"INSERT INTO outbox ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)
                self._bound(output)

    def next_due(self, output: str) -> Message | None:
        """The oldest message whose time has come; an event's later one waits for its earlier one."""
        where = f"output = ? AND is_dead = 0 AND {_IS_DUE} AND {_IN_TURN} ORDER BY id LIMIT 1"
        now = time.time()
        return next(iter(self._select(where, output, now, now + LONGEST_WAIT_S)), None)

    def due_in_s(self, output: str) -> float | None:
        """Seconds until the next message is due; None when none waits."""
        if self.next_due(output) is not None:
            return 0.0
        query = f"SELECT min(next_at) FROM outbox WHERE output = ? AND is_dead = 0 AND {_IN_TURN}"
        with self._lock:
            (next_at,) = self._database.execute(query, (output,)).fetchone()
        return None if next_at is None else max(0.0, next_at - time.time())

    def sent(self, message: Message) -> None:
        """The receiver has confirmed it."""
        self._execute("DELETE FROM outbox WHERE id = ?", message.id)
        self._num_sent[message.output] = self._num_sent.get(message.output, 0) + 1

    def failed(self, message: Message, error: str, again_in_s: float | None) -> None:
        """It was not taken; it is due again in so many seconds, or with None becomes a dead letter."""
        columns = "error = ?, num_tries = ?, is_dead = ?, next_at = ?"
        is_dead, next_at = again_in_s is None, time.time() + (again_in_s or 0.0)
        values = (error, message.num_tries + 1, is_dead, next_at, message.id)
        with self._lock, transaction(self._database):
            self._database.execute(f"UPDATE outbox SET {columns} WHERE id = ?", values)
            self._bound(message.output)

    def give_up(self, output: str, before: float, error: str) -> int:
        """Make dead letters of what has waited since before that time (unix seconds); how many."""
        old = "UPDATE outbox SET is_dead = 1, error = ? WHERE output = ? AND is_dead = 0 AND owed_since <= ?"
        with self._lock, transaction(self._database):
            number = self._database.execute(old, (error, output, before)).rowcount
            self._bound(output)
        return number

    def hasten(self, output: str) -> None:
        """All that was put off is due now."""
        self._execute(
            "UPDATE outbox SET next_at = 0 WHERE output = ? AND is_dead = 0 AND next_at > 0", output
        )

    def dead(self, limit: int = 100) -> list[Message]:
        """The newest dead letters, newest first."""
        return self._select("is_dead = 1 ORDER BY id DESC LIMIT ?", limit)

    def retry(self, number: int | None = None) -> int:
        """Send dead letters again, the one with this `id` or all; how many there were.

        They have a whole life before them: their age counts from now.
        """
        again = "UPDATE outbox SET is_dead = 0, next_at = 0, num_tries = 0, owed_since = ?"
        return self._execute(f"{again} WHERE is_dead = 1 AND (?2 IS NULL OR id = ?2)", time.time(), number)

    def drop(self, number: int | None = None) -> int:
        """Forget dead letters, the one with this `id` or all; how many there were."""
        return self._execute("DELETE FROM outbox WHERE is_dead = 1 AND (?1 IS NULL OR id = ?1)", number)

    def statuses(self) -> dict[str, OutputStatus]:
        """Every output that is connected or owed something, by name."""
        query = """SELECT output, sum(is_dead = 0), sum(is_dead), min(iif(is_dead, NULL, owed_since))
            FROM outbox GROUP BY output"""
        with self._lock:
            rows = {row[0]: row[1:] for row in self._database.execute(query)}
        nothing = (0, 0, None)
        return {name: self._status(name, *rows.get(name, nothing)) for name in sorted({*self._wanted, *rows})}

    def _status(self, output: str, num_waiting: int, num_dead: int, oldest_at: float | None) -> OutputStatus:
        age_s = max(0.0, time.time() - oldest_at) if oldest_at else 0.0
        counts = self._num_sent.get(output, 0), self._num_overflowed.get(output, 0)
        return OutputStatus(num_waiting, num_dead, age_s, *counts)

    def _bound(self, output: str) -> None:
        """Give up the oldest that wait and forget the oldest dead letters, as long as they are too many.

        why: it is told seldom, as it happens with every new event while a receiver is away.
        """
        first = "SELECT id FROM outbox WHERE output = ? AND is_dead = ? ORDER BY id LIMIT ?"
        give_up = f"UPDATE outbox SET is_dead = 1, error = ? WHERE id IN ({first})"
        error = f"overflow: more than {MAX_WAITING} messages or {MAX_WAITING_BYTES} bytes waited"
        num_given_up = num_forgotten = 0
        while excess := self._excess(output, MAX_WAITING, MAX_WAITING_BYTES, is_dead=False):
            num_given_up += self._database.execute(give_up, (error, output, False, excess)).rowcount
        while excess := self._excess(output, MAX_DEAD, MAX_DEAD_BYTES, is_dead=True):
            forget = f"DELETE FROM outbox WHERE id IN ({first})"
            num_forgotten += self._database.execute(forget, (output, True, excess)).rowcount
        if num_given_up:
            self._num_overflowed[output] = self._num_overflowed.get(output, 0) + num_given_up
            text = "output=%s the oldest of its messages are dead letters: %s"
            self._complaints.tell(f"given up: {output}", text, output, error)
        if num_forgotten:
            text = "output=%s the oldest of its dead letters are gone: there are too many"
            self._complaints.tell(f"forgotten: {output}", text, output)

    def _excess(self, output: str, most: int, most_bytes: int, *, is_dead: bool) -> int:
        """How many are certainly too many."""
        number, num_bytes = sizes(self._database, f"to {output}", is_dead=is_dead)
        return max(number - most, int(num_bytes > most_bytes and number > 1))

    def _select(self, where: str, *values: Any) -> list[Message]:
        with self._lock:
            rows = self._database.execute(f"SELECT {_COLUMNS} FROM outbox WHERE {where}", values).fetchall()
        return [Message(*row) for row in rows]

    def _execute(self, statement: str, *values: Any) -> int:
        with self._lock:
            return self._database.execute(statement, values).rowcount


def _message_id(kind: Kind, body: Body) -> str:
    """The same for the same change of the same event, whichever process or store tells it."""
    number = body["num_changes"] if kind == "update" else 0
    text = f"{body['id']}\n{kind}\n{number}"
    return f"msg_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
