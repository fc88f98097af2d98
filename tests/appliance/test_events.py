"""The event store by itself; test_api_events.py reads it over HTTP."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from appliance.events import EventFilter, EventStore, EventStoreError, Retention
from appliance.jobs import EventChange, EventState
from appliance.serve import open_events
from appliance.settings import SettingsError, load_settings
from tests.appliance.descriptions import begun, description

EVERYTHING = EventFilter()
KEYS = set(msgspec.to_builtins(description("a"))) - {"job_id", "source"} | {
    "id", "object", "state", "num_changes", "changed_at",
}  # fmt: skip


def ids(store: EventStore, wanted: EventFilter = EVERYTHING) -> list[str]:
    return [event.event_id for event in store.newest(wanted, 100)]


@pytest.fixture
def store() -> Iterator[EventStore]:
    with closing(EventStore()) as store:
        yield store


def test_an_event_is_the_description_without_its_source(store: EventStore) -> None:
    """A5: the source may be a URL with a password."""
    store.add(description("a", source="rtsp://john.doe:p@ss@10.0.0.1/"))
    (event,) = store.newest(EVERYTHING, 10)
    body = msgspec.json.decode(event.body)
    assert (body["id"], body["object"]) == ("a", "event")
    assert body["description"] == "A person walks."
    assert body["detections"][0]["name"] == "person"
    assert b"john.doe" not in event.body
    assert set(body) == KEYS


def test_the_readme_shows_an_event_as_it_is(store: EventStore) -> None:
    """Receivers are written by it: every key, of the same kind."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = msgspec.json.decode(readme[readme.index('{"id": "gate-') : readme.index("is an EVENT")])
    store.add(description("a", zones=["porch"]))
    store.change(change(1, "update", ["porch"]))
    told = msgspec.json.decode(store.newest(EVERYTHING, 1)[0].body)
    assert kinds(shown) == kinds(told)


def kinds(value: object) -> object:
    """The value with each text and number replaced by its kind."""
    if isinstance(value, dict):
        return {key: kinds(item) for key, item in value.items()}
    return [kinds(item) for item in value] if isinstance(value, list) else type(value).__name__


def test_a_models_folder_is_not_told(store: EventStore) -> None:
    store.add(description("a", model="/srv/models/vlm"))
    store.add(description("b", model="organisation/model"))
    models = [msgspec.json.decode(event.body)["model"] for event in store.newest(EVERYTHING, 2)]
    assert models == ["organisation/model", "vlm"]


def test_a_redelivered_job_stays_one_event(store: EventStore) -> None:
    assert store.add(description("a"))
    assert not store.add(description("a", text="Something else."))
    assert not store.add(description("a", text=None, error="engine died"))
    (event,) = store.newest(EVERYTHING, 10)
    assert msgspec.json.decode(event.body)["description"] == "A person walks."


def test_a_late_description_replaces_the_error(store: EventStore) -> None:
    """A8: an error is an event with `description: null` until the job succeeds."""
    store.add(description("a", text=None, error="engine died"), b"old")
    store.add(description("b"))
    (failed,) = [event for event in store.newest(EVERYTHING, 10) if event.event_id == "a"]
    assert msgspec.json.decode(failed.body)["description"] is None
    assert msgspec.json.decode(failed.body)["error"] == "engine died"
    assert store.add(description("a"))
    assert ids(store) == ["a", "b"]
    assert store.snapshot("a") == b"old"
    assert [event.event_id for event in store.after(failed.seq, EVERYTHING, 10)] == ["b", "a"]


def change(num: int, state: EventState, zones: Sequence[str] = ()) -> EventChange:
    """A change of the event that `description("a")` describes."""
    known = msgspec.to_builtins(description("a"))
    same = {name: known[name] for name in EventChange.__struct_fields__ if name in known}
    own = {"event_id": "a", "num": num, "state": state, "changed_at": 1_700_000_000.0 + num}
    return EventChange(**(same | own | {"zones": list(zones)}))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 1, 2), (0, 3, 1, 2), (0, 2, 3, 1), (2, 1, 0, 3)])
