"""Events to an MQTT broker, on one connection that is made again whenever it is lost."""

import asyncio
import logging
import ssl
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import aiomqtt
import msgspec

from appliance.output_settings import MqttSettings
from appliance.outputs import discovery
from appliance.outputs.announcing import Announcer, ShownReader, keep
from appliance.outputs.delivery import DeliveryError, pause_after
from appliance.outputs.messages import told
from appliance.outputs.outbox import Message
from appliance.tasks import run_beside

logger = logging.getLogger(__name__)

_PORTS = {"mqtt": 1883, "mqtts": 8883}
_KEEP_ALIVE_S = 20


class MqttOutput:
    """Publishes with QoS 1; `run` keeps the connection, and `send` waits for it.

    Cameras are announced to Home Assistant (`Announcer`); what each shows is told at each connection, change
    of the cameras, and description.
    """

    name = "mqtt"

    def __init__(self, settings: MqttSettings, cameras: Sequence[str], shown: ShownReader) -> None:
        self.give_up_after_s = settings.give_up_after_s
        self._settings = settings
        self._announcer = Announcer(settings, cameras, shown)
        self._client: aiomqtt.Client | None = None
        self._is_connected = asyncio.Event()
        self._problem = "not connected yet"
        parts = urlsplit(settings.url)
        self._host, self._port = str(parts.hostname), parts.port or _PORTS[parts.scheme]
        self._tls = _tls_context(settings) if parts.scheme == "mqtts" else None

    def change(self, cameras: Sequence[str]) -> None:
        """The cameras are others now."""
        self._announcer.change(cameras)

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
        status = discovery.status_topic(self._settings)
        await self._announcer.connect(client)
        await keep(client, status, "online")
        self._client = client
        self._is_connected.set()
        try:
            await run_beside(_listen(client), self._announcer.follow(client))
        finally:
            self._client = None
            self._is_connected.clear()
            # why: the broker says `offline` only when nobody says goodbye.
            with suppress(aiomqtt.MqttError):
                await keep(client, status, "offline")

    async def _publish_event(self, client: aiomqtt.Client, message: Message) -> None:
        camera = msgspec.json.decode(message.body)["camera"]
        await self._announcer.meet(client, camera)
        if message.kind == "described":
            await self._announcer.show(client, camera)
        await client.publish(discovery.events_topic(self._settings), told(message), qos=1)


async def _listen(client: aiomqtt.Client) -> None:
    """Until the connection is lost, which raises `MqttError`; nothing that is said is for us."""
    async for _ in client.messages:
        pass


def _tls_context(settings: MqttSettings) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"outputs.mqtt.ca_file: {settings.ca_file}: cannot be used: {error}") from None
