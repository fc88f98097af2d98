"""A camera as the API tells of it: how it is doing and why, and never where it is."""

import re
from typing import Any

from appliance.api.services import CameraChanges, Services
from appliance.jobs import CameraStatus
from vision.urls import redact

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S*?…")
# why: `error` may repeat the camera's URL with its password; the last ones are between workers and front.
_HIDDEN = ("name", "state", "error", "begun_at", "open_events", "is_unheard", "worker", "life_id")


def camera_body(status: CameraStatus, services: Services, *, has_settings: bool = False) -> dict[str, Any]:
    """The JSON of a camera.

    `reason` says why it is not as it should be, None when it is. `settings` are those that hold, without its
    address, as they are written.
    """
    changes = services.camera_changes
    settings = changes.settings_of(status.name) if changes and status.name in changes.names else {}
    counts = {name: getattr(status, name) for name in status.__struct_fields__ if name not in _HIDDEN}
    body = {
        "name": status.name,
        "friendly_name": settings.get("friendly_name"),
        "enabled": settings.get("enabled", True),
        "state": status.state,
        "reason": reason_of(status, changes),
        **counts,
    }
    return body | ({"settings": settings} if has_settings and settings else {})


def reason_of(status: CameraStatus, changes: CameraChanges | None) -> str | None:
    """Why a camera is not running, or what its newest frame failed by; None when all is well."""
    text = status.error or _why_quiet(status)
    if text is None:
        return None
    if changes is not None and status.name in changes.names:
        text = changes.without_address(status.name, text)
    return _ADDRESS.sub("its source", redact(text))


def _why_quiet(status: CameraStatus) -> str | None:
    if status.state == "connecting" and not status.updated_at:
        return "the vision worker has told nothing of it yet: it is starting, or the queue is away"
    quiet = {
        "stopped": 'it is paused: set "enabled": true',
        "ended": "the recording is at its end: set loop: true to begin again",
        "connecting": "it is being opened",
        "stalled": "no picture comes: check the camera and its network",
    }
    return quiet.get(status.state)
