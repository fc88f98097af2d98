"""Settings that are read again while they are used: cameras change at once, the rest at the next start."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from appliance.describe_settings import ViewDescribeSettings
from appliance.model_check import known_classes, refuse_classes
from appliance.permits import Cameras
from appliance.settings import Settings

logger = logging.getLogger(__name__)

_OF_CAMERAS = ("cameras", "detect", "objects", "motion", "snapshots")


def waiting(used: Settings, wanted: Settings) -> list[str]:
    """Paths of what differs and is no camera's business, such as `server.port`."""
    return list(_different(_without_cameras(used), _without_cameras(wanted), ""))


def tell_changes(used: Settings, wanted: Settings) -> None:
    """Has the log say that cameras are those of `wanted`, and what of it does not hold yet."""
    logger.info("the settings were read again; cameras: %s", ", ".join(wanted.cameras) or "none")
    if paths := waiting(used, wanted):
        logger.warning("changed, and to hold from the next start on only: %s", ", ".join(paths))


def taken_back(read: Cameras, now: Cameras, wanted: Cameras) -> list[str]:
    """What was asked over the API and holds no more once cameras are those `wanted`, a phrase each.

    `read` are those of the settings that were read last, `now` those that hold until then.
    """
    others = [name for name in {**read, **now} if now.get(name) not in (read.get(name), wanted.get(name))]
    how = {(True, False): "is gone", (True, True): "is as they say", (False, True): "is there again"}
    return [f"{name} {how[name in now, name in wanted]}" for name in others]


def telling(load: Callable[[], Settings], used: Settings) -> Callable[[], Settings]:
    """`load`, told of in the log; it raises what that raises, and `SettingsError` for an unknown class."""
    names = known_classes(used)

    def load_again() -> Settings:
        wanted = load()
        refuse_classes(wanted, used, names)
        tell_changes(used, wanted)
        return wanted

    return load_again


def _without_cameras(settings: Settings) -> dict[str, Any]:
    parts = settings.model_dump(exclude=set(_OF_CAMERAS))
    # why: what holds for all cameras was put into each of them
    own = {name: x for name, x in parts["describe"].items() if name not in ViewDescribeSettings.model_fields}
    return {**parts, "describe": own}


def _different(used: Any, wanted: Any, path: str) -> Iterator[str]:
    if isinstance(used, dict) and isinstance(wanted, dict):
        for key in {**used, **wanted}:
            yield from _different(used.get(key), wanted.get(key), f"{path}.{key}".removeprefix("."))
    elif used != wanted:
        yield path
