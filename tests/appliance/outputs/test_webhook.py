"""Webhooks against a real receiver: signed, in order, again until taken, and nowhere a secret."""

import base64
import hashlib
import hmac
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from email.utils import formatdate as http_date
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance.events import EventStore, EventStoreError
from appliance.output_settings import OutputSettings, WebhookSettings
from appliance.outputs import delivery, messages, runner
from appliance.outputs import webhook as webhook_module
from appliance.outputs.outbox import Message
from appliance.settings import Settings, SettingsError, load_settings, to_json
from tests.appliance.descriptions import description
from tests.appliance.outputs.conftest import RunOutputs, until_async
from tests.appliance.outputs.receiver import Post, Receiver, receiving
from tests.appliance.outputs.test_outbox import change

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def webhook(receiver: Receiver, **settings: Any) -> dict[str, Any]:
    return {"url": f"{receiver.url}/hook?token=hush", "timeout_s": 5, **settings}


async def sent(store: EventStore, number: int, name: str = "webhook") -> None:
    await until_async(lambda: store.outbox.statuses()[name].num_sent >= number)


async def test_an_event_is_posted_and_signed(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver
) -> None:
    async with run_outputs(
        webhooks=[webhook(receiver, secret=SECRET, headers={"Authorization": "Bearer x"})]
    ):
        store.add(description("1", source="rtsp://john.doe:p@ss@10.0.0.1/"))
        await sent(store, 1)
    (post,) = receiver.posts
    body = msgspec.json.decode(post.body)
    assert (body["type"], body["data"]["description"]) == ("event.described", "A person walks.")
    assert b"john.doe" not in post.body
    assert (post.path, post.headers["authorization"]) == ("/hook?token=hush", "Bearer x")
    message_id, timestamp = post.headers["webhook-id"], post.headers["webhook-timestamp"]
    assert abs(time.time() - int(timestamp)) < 60
    signed = f"{message_id}.{timestamp}.".encode() + post.body
    digest = hmac.new(b"0123456789abcdef01234567", signed, hashlib.sha256).digest()
    assert post.headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"


