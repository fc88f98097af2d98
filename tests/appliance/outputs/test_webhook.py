"""Webhooks against a real receiver: signed, in order, again until taken, and nowhere a secret."""

import base64
import hashlib
import hmac
import logging
import time

import msgspec
import pytest

from appliance.events import EventStore
from appliance.output_settings import OutputSettings
from appliance.settings import Settings, SettingsError, load_settings, to_json
from tests.appliance.descriptions import description
from tests.appliance.outputs.conftest import RunOutputs, sent, until_async, webhook
from tests.appliance.outputs.receiver import Post, Receiver, receiving
from tests.appliance.outputs.test_outbox import change
from tests.ports import free_port

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()


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
    port = free_port()
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


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://127.0.0.1:9", "Connection refused"),
        ("http://nowhere.invalid", "not known"),
        ("https://{receiver}", "no TLS: WRONG_VERSION_NUMBER"),
    ],
)
async def test_why_a_receiver_cannot_be_reached(
    store: EventStore, run_outputs: RunOutputs, receiver: Receiver, address: str, reason: str
) -> None:
    """In the system's words, not in those of a library, which may repeat the URL."""
    url = address.format(receiver=receiver.url.removeprefix("http://"))
    async with run_outputs(webhooks=[{"url": f"{url}/hush", "give_up_after_s": 0.001}]):
        store.add(description("1"))
        await until_async(store.outbox.dead)
    error = str(store.outbox.dead()[0].error)
    assert error.startswith(f"{url} cannot be reached: ")
    assert error.endswith(reason)


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
        " mqtt: {url: 'mqtt://a', username: a, password: hush4}}"
    )
    settings = load_settings(path)
    assert "hush" not in repr(settings)
    again = Settings.model_validate_json(to_json(settings))
    assert again.outputs == settings.outputs
    assert isinstance(again.outputs, OutputSettings)
    assert to_json(settings).count(b"hush") == 4
