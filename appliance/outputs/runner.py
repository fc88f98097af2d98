"""All outputs of one appliance, connected to its store and kept going."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec

from appliance.events import EventFilter, EventStore
from appliance.output_settings import MqttSettings, OutputSettings, WebhookSettings, WhatIsSent
from appliance.outputs.announcing import Shown
from appliance.outputs.delivery import Delivery, Output
from appliance.outputs.mqtt import MqttOutput
from appliance.outputs.outbox import Body, Kind, Wanted
from appliance.outputs.webhook import Webhook
from appliance.tasks import persist, run_beside

_MOST_LOOKED_AT = 64


class Outputs:
    """Owes events to the configured outputs from its making on, and sends them while `run` does.

    What fails in one of them is counted in `num_failures` and ends no other. Raises `ValueError` for a
    setting that cannot be used, such as a CA file that is none.
    """

    def __init__(
        self,
        settings: OutputSettings,
        events: EventStore,
        cameras: Sequence[str],
        num_failures: Counter[str] | None = None,
    ) -> None:
        self._settings, self._events = settings, events
        self._num_failures = Counter() if num_failures is None else num_failures
        self._mqtt = _open_mqtt(settings.mqtt, cameras, events) if settings.mqtt else None
        events.outbox.connect({name: _wanted(what) for name, what in settings.by_name.items()})

    def change_cameras(self, cameras: Sequence[str]) -> None:
        """The cameras are others now; what was told of those that are gone is taken back."""
        if self._mqtt:
            self._mqtt.change(cameras)

    async def run(self) -> None:
        """Send until cancelled, whoever there is to send to."""
        work: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            f"output {webhook.name}": partial(self._post, webhook) for webhook in self._settings.webhooks
        }
        if self._mqtt:
            work["output mqtt"] = partial(self._send, self._mqtt)
            work["connection to MQTT"] = self._mqtt.run
        await run_beside(
            asyncio.Event().wait(), *(persist(name, run, self._num_failures) for name, run in work.items())
        )

    async def _post(self, settings: WebhookSettings) -> None:
        webhook = Webhook(settings)
        try:
            await self._send(webhook)
        finally:
            await webhook.close()

    async def _send(self, output: Output) -> None:
        await Delivery(output, self._events.outbox, self._events.changes).run()


def _open_mqtt(settings: MqttSettings, cameras: Sequence[str], events: EventStore) -> MqttOutput:
    is_wanted = _wanted(settings)

    def shown(camera: str) -> Shown | None:
        """What a camera shows: its newest description that is wanted, with the picture.

        By when it was begun: changes come late, and clocks are wrong.
        """
        described = events.newest(EventFilter(camera=camera, is_described=True), _MOST_LOOKED_AT)
        for event in sorted(described, key=lambda event: -event.born):
            body = msgspec.json.decode(event.body)
            if is_wanted("described", body):
                return body, events.snapshot(event.event_id) if settings.snapshots else None
        return None

    return MqttOutput(settings, cameras, shown)


def _wanted(what: WhatIsSent) -> Wanted:
    def is_wanted(kind: Kind, body: Body) -> bool:
        return (
            kind in what.send
            and (what.cameras is None or body["camera"] in what.cameras)
            and (what.labels is None or body["label"] in what.labels)
        )

    return is_wanted
