"""What is owed to outputs, and in which order; test_event_kill.py ends the process in the middle."""

import time

import pytest

from appliance.events import EventStore
from appliance.jobs import EventChange
from appliance.outputs import outbox as outbox_module
from appliance.outputs.outbox import Message
from tests.appliance.descriptions import description


def change(event_id: str, num: int, state: str) -> EventChange:
    fields = {"frame_index": 1, "time_s": 1.0, "captured_at": 10.0, "changed_at": 10.0 + num, "track_id": 3}
    texts = {"camera": "street", "label": "person", "reason": "new_track", "detections": [], "zones": []}
    return EventChange(event_id=event_id, num=num, state=state, **fields, **texts)  # type: ignore[arg-type]


def owe_all(store: EventStore, *outputs: str) -> None:
    store.outbox.connect({name: lambda kind, body: True for name in outputs})


def take(store: EventStore, output: str = "a") -> Message:
    message = store.outbox.next_due(output)
    assert message is not None
    return message


def test_every_change_is_owed_to_every_output_once(store: EventStore) -> None:
    owe_all(store, "a", "b")
    store.change(change("1", 0, "new"))
    store.add(description("1"))
    store.add(description("1"))
    store.change(change("1", 0, "new"))
    for output in ("a", "b"):
        kinds = []
        while message := store.outbox.next_due(output):
            kinds.append(message.kind)
            store.outbox.sent(message)
        assert kinds == ["new", "described"]
        assert store.outbox.statuses()[output].num_sent == 2


def test_an_output_gets_what_it_wants(store: EventStore) -> None:
    store.outbox.connect({"a": lambda kind, body: kind == "failed" and body["camera"] == "yard"})
    store.add(description("1", text=None, error="away"))
    store.add(description("2", camera="yard"))
    store.add(description("3", camera="yard", text=None, error="away"))
    assert take(store).event_id == "3"
    assert store.outbox.statuses()["a"].num_waiting == 1


def test_an_event_is_told_in_order_others_are_not_held_up(store: EventStore) -> None:
    owe_all(store, "a")
    store.change(change("1", 0, "new"))
    store.change(change("1", 1, "end"))
    store.add(description("2"))
    store.outbox.failed(take(store), "refused", 600)
    assert (take(store).event_id, take(store).kind) == ("2", "described")
    store.outbox.sent(take(store))
    assert store.outbox.next_due("a") is None
    due_in_s = store.outbox.due_in_s("a")
    assert due_in_s is not None
    assert 590 < due_in_s <= 600


def test_a_dead_letter_is_put_back_or_dropped(store: EventStore) -> None:
    owe_all(store, "a")
    for number in range(3):
        store.add(description(f"{number}"))
        store.outbox.failed(take(store), f"refused {number}", None)
    dead = store.outbox.dead()
    assert [(message.event_id, message.error, message.num_tries) for message in dead] == [
        ("2", "refused 2", 1),
        ("1", "refused 1", 1),
        ("0", "refused 0", 1),
    ]
    assert store.outbox.next_due("a") is None
    assert store.outbox.statuses()["a"].num_dead == 3
    assert store.outbox.drop(dead[0].id) == 1
    assert store.outbox.retry(dead[1].id) == 1
    assert store.outbox.retry(dead[1].id) == 0
    again = take(store)
    assert (again.event_id, again.num_tries, again.message_id) == ("1", 0, dead[1].message_id)
    assert time.time() - again.owed_since < 60
    assert store.outbox.retry() == 1
    assert store.outbox.drop() == 0


def test_it_is_bounded_and_counts_what_it_gives_up(
    store: EventStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outbox_module, "MAX_WAITING", 3)
    monkeypatch.setattr(outbox_module, "MAX_DEAD", 2)
    owe_all(store, "a")
    for number in range(5):
        store.add(description(f"{number}"))
    assert take(store).event_id == "2"
    status = store.outbox.statuses()["a"]
    assert (status.num_waiting, status.num_overflowed, status.num_dead) == (3, 2, 2)
    reasons = {str(message.error) for message in store.outbox.dead()}
    assert reasons == {f"overflow: more than 3 messages or {32 * 2**20} bytes waited"}
    assert caplog.text.count("output=a the oldest of its messages are dead letters") == 1
    for _ in range(3):
        store.outbox.failed(take(store), "refused", None)
    assert [message.event_id for message in store.outbox.dead()] == ["4", "3"]


def test_bytes_are_bounded_for_each_output(store: EventStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_WAITING_BYTES", 100_000)
    monkeypatch.setattr(outbox_module, "MAX_DEAD_BYTES", 50_000)
    owe_all(store, "a", "b")
    for number in range(30):
        store.add(description(f"{number}", text="word " * 2000))
        store.outbox.sent(take(store, "b"))
    statuses = store.outbox.statuses()
    assert (statuses["a"].num_waiting, statuses["a"].num_dead, statuses["b"].num_dead) == (9, 4, 0)
    assert [message.event_id for message in store.outbox.dead()] == ["20", "19", "18", "17"]
    assert store.outbox.retry() == 4
    store.add(description("30"))
    assert store.outbox.statuses()["a"].num_waiting == 9


def test_the_same_change_has_the_same_message_id_in_every_store(store: EventStore) -> None:
    """So that a receiver knows what it has; each change has one of its own."""
    ids = []
    for one in (store, EventStore()):
        owe_all(one, "a")
        one.change(change("ä/1", 0, "new"))
        one.change(change("ä/1", 1, "update"))
        one.change(change("ä/1", 2, "update"))
        one.add(description("ä/1"))
        one.end("ä/1")
        ids.append([row[0] for row in one._database.execute("SELECT message_id FROM outbox ORDER BY id")])
    one.close()
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 5
    assert all(message_id.isascii() for message_id in ids[0])


def test_a_clock_that_was_put_back_puts_nothing_off(store: EventStore) -> None:
    owe_all(store, "a")
    store.add(description("1"))
    store.outbox.failed(take(store), "refused", 600)
    assert store.outbox.next_due("a") is None
    store._database.execute("UPDATE outbox SET next_at = next_at + 40 * 86400")
    assert take(store).event_id == "1"
    assert store.outbox.due_in_s("a") == 0


def test_what_is_put_back_keeps_the_time_of_its_change(store: EventStore) -> None:
    owe_all(store, "a")
    store.add(description("1"))
    store._database.execute("UPDATE outbox SET created_at = 10, owed_since = 10")
    assert store.outbox.give_up("a", 20, "refused") == 1
    assert store.outbox.retry() == 1
    again = take(store)
    assert again.created_at == 10
    assert time.time() - again.owed_since < 60


def test_what_was_owed_to_an_output_that_is_gone(store: EventStore) -> None:
    owe_all(store, "a")
    store.add(description("1"))
    owe_all(store, "b")
    assert store.outbox.next_due("a") is None
    (letter,) = store.outbox.dead()
    assert (letter.output, letter.error) == ("a", "no output of this name is configured any more")
    assert set(store.outbox.statuses()) == {"a", "b"}


def test_no_more_is_kept_of_an_output_that_is_gone(
    store: EventStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    owe_all(store, "a")
    for number in range(5):
        store.add(description(f"{number}"))
    monkeypatch.setattr(outbox_module, "MAX_DEAD", 2)
    owe_all(store, "b")
    assert [message.event_id for message in store.outbox.dead()] == ["4", "3"]