def test_the_signature_is_the_specifications() -> None:
    """The example of the Standard Webhooks specification."""
    from appliance.outputs.signing import signed_headers, signing_key

    key = signing_key("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = signed_headers(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


async def test_it_is_sent_again_until_it_is_taken(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver
) -> None:
    """The same message id each time, a new timestamp; an event's changes stay in order."""
    refusals = [503, 500, 429, 404]
    receiver.answer = lambda post: (refusals.pop() if refusals else 204, {})
    async with run_outputs(webhooks=[webhook(receiver, send=["new", "described", "end"])]):
        store.change(change("1", 0, "new"))
        store.add(description("1"))
        store.change(change("1", 1, "end"))
        await sent(store, 3)
    kinds = [msgspec.json.decode(post.body)["type"] for post in receiver.posts]
    assert kinds == ["event.new"] * 5 + ["event.described", "event.end"]
    assert len({post.headers["webhook-id"] for post in receiver.posts}) == 3
    assert not {"webhook-signature"} & set(receiver.posts[0].headers)


async def test_a_bad_event_does_not_hold_up_the_others(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver
) -> None:
    """Whoever is refused for too long is a dead letter, with the reason; put back, it is sent again."""
    receiver.answer = lambda post: (400 if post.data["id"] == "bad" else 200, {})
    async with run_outputs(webhooks=[webhook(receiver, give_up_after_s=1.0)]):
        for name in ("bad", "1", "2"):
            store.add(description(name))
        await sent(store, 2)
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
    answers = [(429, {"Retry-After": "1"}), (503, {"Retry-After": http_date(time.time() + 2, usegmt=True)})]
    receiver.answer = lambda post: answers.pop() if answers else (200, {})
    async with run_outputs(webhooks=[webhook(receiver)]):
        store.add(description("1"))
        store.add(description("2"))
        await sent(store, 2)
    first, second, third = (post.at for post in receiver.posts[:3])
    assert second - first > 0.9
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
        await until_async(lambda: store.outbox.statuses()["webhook"].num_dead == 50, 10)
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
    assert (letter.event_id, str(letter.error).startswith("LookupError in test_webhook.py:")) == ("bad", True)
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


async def test_a_redirect_is_not_followed(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver
) -> None:
    """A3: the receiver cannot send the appliance to an address of its choice."""
    with receiving() as elsewhere:
        receiver.answer = lambda post: (307, {"Location": elsewhere.url})
        async with run_outputs(webhooks=[webhook(receiver, give_up_after_s=0.001)]):
            store.add(description("1"))
            await until_async(store.outbox.dead)
    assert not elsewhere.posts
    assert "redirects are not followed" in str(store.outbox.dead()[0].error)


async def test_a_receiver_that_comes_back(
    store: EventStore, run_outputs: RunOutputs, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost while it is away, one line says so, and no secret is told (A2)."""
    with receiving() as receiver:
        port = int(receiver.url.rpartition(":")[2])
    url = f"http://john.doe:p%40ss@127.0.0.1:{port}/T0/hush?token=hush"
    async with run_outputs(webhooks=[{"url": url, "headers": {"X-Key": "hush"}}]):
        for number in range(5):
            store.add(description(f"{number}"))
        await until_async(lambda: any("cannot be reached" in record.message for record in caplog.records))
        with receiving(port) as receiver:
            await sent(store, 5)
            store.add(description("5"))
            await sent(store, 6)
    assert sorted(receiver.ids) == ["0", "1", "2", "3", "4", "5"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert not [text for text in caplog.text.split() if "hush" in text or "doe" in text or "p%40ss" in text]


async def test_a_disk_that_is_full_for_a_while(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was confirmed but could not be noted down comes again; what could not be stored is refused."""
    monkeypatch.setattr(delivery, "LOOK_AGAIN_S", 0.05)
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
        await until_async(lambda: receiver.ids.count("3") > 1)
        store._database.execute("PRAGMA query_only = OFF")
        await sent(store, 2)
    assert set(receiver.ids) == {"2", "3"}


async def test_a_receiver_that_hangs_or_talks_without_end(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver
) -> None:
    def hang(post: Post) -> tuple[int, dict[str, str]]:
        time.sleep(0.5)
        return 200, {}

    receiver.answer = hang
    async with run_outputs(webhooks=[webhook(receiver, timeout_s=0.1, give_up_after_s=0.01)]):
        store.add(description("1"))
        await until_async(store.outbox.dead)
    assert "did not answer within 0.1 s" in str(store.outbox.dead()[0].error)


async def test_two_receivers_do_not_wait_for_each_other(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver
) -> None:
    nowhere = {"url": "http://127.0.0.1:9/", "name": "nowhere"}
    async with run_outputs(webhooks=[nowhere, webhook(receiver)]):
        store.add(description("1"))
        await sent(store, 1)
        await until_async(lambda: store.outbox.statuses()["nowhere"].num_waiting)


@pytest.mark.parametrize(
    ("webhooks", "problem"),
    [
        ("{url: 'ftp://hush/'}", "outputs.webhooks.0.url: must be http:// or https:// and a host"),
        ("{url: 'http://hush', secret: 'whsec_?hush'}", "secret: what follows whsec_ has to be base64"),
        ("{url: 'http://hush', secret: ''}", "outputs.webhooks.0.secret: must not be empty"),
        ("{url: 'http://hush', headers: {'a b': hush}}", "'a b' is no header name"),
        ("{url: 'http://hush', headers: {a: \"hu\\nsh\"}}", "the value of a must be printable ASCII"),
        ("{url: 'http://hush', send: [sometimes]}", "outputs.webhooks.0.send.0: "),
        ("{url: 'http://hush', name: mqtt}", "outputs.webhooks.0.name: "),
        ("{url: 'http://a'}, {url: 'http://b'}", "two webhooks are called 'webhook'"),
        ("{nonsense: 1}", "outputs.webhooks.0.nonsense: unknown key; allowed here: cameras, "),
        ("{url: 'http://a:99999/hush'}", "outputs.webhooks.0.url: the port must be a number from 1 to 65535"),
        ("{url: 'http://a:hush/'}", "outputs.webhooks.0.url: the port must be a number from 1 to 65535"),
        ("{url: 'http://a:0/hush'}", "outputs.webhooks.0.url: the port must be a number from 1 to 65535"),
        ('{url: "http://a/hu\\nsh"}', "outputs.webhooks.0.url: "),
        ("{url: 'http://[::1/hush'}", "outputs.webhooks.0.url: "),
        ("{url: 'http://hush', headers: {Content-Length: '1'}}", "Content-Length is the sender's own"),
    ],
)
def test_bad_settings_are_named_without_their_secrets(tmp_path, webhooks: str, problem: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"outputs: {{webhooks: [{webhooks}]}}")
    with pytest.raises(SettingsError) as caught:
        load_settings(path)
    assert problem in str(caught.value)
    assert "hush" not in str(caught.value)


def test_secrets_are_hidden_but_reach_the_child(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "outputs: {webhooks: [{url: 'http://a/hush1', secret: hush2, headers: {a: hush3}}],"
        " mqtt: {url: 'mqtt://a', password: hush4}}"
    )
    settings = load_settings(path)
    assert "hush" not in repr(settings)
    again = Settings.model_validate_json(to_json(settings))
    assert again.outputs == settings.outputs
    assert isinstance(again.outputs, OutputSettings)
    assert to_json(settings).count(b"hush") == 4
