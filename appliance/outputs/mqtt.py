"""Events to an MQTT broker, on one connection that is made again whenever it is lost."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiomqtt
import msgspec

from appliance.output_settings import MqttSettings
from appliance.outputs import discovery
from appliance.outputs.delivery import DeliveryError, pause_after
from appliance.outputs.messages import told
from appliance.outputs.outbox import Message

logger = logging.getLogger(__name__)

_PORTS = {"mqtt": 1883, "mqtts": 8883}
_KEEP_ALIVE_S = 20
_SHOWN = ("id", "label", "zones", "captured_at", "described_at", "state", "error")

Shown = tuple[dict[str, Any], bytes | None]
ShownReader = Callable[[str], Shown | None]


class MqttOutput:
    """Publishes with QoS 1; `run` keeps the connection, and `send` waits for it.

    `cameras` are announced to Home Assistant at each connection, others with their first event. `shown` gives
    what a camera shows, an event and its picture; the broker is told at each connection and description.
    """

    name = "mqtt"

    def __init__(self, settings: MqttSettings, cameras: Sequence[str], shown: ShownReader) -> None:
        self.give_up_after_s = settings.give_up_after_s
        self._settings = settings
        self._announced = set(cameras)
        self._shown = shown
        self._client: aiomqtt.Client | None = None
        self._is_connected = asyncio.Event()
        self._problem = "not connected yet"
        parts = urlsplit(settings.url)
        self._host, self._port = str(parts.hostname), parts.port or _PORTS[parts.scheme]
        self._tls = _tls_context(settings) if parts.scheme == "mqtts" else None

    async def run(self) -> None:
        """Connect, and connect again, until cancelled."""
        num_failures = 0
        while True:
            try:
                async with self._new_client() as client:
                    if num_failures:
                        logger.warning("output=mqtt is connected again to %s:%s", self._host, self._port)
                    num_failures = 0
                    await self._stay(client)
            except (aiomqtt.MqttError, OSError) as error:
                self._problem = str(error)
                if num_failures == 0:
                    logger.warning(
                        "output=mqtt has no connection to %s:%s: %s", self._host, self._port, error
                    )
            await asyncio.sleep(min(pause_after(num_failures), 30.0))
            num_failures += 1

    async def send(self, message: Message) -> None:
        """Publish one change and, when it is a description, the camera's newest state and picture.

        Raises `DeliveryError` without a connection within `timeout_s`, and when it is lost before the broker
        has confirmed.
        """
        await self.rest(self._settings.timeout_s)
        client = self._client
        if client is None:
            text = f"no connection to {self._host}:{self._port}: {self._problem}"
            raise DeliveryError(text, is_outage=True)
        try:
            await self._publish_event(client, message)
        except aiomqtt.MqttError as error:
            raise DeliveryError(f"{self._host}:{self._port}: {error}") from None

    async def rest(self, pause_s: float) -> None:
        """Wait so long for a connection."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_connected.wait(), pause_s)

    def _new_client(self) -> aiomqtt.Client:
        settings = self._settings
        status = discovery.status_topic(settings)
        return aiomqtt.Client(
            self._host,
            self._port,
            username=settings.username,
            password=settings.password.get_secret_value() if settings.password else None,
            tls_context=self._tls,
            timeout=settings.timeout_s,
            keepalive=_KEEP_ALIVE_S,
            will=aiomqtt.Will(status, "offline", qos=1, retain=True),
        )

    async def _stay(self, client: aiomqtt.Client) -> None:
        """Announce everything, then let messages through until the connection is lost (`MqttError`)."""
        settings = self._settings
        for camera in sorted(self._announced):
            await self._announce(client, camera)
            await self._show(client, camera)
        await self._publish(client, discovery.status_topic(settings), "online")
        self._client = client
        self._is_connected.set()
        try:
            async for _ in client.messages:
                pass
        finally:
            self._client = None
            self._is_connected.clear()
            # why: the broker says `offline` only when nobody says goodbye.
            with suppress(aiomqtt.MqttError):
                await self._publish(client, discovery.status_topic(settings), "offline")

    async def _publish_event(self, client: aiomqtt.Client, message: Message) -> None:
        settings, event = self._settings, msgspec.json.decode(message.body)
        camera = event["camera"]
        if camera not in self._announced:
            await self._announce(client, camera)
            self._announced.add(camera)
        if message.kind == "described":
            await self._show(client, camera)
        await client.publish(discovery.events_topic(settings), told(message), qos=1)

    async def _show(self, client: aiomqtt.Client, camera: str) -> None:
        shown = await asyncio.to_thread(self._shown, camera)
        if shown is None:
            return
        event, jpeg = shown
        if jpeg is not None:
            await self._publish(client, discovery.snapshot_topic(self._settings, camera), jpeg)
        await self._publish(client, discovery.description_topic(self._settings, camera), _state(event))

    async def _announce(self, client: aiomqtt.Client, camera: str) -> None:
        for topic, fields in discovery.discovery_messages(self._settings, camera).items():
            await self._publish(client, topic, msgspec.json.encode(fields))

    async def _publish(self, client: aiomqtt.Client, topic: str, payload: str | bytes) -> None:
        await client.publish(topic, payload, qos=1, retain=True)


def _state(event: dict[str, Any]) -> bytes:
    text = event["description"]
    short = text if len(text) <= discovery.MAX_STATE else f"{text[: discovery.MAX_STATE - 1]}…"
    return msgspec.json.encode({"text": short, "description": text} | {key: event.get(key) for key in _SHOWN})


def _tls_context(settings: MqttSettings) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"outputs.mqtt.ca_file: {settings.ca_file}: cannot be used: {error}") from None
