"""MQTT against real brokers: events, Home Assistant's discovery, and lost connections."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiomqtt
import msgspec
import pytest

from appliance.events import EventStore
from appliance.output_settings import MqttSettings
from appliance.outputs import delivery
from appliance.settings import SettingsError, load_settings
from appliance.tasks import end_all
from tests.appliance.descriptions import description
from tests.appliance.outputs.brokers import Broker, skip_without, usual_kind
from tests.appliance.outputs.conftest import RunOutputs, until_async
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def kind() -> str:
    return usual_kind()


@pytest.fixture
def broker(kind: str, tmp_path: Path) -> Iterator[Broker]:
    skip_without(kind)
    broker = Broker(kind, tmp_path)
    broker.start()
    yield broker
    broker.kill()


class Listener:
    """All that was published, the newest message by topic."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []

    @property
    def newest(self) -> dict[str, bytes]:
        return dict(self.messages)

    def events(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(body) for topic, body in self.messages if topic == "appliance/events"]

    def ids(self) -> list[str]:
        return [event["data"]["id"] for event in self.events()]


@asynccontextmanager
async def listening(broker: Broker) -> AsyncIterator[Listener]:
    listener = Listener()

    async def listen(client: aiomqtt.Client) -> None:
        async for message in client.messages:
            assert isinstance(message.payload, bytes)
            listener.messages.append((message.topic.value, message.payload))

    async with aiomqtt.Client("127.0.0.1", broker.port) as client:
        await client.subscribe("#", qos=1)
        task = asyncio.create_task(listen(client))
        yield listener
        await end_all([task])


@pytest.mark.parametrize("kind", ["mosquitto", "amqtt"])
async def test_events_and_discovery(store: EventStore, run_outputs: RunOutputs, broker: Broker) -> None:
    async with run_outputs(mqtt={"url": broker.url}):
        store.add(description("1", text="A person walks. " * 30), b"\xff\xd8jpeg")
        store.add(description("2", camera="yard", label="dog", text="A dog."))
        await until_async(lambda: store.outbox.statuses()["mqtt"].num_sent == 2)
        async with listening(broker) as late:
            await until_async(lambda: "appliance/yard/description" in late.newest and late.newest)
            kept = late.newest
            await until_async(lambda: len(late.newest) >= 9)
            kept = late.newest
    assert kept["appliance/status"] == b"online"
    assert kept["appliance/street/snapshot"] == b"\xff\xd8jpeg"
    state = msgspec.json.decode(kept["appliance/street/description"])
    assert len(state["text"]) == 255
    assert state["description"].startswith(state["text"][:-1])
    assert (state["id"], state["label"]) == ("1", "person")
    sensor = msgspec.json.decode(kept["homeassistant/sensor/appliance/yard_description/config"])
    assert sensor["state_topic"] == "appliance/yard/description"
    assert sensor["availability_topic"] == "appliance/status"
    assert sensor["unique_id"] == "appliance_yard_description"
    image = msgspec.json.decode(kept["homeassistant/image/appliance/street_snapshot/config"])
    assert image["image_topic"] == "appliance/street/snapshot"
    assert image["device"] == sensor["device"]


async def retained(broker: Broker) -> dict[str, bytes]:
    """All that the broker keeps; what is published now comes behind that."""
    kept: dict[str, bytes] = {}
    async with aiomqtt.Client("127.0.0.1", broker.port) as client:
        await client.subscribe("#", qos=1)
        await client.publish("end", b"end", qos=1)
        async for message in client.messages:
            if message.topic.value == "end":
                return kept
            if message.retain and isinstance(message.payload, bytes):
                kept[message.topic.value] = message.payload
    raise AssertionError("the broker is gone")


async def keeps(broker: Broker, *cameras: str) -> None:
    """Wait until the broker keeps a list of exactly these cameras."""
    wanted = msgspec.json.encode(sorted(cameras))
    async with asyncio.timeout(30):
        while (await retained(broker)).get("appliance/cameras") != wanted:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["mosquitto", "amqtt"])
async def test_a_camera_that_is_removed_is_taken_back(
    store: EventStore, run_outputs: RunOutputs, broker: Broker
) -> None:
    """Its entities, picture and words go, and no last event brings them back; one that comes is told."""
    store.add(description("1"), b"jpeg")
    async with run_outputs(mqtt={"url": broker.url}) as outputs:
        await until_async(lambda: not store.outbox.statuses()["mqtt"].num_waiting)
        await keeps(broker, "street")
        assert len([topic for topic in await retained(broker) if "street" in topic]) == 4
        outputs.change_cameras(["yard"])
        await keeps(broker, "yard")
        store.add(description("2"), b"last words")
        await until_async(lambda: store.outbox.statuses()["mqtt"].num_sent == 1)
        kept = await retained(broker)
        assert not [topic for topic in kept if "street" in topic]
        assert "homeassistant/sensor/appliance/yard_description/config" in kept
        outputs.change_cameras(["street"])
        await keeps(broker, "street")
        kept = await retained(broker)
        assert kept["appliance/street/snapshot"] == b"last words"
        assert not [topic for topic in kept if "yard" in topic]