def test_an_event_and_its_description_are_one_in_any_order(store: EventStore, order: tuple[int, ...]) -> None:
    """New, update, end, and the description: by two ways, so that any of them may be late."""
    steps = [
        lambda: store.change(change(0, "new"), b"jpeg"),
        lambda: store.change(change(1, "update", ["porch"])),
        lambda: store.change(change(2, "end", ["porch"])),
        lambda: store.add(description("a", zones=[])),
    ]
    for step in order:
        steps[step]()
        (event,) = store.newest(EVERYTHING, 10)
        assert set(msgspec.json.decode(event.body)) == KEYS
    body = msgspec.json.decode(event.body)
    assert (body["state"], body["zones"], body["description"]) == ("end", ["porch"], "A person walks.")
    assert store.snapshot("a") == b"jpeg" or order[0] != 0
    assert [body["described_at"], body["model"]] == [1_700_000_001.0, ""]


def test_an_event_that_is_not_described_yet_has_neither_text_nor_error(store: EventStore) -> None:
    assert store.change(change(0, "new"))
    body = msgspec.json.decode(store.newest(EVERYTHING, 1)[0].body)
    assert [body[name] for name in ("description", "error", "described_at")] == [None, None, None]


def test_an_event_ends_once_whoever_ends_it(store: EventStore) -> None:
    """The front ends what no worker knows of; one that comes back with its own end is too late."""
    store.outbox.connect({"all": lambda kind, body: True})
    store.change(change(0, "new"))
    assert store.open_events() == {"a": "street"}
    assert (store.end("a"), store.end("a"), store.end("b")) == (True, False, False)
    assert not store.change(change(1, "update", ["porch"]))
    assert not store.change(change(2, "end", ["porch"]))
    assert store.open_events() == {}
    body = msgspec.json.decode(store.newest(EVERYTHING, 1)[0].body)
    assert (body["state"], body["num_changes"], body["zones"]) == ("end", 2, [])
    told = [row[0] for row in store._database.execute("SELECT kind FROM outbox ORDER BY id")]
    assert told == ["new", "end"]


def test_a_change_that_is_known_changes_nothing(store: EventStore) -> None:
    """Redelivery: the same number is no news for those who follow."""
    assert store.change(change(1, "update", ["porch"]))
    seq = store.last_seq()
    assert not store.change(change(1, "update", ["porch"]))
    assert not store.change(change(0, "new"))
    assert store.last_seq() == seq


def test_filters(store: EventStore) -> None:
    store.add(description("1", camera="yard", label="dog", captured_at=10.0))
    store.add(description("2", camera="street", label="dog", captured_at=20.0))
    store.add(description("3", camera="street", label="car", captured_at=30.0))
    assert ids(store) == ["3", "2", "1"]
    assert ids(store, EventFilter(camera="street")) == ["3", "2"]
    assert ids(store, EventFilter(label="dog")) == ["2", "1"]
    assert ids(store, EventFilter(camera="street", label="dog")) == ["2"]
    assert ids(store, EventFilter(since=20.0)) == ["3", "2"]
    assert ids(store, EventFilter(camera="' OR 1=1 --")) == []
    assert len(store.newest(EVERYTHING, 2)) == 2


def test_reading_on_after_a_number(store: EventStore) -> None:
    for name in "abcd":
        store.add(description(name))
    first = store.after(0, EVERYTHING, 2)
    second = store.after(first[-1].seq, EVERYTHING, 2)
    assert [event.event_id for event in (*first, *second)] == ["a", "b", "c", "d"]
    assert store.last_seq() == second[-1].seq


def test_what_is_no_news_is_owed_to_nobody(store: EventStore) -> None:
    """Nor is what the store says of it later by itself; what comes later from elsewhere is news."""
    store.outbox.connect({"all": lambda kind, body: True})
    store.change(begun("a"), is_news=False)
    store.change(begun("b"), is_news=False)
    store.give_up("a", "lost", 5.0)
    store.end("a")
    assert store.outbox.statuses()["all"].num_waiting == 0
    store.add(description("b"))
    store.end("b")
    told = store._database.execute("SELECT event_id, kind FROM outbox ORDER BY id").fetchall()
    assert told == [("b", "described"), ("b", "end")]


