"""All outputs of one appliance, connected to its store and kept going."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from appliance.events import EventStore
from appliance.output_settings import OutputSettings, WhatIsSent
from appliance.outputs.delivery import Delivery, Output
from appliance.outputs.mqtt import MqttOutput
from appliance.outputs.outbox import Body, Kind, Wanted
from appliance.outputs.webhook import Webhook
from appliance.tasks import run_beside


class Outputs:
    """Owes events to the configured outputs from its making on, and sends them while `run` does.

    Raises `ValueError` for a setting that cannot be used, such as a CA file that is none.
    """

    def __init__(self, settings: OutputSettings, events: EventStore, cameras: Sequence[str]) -> None:
        self._settings, self._events = settings, events
        self._mqtt = MqttOutput(settings.mqtt, cameras, events.snapshot) if settings.mqtt else None
        events.outbox.connect({name: _wanted(what) for name, what in settings.by_name.items()})

    async def run(self) -> None:
        """Send until cancelled, whoever there is to send to."""
        async with AsyncExitStack() as stack:
            outputs: list[Output] = [self._mqtt] if self._mqtt else []
            for settings in self._settings.webhooks:
                webhook = Webhook(settings)
                stack.push_async_callback(webhook.close)
                outputs.append(webhook)
            events = self._events
            work = [Delivery(output, events.outbox, events.changes).run() for output in outputs]
            work += [self._mqtt.run()] if self._mqtt else []
            await run_beside(asyncio.Event().wait(), *work)


def _wanted(what: WhatIsSent) -> Wanted:
    def is_wanted(kind: Kind, body: Body) -> bool:
        return (
            kind in what.send
            and (what.cameras is None or body["camera"] in what.cameras)
            and (what.labels is None or body["label"] in what.labels)
        )

    return is_wanted
