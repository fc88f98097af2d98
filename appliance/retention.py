"""What the event store keeps, and whether a clock can be believed that says what is old."""

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass

from appliance.event_schema import keep_forgotten, sizes

_SWEEP = 4
_JUMP_S = 60.0
_DRIFT = 1e-3
_IS_LIVE = "(is_open OR is_pending)"


@dataclass(frozen=True, slots=True)
class Retention:
    """What a store keeps: events of the last `days` (None: no limit), the newest `max_events`.

    Over `max_bytes` the oldest snapshots go first, then the oldest events. What goes on, or still waits for
    its description, is never too old and goes last. What is owed to outputs does not count (`Outbox`).
    """

    days: float | None = None
    max_events: int = 20_000
    max_bytes: int = 256 * 2**20


class SteadyClock:
    """Whether the wall clock has gone for `after_s` as the monotonic clock does, as far as is known.

    `seen` is when it was last looked at, by an earlier process (None: never); it must not be longer ago.
    """

    def __init__(
        self,
        seen: float | None,
        after_s: float,
        wall: Callable[[], float] | None = None,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        self._wall, self._monotonic, self._after_s = wall or time.time, monotonic or time.monotonic, after_s
        self._last = self._wall(), self._monotonic()
        is_known = seen is not None and -_JUMP_S <= self._last[0] - seen <= after_s
        self._steady_at = self._last[1] + (0.0 if is_known else after_s)

    def look(self) -> bool:
        """Whether it is steady now; look often enough that a jump back and forth does not go unnoticed."""
        wall, now = self._wall(), self._monotonic()
        gone_s, wall_gone_s = now - self._last[1], wall - self._last[0]
        if abs(wall_gone_s - gone_s) > _JUMP_S + _DRIFT * gone_s:
            self._steady_at = now + self._after_s
        self._last = wall, now
        return now >= self._steady_at


def forget_too_much(database: sqlite3.Connection, kept: Retention, newest: int) -> bool:
    """One round: some of what is over the limits goes, never the event `newest`; whether anything went.

    Runs in the caller's transaction.
    """
    num_events, num_bytes = sizes(database, "events")
    if excess := max(0, num_events - kept.max_events):
        return _drop_events(database, newest, min(excess, _SWEEP))
    if num_bytes + sizes(database, "snapshots")[1] <= kept.max_bytes:
        return False
    return _drop_snapshots(database, newest) or _drop_events(database, newest, _SWEEP)


def forget_old(database: sqlite3.Connection, before: float) -> bool:
    """One round of the same for what was stored before that time (unix seconds) and has ended."""
    oldest = f"SELECT seq FROM events WHERE stored_at < ? AND NOT {_IS_LIVE} LIMIT ?"
    return _drop(database, oldest, (before, _SWEEP))


def _drop_events(database: sqlite3.Connection, newest: int, number: int) -> bool:
    return any(
        _drop(
            database,
            f"SELECT seq FROM events WHERE seq < ? AND {which} ORDER BY seq LIMIT ?",
            (newest, number),
        )
        for which in (f"NOT {_IS_LIVE}", _IS_LIVE)
    )


def _drop_snapshots(database: sqlite3.Connection, newest: int) -> bool:
    oldest = "SELECT seq FROM snapshots WHERE seq < ? ORDER BY seq LIMIT ?"
    return database.execute(f"DELETE FROM snapshots WHERE seq IN ({oldest})", (newest, _SWEEP)).rowcount > 0


def _drop(database: sqlite3.Connection, which: str, values: tuple[float, int]) -> bool:
    rows = database.execute(
        f"DELETE FROM events WHERE seq IN ({which}) RETURNING seq, id, {_IS_LIVE}", values
    ).fetchall()
    database.executemany("DELETE FROM snapshots WHERE seq = ?", [(seq,) for seq, _, _ in rows])
    keep_forgotten(database, [event_id for _, event_id, is_live in rows if is_live])
    return bool(rows)
