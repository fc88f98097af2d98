"""The HTTP API: OpenAI's chat completions, events, cameras, health, and a status page."""

from appliance.api.access import UnsafeBindingError
from appliance.api.app import allow_camera_changes, create_app, end_chats, show_failures
from appliance.api.server import ApiServer
from appliance.api.services import ApiLimits, Cameras, EngineClient

__all__ = [
    "ApiLimits",
    "ApiServer",
    "Cameras",
    "EngineClient",
    "UnsafeBindingError",
    "allow_camera_changes",
    "create_app",
    "end_chats",
    "show_failures",
]
