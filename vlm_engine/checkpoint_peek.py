"""What a checkpoint's small files say of it, without torch: a first look before anything is loaded."""

import json
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from vlm_engine.errors import ModelLoadError, UnsupportedModel

TEXT_FAMILIES = frozenset({"gemma3_text", "llama", "qwen3"})
"""Families that see nothing."""

VIDEO_FAMILIES = frozenset({"qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm"})
"""Families that read videos beside images."""

KNOWN_FAMILIES = TEXT_FAMILIES | VIDEO_FAMILIES | {"gemma3", "idefics3", "internvl"}
"""All families that the engine loads."""

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class CheckpointPeek:
    """A checkpoint at first sight.

    Args:
        family: ``model_type`` of its configuration.
    """

    family: str

    @property
    def reads_images(self) -> bool:
        """Whether it can be shown anything."""
        return self.family not in TEXT_FAMILIES

    @property
    def reads_videos(self) -> bool:
        """Whether it takes videos beside images."""
        return self.family in VIDEO_FAMILIES


def peek(name: str) -> CheckpointPeek | None:
    """Look at a checkpoint folder, or at what the cache of the hub has of a name.

    Returns:
        What it is; None for a hub name that the cache does not have.

    Raises:
        ModelLoadError: There is no such folder, it lacks a file, or `name` can be no hub name either.
        UnsupportedModel: Its family is not one that the engine loads.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _read(name, _needed(folder))
    if folder.is_file():
        raise ModelLoadError(f"{name} is a file; give the checkpoint's folder, or a hub name")
    if name.startswith((".", "/", "~")):
        raise ModelLoadError(f"there is no folder {name}; give a checkpoint's folder, or a hub name")
    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        raise ModelLoadError(f"{name} is no folder, and no hub name can be so (OWNER/NAME is one)") from None
    return _read(name, Path(found)) if isinstance(found, str) else None


def _needed(folder: Path) -> Path:
    """The configuration of a folder that has weights too."""
    config = folder / "config.json"
    if not config.is_file():
        raise ModelLoadError(f"{folder} has no config.json: it is no checkpoint's folder")
    if not any((folder / file).is_file() for file in _WEIGHTS):
        raise ModelLoadError(f"{folder} has no weights ({' or '.join(_WEIGHTS)}): download them first")
    return config


def _read(name: str, config: Path) -> CheckpointPeek:
    try:
        family = json.loads(config.read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{config}: cannot be read: {error!r}; download it again") from None
    if family not in KNOWN_FAMILIES:
        raise UnsupportedModel(
            f"{name} is of the family {family!r}, which is not supported; "
            f"{', '.join(sorted(KNOWN_FAMILIES))} are"
        )
    return CheckpointPeek(family)
