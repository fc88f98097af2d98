"""`--set part.key=value`: settings from the command line, by their path in the file."""

from collections.abc import Sequence
from typing import Any

import yaml

from appliance.settings import SettingsError


def overrides_of(assignments: Sequence[str]) -> dict[str, Any]:
    """The nested settings of texts like `engine.scheduler=static`; values are read as YAML does.

    Raises `SettingsError` for a text that is no assignment.
    """
    nested: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        *parts, key = path.strip().split(".")
        if not (equals and key and parts and all(parts)):
            raise SettingsError(f"--set {assignment}: write part.key=value, as in engine.scheduler=static")
        place = nested
        for part in parts:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise SettingsError(f"--set {assignment}: {part} is set to a value already")
        place[key] = _value(assignment, text)
    return nested


def _value(assignment: str, text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise SettingsError(f"--set {assignment}: the value is not valid YAML") from None