async def test_a_camera_that_was_removed_before_the_start_is_taken_back(
    store: EventStore, run_outputs: RunOutputs, broker: Broker
) -> None:
    """By the broker's own list; what an `ingest` elsewhere has told of stays."""
    mqtt = {"url": broker.url, "cameras": ["street", "yard", "elsewhere"]}
    async with run_outputs(cameras=["street", "yard", "not wanted"], mqtt=mqtt):
        await keeps(broker, "street", "yard")
        store.add(description("1", camera="elsewhere"))
        await until_async(lambda: store.outbox.statuses()["mqtt"].num_sent == 1)
    assert not [topic for topic in await retained(broker) if "not wanted" in topic]
    async with run_outputs(cameras=["street"], mqtt=mqtt):
        await keeps(broker, "street")
        kept = await retained(broker)
    assert not [topic for topic in kept if "yard" in topic]
    for camera in ("street", "elsewhere"):
        assert f"homeassistant/sensor/appliance/{camera}_description/config" in kept


async def test_a_list_that_is_none_is_written_anew(
    store: EventStore, run_outputs: RunOutputs, broker: Broker
) -> None:
    async with aiomqtt.Client("127.0.0.1", broker.port) as client:
        await client.publish("appliance/cameras", b"{junk", qos=1, retain=True)
    async with run_outputs(mqtt={"url": broker.url}):
        await keeps(broker, "street")


async def test_listeners_hear_every_event_and_the_goodbye(
    store: EventStore, run_outputs: RunOutputs, broker: Broker
) -> None:
    async with listening(broker) as listener:
        async with run_outputs(mqtt={"url": broker.url, "send": ["described", "failed"], "snapshots": False}):
            store.add(description("1"), b"jpeg")
            store.add(description("2", text=None, error="the engine failed"))
            await until_async(lambda: listener.ids() == ["1", "2"])
        await until_async(lambda: listener.newest["appliance/status"] == b"offline")
    assert [event["type"] for event in listener.events()] == ["event.described", "event.failed"]
    assert "appliance/street/snapshot" not in listener.newest
    assert not [topic for topic in listener.newest if "/image/" in topic]


async def test_a_broker_that_is_killed_and_comes_back(
    store: EventStore, run_outputs: RunOutputs, broker: Broker
) -> None:
    """Every event comes at least once; the entities are told again to a broker that forgot them."""
    seen: set[str] = set()
    async with run_outputs(mqtt={"url": broker.url, "timeout_s": 2}):
        for round_number in range(3):
            async with listening(broker) as listener:
                await until_async(lambda heard=listener: heard.newest.get("appliance/status") == b"online")
                assert "homeassistant/sensor/appliance/street_description/config" in listener.newest
                store.add(description(f"before {round_number}"))
                await until_async(lambda heard=listener, n=round_number: f"before {n}" in heard.ids())
                seen |= set(listener.ids())
            broker.kill()
            store.add(description(f"during {round_number}"))
            await asyncio.sleep(0.1)
            broker.start()
        async with listening(broker) as listener:
            await until_async(lambda: not store.outbox.statuses()["mqtt"].num_waiting)
    assert seen >= {"before 0", "before 1", "before 2"}
    assert store.outbox.statuses()["mqtt"].num_sent == 6
    assert not store.outbox.dead()


async def test_the_newest_description_stays_the_newest(
    store: EventStore, run_outputs: RunOutputs, broker: Broker
) -> None:
    """Whatever is sent late, and to a broker that has forgotten all; and no label that is not wanted."""
    store.outbox.connect({"mqtt": lambda kind, body: kind == "described" and body["label"] == "person"})
    for name in ("old", "new"):
        store.add(description(name), name.encode())
    late = store.outbox.next_due("mqtt")
    assert late is not None
    store.outbox.failed(late, "refused", None)
    store.end("old")
    store.add(description("other", label="dog"), b"other")
    async with run_outputs(mqtt={"url": broker.url, "labels": ["person"]}):
        await until_async(lambda: store.outbox.statuses()["mqtt"].num_sent == 1)
        store.outbox.retry()
        store.wake_followers()
        await until_async(lambda: store.outbox.statuses()["mqtt"].num_sent == 2)
        async with listening(broker) as listener:
            await until_async(lambda: "appliance/street/snapshot" in listener.newest)
            await until_async(lambda: "appliance/street/description" in listener.newest)
        assert msgspec.json.decode(listener.newest["appliance/street/description"])["id"] == "new"
        assert listener.newest["appliance/street/snapshot"] == b"new"
        broker.kill()
        broker.start()
        async with listening(broker) as listener:
            await until_async(lambda: "appliance/street/description" in listener.newest)
        assert msgspec.json.decode(listener.newest["appliance/street/description"])["id"] == "new"


