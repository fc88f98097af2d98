"""The cameras that a broker is told of: announced to Home Assistant, and taken back when they are gone."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import aiomqtt
import msgspec

from appliance.output_settings import MqttSettings
from appliance.outputs import discovery

_SHOWN = ("id", "label", "zones", "captured_at", "described_at", "state", "error")

Shown = tuple[dict[str, Any], bytes | None]
ShownReader = Callable[[str], Shown | None]


class Announcer:
    """Tells a broker of `cameras`, and of others (of an `ingest` elsewhere) with their first event.

    `shown` gives what a camera shows, an event and its picture. The broker keeps a list of `cameras`, so that
    those are taken back too which were removed while nobody was connected, or before a start.
    """

    def __init__(self, settings: MqttSettings, cameras: Sequence[str], shown: ShownReader) -> None:
        self._settings = settings
        self._shown = shown
        self._cameras = self._wanted(cameras)
        self._others: set[str] = set()
        self._gone: set[str] = set()
        self._due: set[str] = set()
        self._is_changed = asyncio.Event()

    def change(self, cameras: Sequence[str]) -> None:
        """The cameras are others now."""
        wanted = self._wanted(cameras)
        self._lose(self._cameras - wanted)
        self._cameras = wanted
        self._gone -= wanted
        self._is_changed.set()

    async def connect(self, client: aiomqtt.Client) -> None:
        """Tell all to a broker that may have forgotten it, or remember more; raises `aiomqtt.MqttError`."""
        self._lose(await self._listed(client) - self._cameras)
        await self._tell(client)

    async def follow(self, client: aiomqtt.Client) -> None:
        """Tell of cameras that come and go, until cancelled; raises `aiomqtt.MqttError`."""
        while True:
            await self._is_changed.wait()
            await self._tell(client)

    async def meet(self, client: aiomqtt.Client, camera: str) -> None:
        """A camera has an event; one that was removed is not announced for its last ones."""
        if camera not in self._cameras | self._others | self._gone:
            await self._announce(client, camera)
            self._others.add(camera)

    async def show(self, client: aiomqtt.Client, camera: str) -> None:
        """Publish what a camera shows now."""
        shown = None if camera in self._gone else await asyncio.to_thread(self._shown, camera)
        if shown is None:
            return
        event, jpeg = shown
        if jpeg is not None:
            await keep(client, discovery.snapshot_topic(self._settings, camera), jpeg)
        await keep(client, discovery.description_topic(self._settings, camera), _state(event))

    def _wanted(self, cameras: Sequence[str]) -> set[str]:
        chosen = self._settings.cameras
        return {name for name in cameras if chosen is None or name in chosen}

    def _lose(self, cameras: set[str]) -> None:
        self._gone |= cameras
        self._due |= cameras

    async def _listed(self, client: aiomqtt.Client) -> set[str]:
        """The cameras that the broker was told of before; none where it does not say."""
        topic, names = discovery.cameras_topic(self._settings), set[str]()
        if self._settings.discovery_prefix is None:
            return names
        await client.subscribe(topic, qos=1)
        # why: it comes back behind the list, also where there is none, and is not kept
        await client.publish(topic, b"", qos=1)
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                async for message in client.messages:
                    if not message.retain:
                        break
                    names = _names(message.payload)
        except TimeoutError:
            pass
        await client.unsubscribe(topic)
        return names

    async def _tell(self, client: aiomqtt.Client) -> None:
        self._is_changed.clear()
        due = set(self._due)
        for camera in sorted(due - self._cameras):
            for topic in discovery.camera_topics(self._settings, camera):
                await keep(client, topic, b"")
        self._due -= due
        for camera in sorted(self._cameras | self._others):
            await self._announce(client, camera)
            await self.show(client, camera)
        listed = msgspec.json.encode(sorted(self._cameras))
        await keep(client, discovery.cameras_topic(self._settings), listed)

    async def _announce(self, client: aiomqtt.Client, camera: str) -> None:
        for topic, fields in discovery.discovery_messages(self._settings, camera).items():
            await keep(client, topic, msgspec.json.encode(fields))


async def keep(client: aiomqtt.Client, topic: str, payload: str | bytes) -> None:
    """Publish what the broker is to keep; an empty payload makes it forget."""
    await client.publish(topic, payload, qos=1, retain=True)


def _names(payload: object) -> set[str]:
    try:
        return set(msgspec.json.decode(payload, type=list[str])) if isinstance(payload, bytes) else set()
    except msgspec.MsgspecError:
        return set()


def _state(event: dict[str, Any]) -> bytes:
    text = event["description"]
    short = text if len(text) <= discovery.MAX_STATE else f"{text[: discovery.MAX_STATE - 1]}…"
    return msgspec.json.encode({"text": short, "description": text} | {key: event.get(key) for key in _SHOWN})
