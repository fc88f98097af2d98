"""Receivers that are away, refuse, hang or never were: nothing is lost, and nobody waits for another."""

import subprocess
import sys
import time
from email.utils import formatdate as http_date
from pathlib import Path

import pytest

from appliance.events import EventStore, EventStoreError
from appliance.output_settings import WebhookSettings
from appliance.outputs import delivery, messages, runner
from appliance.outputs import webhook as webhook_module
from appliance.outputs.outbox import Message
from tests.appliance.descriptions import description
from tests.appliance.outputs.conftest import RunOutputs, sent, until_async, webhook
from tests.appliance.outputs.receiver import Post, Receiver


async def test_a_bad_event_does_not_hold_up_the_others(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver
) -> None:
    """Whoever is refused for too long is a dead letter, with the reason; put back, it is sent again."""
    receiver.answer = lambda post: (400 if post.data["id"] == "bad" else 200, {})
    settings = webhook(receiver, give_up_after_s=600.0)
    async with run_outputs(webhooks=[settings]):
        for name in ("bad", "1", "2"):
            store.add(description(name))
        await sent(store, 2)
        await until_async(lambda: receiver.ids.count("bad") > 1)
        with store.outbox._lock:
            store._database.execute("UPDATE outbox SET owed_since = owed_since - 600")
        await until_async(store.outbox.dead)
        (letter,) = store.outbox.dead()
        assert (letter.event_id, letter.num_tries > 1) == ("bad", True)
        assert letter.error == f"{receiver.url} answered 400"
        receiver.answer = lambda post: (200, {})
        store.outbox.retry()
        store.wake_followers()
        await sent(store, 3)
    assert receiver.ids[-1] == "bad"
    assert not store.outbox.dead()


async def test_a_receiver_that_is_back_gets_what_was_put_off_at_once(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver
) -> None:
    """In an outage only the oldest is tried, and the first that is taken calls for the others."""
    receiver.answer = lambda post: (400, {"Retry-After": "300"})
    async with run_outputs(webhooks=[webhook(receiver)]):
        store.add(description("put off"))
        await until_async(lambda: receiver.posts)
        receiver.answer = lambda post: (503, {})
        store.add(description("1"))
        store.add(description("2"))
        await until_async(lambda: receiver.ids.count("1") > 3)
        assert "2" not in receiver.ids
        receiver.answer = lambda post: (200, {})
        await sent(store, 3)
    assert receiver.ids[-3:] == ["1", "put off", "2"]


async def test_a_receiver_says_when_it_wants_to_be_asked_again(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver
) -> None:
    """Nothing at all is sent before that, whichever form it has."""
    wishes = [(503, lambda now: http_date(int(now) + 2, usegmt=True)), (429, lambda now: "1")]

    def answer(post: Post) -> tuple[int, dict[str, str]]:
        status, wish = wishes.pop(0) if wishes else (200, str)
        return status, {"Retry-After": wish(post.at)}

    receiver.answer = answer
    async with run_outputs(webhooks=[webhook(receiver)]):
        store.add(description("1"))
        store.add(description("2"))
        await sent(store, 2)
    first, second, third = (post.at for post in receiver.posts[:3])
    assert second > int(first) + 1.9
    assert third - second > 0.9


async def test_a_receiver_that_is_gone_wants_nothing_more(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver
) -> None:
    receiver.answer = lambda post: (410, {})
    async with run_outputs(webhooks=[webhook(receiver)]):
        store.add(description("1"))
        await until_async(store.outbox.dead)
    assert receiver.ids == ["1"]
    assert "answered 410" in str(store.outbox.dead()[0].error)


