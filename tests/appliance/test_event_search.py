"""Full-text search, pages, and what becomes of a file that an older version wrote."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance import event_schema
from appliance.event_bodies import described
from appliance.event_queries import MAX_TERMS, match_query
from appliance.events import EventFilter, EventStore, EventStoreError, SearchError
from tests.appliance.descriptions import description

OPERATORS = [
    '"',
    '""',
    "'",
    "*",
    "a*",
    "^a",
    "-a",
    "a:b",
    "text:a",
    "NEAR(a b)",
    "a OR",
    "AND",
    "NOT a",
    "(",
    "+",
    "\0",
]


@pytest.fixture(scope="module")
def store() -> Iterator[EventStore]:
    with closing(EventStore()) as store:
        store.add(
            description("walk", text="A man in a red coat is walking two dogs.", zones=["gate", "lawn"])
        )
        store.add(description("bus", label="bus", text="Two buses wait. Señor López drives.", zones=["road"]))
        store.add(description("none", camera="yard", text=None, error="walking failed"))
        yield store


def found(store: EventStore, q: str) -> list[str]:
    return [event.event_id for event in store.newest(EventFilter(q=q), 100)]


@pytest.mark.parametrize(
    ("q", "ids"),
    [
        ("walks", ["walk"]),
        ("RED man", ["walk"]),
        ("man bus", []),
        ('"red coat"', ["walk"]),
        ('"coat red"', []),
        ('"red coat', ["walk"]),
        ("sen*", ["bus"]),
        ("lopez", ["bus"]),
        ("street person", ["walk"]),
        ("two", ["bus", "walk"]),
        ("gate", ["walk"]),
        ("yard", ["none"]),
        ("OR", []),
        ("two OR man", []),
        ("", []),
        ("!?", []),
        ("two !?", ["bus", "walk"]),
    ],
)
def test_words_are_found_in_their_forms(store: EventStore, q: str, ids: list[str]) -> None:
    assert found(store, q) == ids


@pytest.mark.parametrize("q", OPERATORS)
def test_operators_are_words(store: EventStore, q: str) -> None:
    assert found(store, q) in ([], ["walk"])


@given(st.text(st.sampled_from("ab\"'*^-:()+{}.,\\ \0\tORANDNOTNEAR²é💡"), max_size=40))
def test_whatever_is_typed_is_a_query(store: EventStore, q: str) -> None:
    found(store, q)


@given(st.text(max_size=60))
def test_any_text_is_a_query(store: EventStore, q: str) -> None:
    found(store, q.encode(errors="replace").decode())


def test_a_text_is_found_by_its_own_words(store: EventStore) -> None:
    text = "A man in a red coat is walking two dogs."
    assert found(store, text) == ["walk"]
    assert match_query('say "big red" bus*') == '"say" "big red" "bus*" *'


def test_too_many_words_are_refused(store: EventStore) -> None:
    assert found(store, "two " * MAX_TERMS) == ["bus", "walk"]
    with pytest.raises(SearchError, match="33"):
        found(store, "two " * 33)


def test_zones_and_times(store: EventStore) -> None:
    def ids(**wanted: str) -> list[str]:
        return [event.event_id for event in store.newest(EventFilter(**wanted), 100)]  # type: ignore[arg-type]

    assert ids(zone="lawn") == ["walk"]
    assert ids(zone="law") == []
    assert ids(zone='"lawn"]') == []
    assert ids(zone="lawn", q="two") == ["walk"]
    assert ids(zone="road", q="walking") == []
    newest = store.newest(EventFilter(q="two"), 1)
    assert [event.event_id for event in store.newest(EventFilter(q="two"), 1, newest[0].seq)] == ["walk"]
    assert [event.event_id for event in store.after(0, EventFilter(q="two"), 9)] == ["walk", "bus"]


def test_until_is_exclusive() -> None:
    with closing(EventStore()) as store:
        for number in (10, 20, 30):
            store.add(description(f"{number}", captured_at=float(number)))
        wanted = EventFilter(since=10.0, until=30.0)
        assert [event.event_id for event in store.newest(wanted, 9)] == ["20", "10"]


def test_the_index_follows_the_table() -> None:
    with closing(EventStore()) as store:
        store.add(description("a", text=None, error="away"))
        store.add(description("a", text="A cat sleeps."))
        assert found(store, "sleeping") == ["a"]
        assert found(store, "street") == ["a"]
        store._database.execute("INSERT INTO event_texts(event_texts, rank) VALUES ('integrity-check', 1)")


def write_version_1(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        event_schema._create(database)
        database.execute("PRAGMA user_version = 1")
        for name, text in (("a", "A cat sleeps."), ("b", None)):
            fields = described(None, description(name, text=text))
            assert fields is not None
            fields = {
                key: value
                for key, value in fields.items()
                if key not in (*event_schema._NO_COURSE, "changed_at")
            }
            values = (name, "street", "cat", 10.0, text is not None, msgspec.json.encode(fields))
            columns = "(id, camera, label, captured_at, is_described, body)"
            database.execute(f"INSERT INTO events {columns} VALUES (?, ?, ?, ?, ?, ?)", values)


def test_a_file_of_version_1_is_brought_up_to_date(tmp_path: Path) -> None:
    write_version_1(tmp_path / "events.db")
    with closing(EventStore(tmp_path / "events.db")) as store:
        assert [event.event_id for event in store.newest(EventFilter(), 9)] == ["b", "a"]
        assert found(store, "sleeping") == ["a"]
        assert not store.add(description("a"))
        assert store.add(description("b", text="Late sleep."))
        assert found(store, "sleeping") == ["b", "a"]


def test_a_migration_that_breaks_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.db"
    write_version_1(path)
    before = path.read_bytes()

    def break_off(database: sqlite3.Connection) -> None:
        event_schema._add_search(database)
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(event_schema, "_MIGRATIONS", (event_schema._create, break_off))
        with pytest.raises(EventStoreError, match="disk I/O error"):
            EventStore(path)
    assert path.read_bytes() == before
    with closing(EventStore(path)) as store:
        assert found(store, "sleeping") == ["a"]
