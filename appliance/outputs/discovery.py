"""How Home Assistant finds the cameras: one retained message an entity, by its MQTT discovery.

https://www.home-assistant.io/integrations/mqtt/#mqtt-discovery
"""

import re
from typing import Any

from appliance import __version__
from appliance.output_settings import MqttSettings

MAX_STATE = 255
"""Characters that a state may have in Home Assistant."""


def status_topic(settings: MqttSettings) -> str:
    """Where `online` and `offline` are said; the broker says `offline` itself when the appliance is gone."""
    return f"{settings.prefix}/status"


def events_topic(settings: MqttSettings) -> str:
    """Where every change that is wanted is told, as `{"type", "timestamp", "data"}`."""
    return f"{settings.prefix}/events"


def cameras_topic(settings: MqttSettings) -> str:
    """The names of the appliance's own cameras, as a JSON list, retained."""
    return f"{settings.prefix}/cameras"


def description_topic(settings: MqttSettings, camera: str) -> str:
    """The camera's newest description, retained: `text` fit for a state, and the event's main fields."""
    return f"{settings.prefix}/{camera}/description"


def snapshot_topic(settings: MqttSettings, camera: str) -> str:
    """The JPEG of the camera's newest description, retained."""
    return f"{settings.prefix}/{camera}/snapshot"


def discovery_messages(settings: MqttSettings, camera: str) -> dict[str, dict[str, Any]]:
    """The entities of one camera by topic; none when nobody is to be told."""
    if settings.discovery_prefix is None:
        return {}
    node = re.sub(r"[^A-Za-z0-9_-]", "_", settings.prefix)
    entities: dict[str, tuple[str, dict[str, Any]]] = {
        "description": ("sensor", _sensor(description_topic(settings, camera)))
    }
    if settings.snapshots:
        picture = {"image_topic": snapshot_topic(settings, camera), "content_type": "image/jpeg"}
        entities["snapshot"] = ("image", picture)
    return {
        f"{settings.discovery_prefix}/{component}/{node}/{camera}_{name}/config": fields
        | _common(settings, node, camera, name)
        for name, (component, fields) in entities.items()
    }


def camera_topics(settings: MqttSettings, camera: str) -> list[str]:
    """All that is retained of a camera, its entities first, whether there are pictures now or not."""
    entities = discovery_messages(settings.model_copy(update={"snapshots": True}), camera)
    return [*entities, description_topic(settings, camera), snapshot_topic(settings, camera)]


def _sensor(topic: str) -> dict[str, Any]:
    return {
        "state_topic": topic,
        "value_template": "{{ value_json.text }}",
        "json_attributes_topic": topic,
        "icon": "mdi:text-box-outline",
    }


def _common(settings: MqttSettings, node: str, camera: str, name: str) -> dict[str, Any]:
    return {
        "name": f"{camera} {name}",
        "unique_id": f"{node}_{camera}_{name}",
        "availability_topic": status_topic(settings),
        "device": {"identifiers": [node], "name": "Vision appliance", "sw_version": __version__},
        "origin": {"name": "vision-appliance", "sw_version": __version__},
    }