async def test_a_broker_that_is_away_for_too_long(store: EventStore, run_outputs: RunOutputs) -> None:
    """Dead letters as of a webhook, with the reason; no message waits without end."""
    async with run_outputs(
        mqtt={"url": f"mqtt://127.0.0.1:{free_port()}", "timeout_s": 0.1, "give_up_after_s": 0.3}
    ):
        store.add(description("1"))
        store.add(description("2"))
        await until_async(lambda: store.outbox.statuses()["mqtt"].num_dead == 2)
    assert all(
        "no connection to 127.0.0.1" in str(letter.error) and "refused" in str(letter.error)
        for letter in store.outbox.dead()
    )


async def test_what_waits_goes_as_soon_as_the_broker_is_there(
    store: EventStore, run_outputs: RunOutputs, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the pause between two tries has become."""
    broker.kill()
    async with run_outputs(mqtt={"url": broker.url, "timeout_s": 0.5}):
        store.add(description("1"))
        await until_async(lambda: store.outbox._select("num_tries > 0"))
        monkeypatch.setattr(delivery, "pause_after", lambda *_: 600.0)
        (waiting,) = store.outbox._select("1")
        await until_async(lambda: store.outbox._select("num_tries > ?", waiting.num_tries))
        broker.start()
        await until_async(lambda: store.outbox.statuses()["mqtt"].num_sent == 1)


async def test_the_broker_says_goodbye_for_an_appliance_that_was_killed(broker: Broker) -> None:
    """The last will: kill -9 leaves nobody to say `offline`."""
    code = (
        "import asyncio, sys; from contextlib import closing\n"
        "from appliance.events import EventStore; from appliance.output_settings import OutputSettings\n"
        "from appliance.outputs.runner import Outputs\n"
        "outputs = Outputs(OutputSettings(mqtt={'url': sys.argv[1]}), EventStore(), ['street'])\n"
        "asyncio.run(outputs.run())"
    )
    process = subprocess.Popen([sys.executable, "-c", code, broker.url], cwd=ROOT)
    try:
        async with listening(broker) as listener:
            await until_async(lambda: listener.newest.get("appliance/status") == b"online")
            os.kill(process.pid, signal.SIGKILL)
            await until_async(lambda: listener.newest["appliance/status"] == b"offline")
    finally:
        process.kill()
        process.wait()


async def test_a_password_that_is_wrong_is_said_without_it(
    store: EventStore, run_outputs: RunOutputs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    skip_without("mosquitto")
    broker = Broker("mosquitto", tmp_path, user="john.doe", password="p@/?#:w")
    broker.start()
    wrong = MqttSettings(url=broker.url, username="john.doe", password="p@/?#:hush")  # type: ignore[arg-type]
    right = wrong.model_dump() | {"password": "p@/?#:w"}
    try:
        store.outbox.connect({"mqtt": lambda kind, body: True})
        store.add(description("1"))
        async with run_outputs(mqtt=wrong):
            await until_async(lambda: "has no connection" in caplog.text)
        assert store.outbox.statuses()["mqtt"].num_waiting == 1
        async with run_outputs(mqtt=right):
            await until_async(lambda: store.outbox.statuses()["mqtt"].num_sent == 1)
    finally:
        broker.kill()
    assert f"127.0.0.1:{broker.port}" in caplog.text
    assert not [word for word in ("hush", "p@", "john") if word in caplog.text]


@pytest.mark.parametrize(
    ("mqtt", "problem"),
    [
        ("{url: 'http://hush'}", "outputs.mqtt.url: must be mqtt://HOST"),
        ("{url: 'mqtt://doe:hush@a'}", "outputs.mqtt.url: must not hold a user or password"),
        ("{url: 'mqtt://a:hush'}", "outputs.mqtt.url: "),
        ("{url: 'mqtt://a', prefix: 'a/#'}", "outputs.mqtt.prefix: must be levels"),
        ("{url: 'mqtt://a', password: x}", "outputs.mqtt.password: belongs to a user: give `username` too"),
        ("{url: 'mqtt://a', ca_file: ca.pem}", "outputs.mqtt.ca_file: is for TLS: the url has to begin with"),
        ("{url: 'mqtt://a:99999'}", "outputs.mqtt.url: the port must be a number from 1 to 65535"),
        ("{url: 'mqtt://a', qos: 1}", "outputs.mqtt.qos: unknown key; allowed here: ca_file, "),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, mqtt: str, problem: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"outputs: {{mqtt: {mqtt}}}")
    with pytest.raises(SettingsError) as caught:
        load_settings(path)
    assert problem in str(caught.value)
