"""All outputs of one appliance, connected to its store and kept going."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack

from appliance.events import EventStore
from appliance.output_settings import OutputSettings, WhatIsSent
from appliance.outputs.delivery import Delivery, Output
from appliance.outputs.mqtt import MqttOutput
from appliance.outputs.outbox import Body, Kind, Wanted
from appliance.outputs.webhook import Webhook
from appliance.tasks import persist, run_beside


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
            outbox, changes = self._events.outbox, self._events.changes
            work = {f"output {one.name}": Delivery(one, outbox, changes).run for one in outputs}
            if self._mqtt:
                work["connection to MQTT"] = self._mqtt.run
            await run_beside(
                asyncio.Event().wait(),
                *(persist(name, run, self._num_failures) for name, run in work.items()),
            )


def _wanted(what: WhatIsSent) -> Wanted:
    def is_wanted(kind: Kind, body: Body) -> bool:
        return (
            kind in what.send
            and (what.cameras is None or body["camera"] in what.cameras)
            and (what.labels is None or body["label"] in what.labels)
        )

    return is_wanted
