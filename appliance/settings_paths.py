"""Places in what a settings file says: where files are named, and what is left without some of it.

Paths in a settings file go by the folder that the file lies in, wherever it is read from.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

Location = tuple[int | str, ...]
"""Keys on the way to a value, from the top."""

_Place = Callable[[Path, str], str]


def by_folder(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings with every path in them by `folder`; addresses and names of a model hub stay as they are.

    `data` is what a file says, maybe with mistakes in it, which stay too. `~` is the user's own folder.
    """
    changed: Any = dict(data)
    for keys, place in _PATHS.items():
        changed = _changed(changed, keys.split("."), partial(place, folder))
    return dict(changed)


def without(data: Mapping[str, Any], locations: Iterable[Location]) -> dict[str, Any]:
    """The settings without what stands at `locations`, or around them where nothing does; lists go whole."""
    left: Any = dict(data)
    for location in locations:
        left = _without(left, location)
    return dict(left)


def _without(table: Mapping[Any, Any], location: Location) -> dict[Any, Any]:
    key, *rest = location
    if key not in table:
        return dict(table)
    inner = table[key]
    if isinstance(inner, Mapping) and rest and (rest[0] in inner or len(rest) > 1):
        return {**table, key: _without(inner, tuple(rest))}
    return {name: value for name, value in table.items() if name != key}


def _changed(value: Any, keys: list[str], change: Callable[[str], str]) -> Any:
    """`value` with each text changed that is found by `keys`, of which `*` is any."""
    if not keys:
        return change(value) if isinstance(value, str) and value else value
    first, *rest = keys
    if isinstance(value, list) and first == "*":
        return [_changed(part, rest, change) for part in value]
    if isinstance(value, Mapping):
        found = value.keys() if first == "*" else {first} & value.keys()
        return {key: _changed(part, rest, change) if key in found else part for key, part in value.items()}
    return value


def _file(folder: Path, text: str) -> str:
    return str(folder / os.path.expanduser(text))


def _source(folder: Path, text: str) -> str:
    return text if "://" in text else _file(folder, text)


def _cache(folder: Path, text: str) -> str:
    return text if text in {"auto", "off"} else _file(folder, text)


def _detector(folder: Path, text: str) -> str:
    """A file; but of a definition that is not there, the name of one of ultralytics' own."""
    path = Path(_file(folder, text))
    return text if path.suffix in {".yaml", ".yml"} and not path.exists() else str(path)


def _checkpoint(folder: Path, text: str) -> str:
    """A folder that is there, or that is written as one; anything else is a name of a model hub."""
    path = Path(_file(folder, text)).absolute()
    return str(path) if text.startswith((".", "~")) or path.is_dir() else text


_PATHS: Mapping[str, _Place] = {
    "cameras.*.source": _source,
    "cameras.*.ffmpeg.inputs.*.path": _source,
    "detector.gate": _file,
    "detector.model": _detector,
    "engine.cost_cache": _cache,
    "engine.model": _checkpoint,
    "events.path": _file,
    "outputs.mqtt.ca_file": _file,
    "redis.ca_file": _file,
    "redis.cert_file": _file,
    "redis.key_file": _file,
}
