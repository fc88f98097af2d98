"""What steps cost, kept from one start to the next: a small JSON file for each model, device and setting.

What is in the file only has to be near: the cost model goes on learning from every step. A file that
cannot be read, or that is of something else, is as good as none.
"""

import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from vlm_engine.cost_model import CostModel, LinearModel

log = logging.getLogger(__name__)

FORMAT = 1
"""Raised when the features of the cost model change."""

Identity = Mapping[str, str | int | float | bool | None]


def cache_folder(setting: str) -> Path | None:
    """Where the files are: None for ``off``, the user's own cache for ``auto``, else the folder named."""
    if setting == "off":
        return None
    return user_cache() / "vlm-engine" / "costs" if setting == "auto" else Path(setting).expanduser()


def user_cache() -> Path:
    """The folder for what may be lost (XDG base directories; ``~/Library/Caches`` on macOS)."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if named and Path(named).is_absolute():
        return Path(named)
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")


class CostCache:
    """The file of one model on one device.

    Args:
        folder: Where it is; None keeps nothing.
        identity: All that decides what steps cost; any difference makes another file.
    """

    def __init__(self, folder: Path | None, identity: Identity) -> None:
        self._identity = {**identity, "format": FORMAT}
        digest = sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()
        self.path = None if folder is None else folder / f"{digest[:20]}.json"

    def load_into(self, model: CostModel) -> bool:
        """Have `model` go on from what was stored; False, and a line in the log, when that cannot be."""
        if self.path is None:
            return False
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["identity"] != self._identity:
                raise ValueError("it is of something else")
            sizes = len(model.step.weights), len(model.encoder.weights)
            parts = (_restored(content[name], size) for name, size in zip(PARTS, sizes, strict=True))
            model.reset(*parts)
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is left aside, steps are measured anew: %s", self.path, error)
            return False
        return True

    def store(self, model: CostModel) -> None:
        """Keep what `model` knows; a folder that cannot be written is told in the log."""
        if self.path is None:
            return
        parts = {name: getattr(model, name).state() for name in PARTS}
        text = json.dumps({"identity": self._identity, **parts}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _write_atomically(self.path, text)
        except OSError as error:
            log.warning("%s cannot be written, the next start measures again: %s", self.path, error)


PARTS = ("step", "encoder")


def _restored(content: Any, num_weights: int) -> LinearModel:
    model = LinearModel.restored(**{name: tuple(map(float, values)) for name, values in content.items()})
    if len(model.weights) != num_weights:
        raise ValueError(f"{len(model.weights)} weights in place of {num_weights}")
    return model


def _write_atomically(path: Path, text: str) -> None:
    """A reader, also another engine that starts, sees the old file or the new one."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