def test_places_in_time_do_not_move_with_changes(store: EventStore) -> None:
    for number, name in enumerate("abcd"):
        store.change(begun(name, captured_at=100.0 + number // 2))
    store.end("a")
    assert ids(store)[0] == "a"
    first = store.latest(EVERYTHING, 2)
    assert [event.event_id for event in first] == ["d", "c"]
    store.add(description("c"))
    store.add(description("b"))
    rest = store.latest(EVERYTHING, 9, first[-1].place)
    assert [event.event_id for event in rest] == ["b", "a"]
    assert [event.event_id for event in store.latest(EventFilter(camera="street"), 1)] == ["d"]


def test_find_and_snapshot(store: EventStore) -> None:
    store.add(description("a"), b"jpeg")
    store.add(description("b"))
    found = store.find("a")
    assert found is not None
    assert found.event_id == "a"
    assert store.snapshot("a") == b"jpeg"
    assert store.find("c") is None
    assert store.snapshot("b") is None
    assert store.snapshot("c") is None


def test_a_file_keeps_events_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    store = EventStore(path)
    store.add(description("a"), b"jpeg")
    seq = store.last_seq()
    store.close()
    again = EventStore(path)
    assert ids(again) == ["a"]
    assert again.snapshot("a") == b"jpeg"
    assert again.last_seq() == seq
    again.close()


def test_a_new_store_in_memory_counts_on_from_the_old_one() -> None:
    """A reader that resumes after a restart gets all there is."""
    with closing(EventStore()) as old:
        old.add(description("a"))
        time.sleep(0.01)
        with closing(EventStore()) as new:
            assert new.last_seq() > old.last_seq()


def test_a_file_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    path.write_text("I am not a database." * 100)
    with pytest.raises(EventStoreError, match=r"events\.db: cannot be used"):
        EventStore(path)


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(EventStoreError, match="version 99"):
        EventStore(path)


@pytest.mark.parametrize(
    "read",
    [
        lambda store: store.newest(EVERYTHING, 1),
        lambda store: store.latest(EVERYTHING, 1),
        lambda store: store.after(0, EVERYTHING, 1),
        lambda store: store.find("a"),
        lambda store: store.snapshot("a"),
        lambda store: store.last_seq(),
        lambda store: store.mark("a"),
        lambda store: store.open_events(),
    ],
)
def test_a_file_that_cannot_be_read_any_more_is_an_error_of_the_store(
    store: EventStore, read: Callable[[EventStore], object]
) -> None:
    read(store)
    store.close()
    with pytest.raises(EventStoreError, match="events cannot be read"):
        read(store)


async def test_followers_hear_of_events_from_any_thread(store: EventStore) -> None:
    def write(name: str) -> None:
        for number in range(50):
            store.add(description(f"{name}{number}"))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    seen: list[str] = []
    with store.changes() as changed:
        for thread in threads:
            thread.start()
        seq = 0
        async with asyncio.timeout(30):
            while len(seen) < 200:
                await changed.wait()
                changed.clear()
                for event in store.after(seq, EVERYTHING, 1000):
                    seen.append(event.event_id)
                    seq = event.seq
    for thread in threads:
        thread.join()
    assert len(set(seen)) == 200


async def test_a_follower_that_left_is_not_called(store: EventStore) -> None:
    with store.changes() as changed:
        pass
    store.add(description("a"))
    await asyncio.sleep(0)
    assert not changed.is_set()


def test_the_id_stands_first(store: EventStore) -> None:
    store.add(description("z"))
    assert store.newest(EVERYTHING, 1)[0].body.startswith(b'{"id":"z","object":"event"')


def test_settings_open_the_store(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"events: {{path: {tmp_path}/events.db, retain_days: 0.5, max_events: 7}}")
    with closing(open_events(load_settings(config))) as store:
        assert store._retention == Retention(0.5, 7, 256 * 2**20)
        assert (tmp_path / "events.db").exists()
    config.write_text(f"events: {{path: {tmp_path}/nowhere/events.db}}")
    with pytest.raises(SettingsError, match=r"events\.path: .*nowhere/events\.db: cannot be used"):
        open_events(load_settings(config))