async def test_all_that_is_too_old_is_given_up_together(
    store: EventStore, run_outputs: RunOutputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an outage one message is tried at a time, with pauses; the others grow old as well."""
    monkeypatch.setattr(delivery, "FIRST_PAUSE_S", 0.5)
    monkeypatch.setattr(delivery, "LONGEST_PAUSE_S", 60)
    async with run_outputs(webhooks=[{"url": "http://127.0.0.1:9/", "give_up_after_s": 0.3}]):
        for number in range(50):
            store.add(description(f"{number}"))
        await until_async(lambda: store.outbox.statuses()["webhook"].num_dead == 50)
    assert all("cannot be reached" in str(letter.error) for letter in store.outbox.dead())


async def test_what_cannot_be_sent_ends_neither_the_others_nor_the_appliance(
    store: EventStore,
    run_outputs: RunOutputs,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fault of ours, or of a library, in one message: it is tried again, counted and at last given up."""

    def break_one(message: Message) -> bytes:
        if message.event_id == "bad":
            raise LookupError("hush")
        return messages.told(message)

    monkeypatch.setattr(webhook_module, "told", break_one)
    async with run_outputs(webhooks=[webhook(receiver, give_up_after_s=0.2)]):
        for name in ("bad", "1", "2"):
            store.add(description(name))
        await sent(store, 2)
        await until_async(store.outbox.dead)
    (letter,) = store.outbox.dead()
    assert (letter.event_id, str(letter.error).startswith("LookupError in test_delivery.py:")) == (
        "bad",
        True,
    )
    assert "hush" not in caplog.text


async def test_a_receiver_that_refuses_everything_is_not_asked_for_each(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a wrong path: after some refusals in a row there are pauses; one that is taken ends them."""
    monkeypatch.setattr(delivery, "FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(delivery, "LONGEST_PAUSE_S", 0.2)
    receiver.answer = lambda post: (404, {"Retry-After": "60"})
    async with run_outputs(webhooks=[webhook(receiver)]):
        for number in range(40):
            store.add(description(f"{number}"))
        await until_async(lambda: len(receiver.posts) >= delivery.MOST_REFUSED + 2)
        assert receiver.posts[-1].at - receiver.posts[-2].at > 0.14
        receiver.answer = lambda post: (200, {})
        await sent(store, 40)
    assert len(set(receiver.ids)) == 40


async def test_a_clock_that_jumped_gives_nothing_up(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By days, while the receiver is away: what waits still does when it is back, and the clock too."""
    receiver.answer = lambda post: (503, {})
    real, ahead_s = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s[0])
    async with run_outputs(webhooks=[webhook(receiver)]):
        store.add(description("1"))
        store.add(description("2"))
        await until_async(lambda: len(receiver.posts) > 1)
        ahead_s[0] = 40 * 86_400.0
        num_before = len(receiver.posts)
        await until_async(lambda: len(receiver.posts) > num_before + 3)
        ahead_s[0] = 0.0
        receiver.answer = lambda post: (200, {})
        await sent(store, 2)
    assert not store.outbox.dead()


async def test_a_receiver_that_cannot_be_set_up_ends_no_other(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(webhook_module.Webhook):
        def __init__(self, settings: WebhookSettings) -> None:
            if settings.name == "broken":
                raise FileNotFoundError("the certificates of this machine")
            super().__init__(settings)

    monkeypatch.setattr(runner, "Webhook", Broken)
    async with run_outputs(webhooks=[webhook(receiver, name="broken"), webhook(receiver)]):
        store.add(description("1"))
        await sent(store, 1)
    assert store.outbox.statuses()["broken"].num_waiting == 1


async def test_a_kill_in_the_middle_loses_no_message(tmp_path: Path, receiver: Receiver) -> None:
    """What was on its way comes again, under the same id."""
    code = (
        "import asyncio, sys; from pathlib import Path; from appliance.events import EventStore\n"
        "from appliance.output_settings import OutputSettings; from appliance.outputs.runner import Outputs\n"
        "from tests.appliance.descriptions import description\n"
        "store = EventStore(Path(sys.argv[1]))\n"
        "outputs = Outputs(OutputSettings(webhooks=[{'url': sys.argv[2]}]), store, ())\n"
        "[store.add(description(f'{number}')) for number in range(30)]\n"
        "asyncio.run(outputs.run())"
    )

    def hang(post: Post) -> tuple[int, dict[str, str]]:
        time.sleep(0.02)
        return 200, {}

    receiver.answer = hang
    command = [sys.executable, "-c", code, str(tmp_path / "events.db"), receiver.url]
    for number in (5, 9, 20, 30):
        process = subprocess.Popen(command, cwd=Path(__file__).parents[3])
        try:
            await until_async(lambda least=number: len(set(receiver.ids)) >= least, 120)
        finally:
            process.kill()
            process.wait()
    ids = [(post.data["id"], post.headers["webhook-id"]) for post in receiver.posts]
    assert {event_id for event_id, _ in ids} == {f"{number}" for number in range(30)}
    assert len(set(ids)) == 30
    assert len(ids) <= 30 + 3


async def test_a_disk_that_is_full_for_a_while(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be stored is refused; what was confirmed is not sent again, noted down or not."""
    monkeypatch.setattr(delivery, "LOOK_AGAIN_S", 0.05)
    noting, sent_now = list[str](), store.outbox.sent
    monkeypatch.setattr(store.outbox, "sent", lambda one: (noting.append(one.event_id), sent_now(one)))
    store.add(description("0"))
    store._database.execute("PRAGMA query_only = ON")
    with pytest.raises(EventStoreError, match="the event 1 cannot be stored"):
        store.add(description("1"))
    store._database.execute("PRAGMA query_only = OFF")
    async with run_outputs(webhooks=[webhook(receiver)]):
        store.add(description("2"))
        await sent(store, 1)
        store.add(description("3"))
        store._database.execute("PRAGMA query_only = ON")
        await until_async(lambda: noting.count("3") > 3)
        store._database.execute("PRAGMA query_only = OFF")
        await sent(store, 2)
    assert receiver.ids == ["2", "3"]


async def test_two_receivers_do_not_wait_for_each_other(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver
) -> None:
    nowhere = {"url": "http://127.0.0.1:9/", "name": "nowhere"}
    async with run_outputs(webhooks=[nowhere, webhook(receiver)]):
        store.add(description("1"))
        await sent(store, 1)
        await until_async(lambda: store.outbox.statuses()["nowhere"].num_waiting)
