"""The event store's process is killed at any point, again and again."""

import os
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

from appliance.events import EventFilter, EventStore
from tests.appliance import event_writer
from tests.children import forkserver

NUM_KILLS = int(os.environ.get("APPLIANCE_TEST_KILLS", "50"))
PATIENCE_S = 300


def test_no_event_is_lost_or_doubled_by_kills(tmp_path: Path) -> None:
    """Killed again and again, while it opens the file or writes: what `add` has returned for is there, once.

    So are the messages that are owed for it; the file is whole each time.
    """
    path, choice = tmp_path / "events.db", random.Random(11)
    acknowledged: list[int] = []
    with forkserver("tests.appliance.event_writer") as context:
        for number in range(NUM_KILLS):
            first = acknowledged[-1] + 1 if acknowledged else 0
            acknowledged += run_and_kill(
                context, path, first, is_early=number % 4 == 0, after_s=choice.expovariate(100)
            )
            assert_whole(path)
    assert acknowledged == list(range(len(acknowledged)))
    assert len(acknowledged) > NUM_KILLS / 2
    assert_all_there(path, len(acknowledged))


def run_and_kill(
    context: ForkServerContext, path: Path, first: int, *, is_early: bool, after_s: float
) -> list[int]:
    """The numbers that a writer acknowledged until it was killed, `after_s` after its start or first one."""
    reading, writing = context.Pipe(duplex=False)
    writer = context.Process(target=event_writer.write, args=(path, first, writing))
    writer.start()
    writing.close()
    if not is_early:
        assert reading.poll(PATIENCE_S)
    time.sleep(after_s)
    writer.kill()
    writer.join()
    with reading:
        return list(received(reading))


def received(reading: Connection) -> Iterator[int]:
    with suppress(EOFError):
        while True:
            yield int(reading.recv_bytes())


def assert_whole(path: Path) -> None:
    if path.exists():
        with closing(sqlite3.connect(path)) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def assert_all_there(path: Path, number: int) -> None:
    """Events, snapshots, words and messages of `number` events, and perhaps of one more."""
    with closing(EventStore(path)) as store:
        events = store.newest(EventFilter(), 2**31)
        counts = Counter(event.event_id for event in events)
        assert counts == Counter(f"{n}" for n in range(len(events)))
        assert len(events) - number in (0, 1)
        assert all(store.snapshot(f"{n}") == event_writer.JPEG for n in range(number))
        assert len(store.newest(EventFilter(q="event"), 2**31)) >= number
        owed = Counter(
            store._database.execute("SELECT output, event_id FROM outbox WHERE kind != 'new'").fetchall()
        )
        for n in range(number):
            assert owed["all", f"{n}"] == 1 + (n % 5 == 0)
            assert owed["errors", f"{n}"] == (n % 5 == 0)
        store._database.execute("INSERT INTO event_texts(event_texts, rank) VALUES ('integrity-check', 1)")
