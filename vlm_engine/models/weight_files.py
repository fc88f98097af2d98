"""A checkpoint's safetensors files: found, and checked by their headers before a weight is read.

Format: eight bytes of the header's length, the header (JSON), the tensors' bytes
(https://huggingface.co/docs/safetensors). A checkpoint is ``model.safetensors``, or shards that
``model.safetensors.index.json`` names.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from vlm_engine.errors import ModelLoadError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header tells it.

    Args:
        dtype: The format's word, for example ``BF16``.
        shape: Its lengths.
        end: Where its bytes end, counted from the first tensor's first.
    """

    dtype: str
    shape: tuple[int, ...]
    end: int

    @property
    def num_elements(self) -> int:
        """Numbers in it."""
        return prod(self.shape)


def read_tensors(name: str, *, download: bool = False) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint, by name.

    Args:
        name: Directory or hub name.
        download: Whether files of a hub name that are not on this machine are downloaded.

    Raises:
        ModelLoadError: A file is missing, cut off or no safetensors, or is without a tensor that the index
            places in it; the message names file and tensor.
    """
    find = partial(_find, name, download)
    single = find(SINGLE)
    if single is not None:
        return read_header(single)
    index = find(INDEX)
    if index is None:
        raise ModelLoadError(
            f"{name}: there are no .safetensors weights ({SINGLE} or {INDEX}); download or convert them first"
        )
    return _read_shards(index, find)


def stored_dtype(tensors: Mapping[str, StoredTensor]) -> torch.dtype:
    """The element type that most of a checkpoint's numbers have."""
    counts: Counter[torch.dtype] = Counter()
    for stored in tensors.values():
        counts[_DTYPES.get(stored.dtype, torch.float32)] += stored.num_elements
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def _find(name: str, download: bool, file: str) -> Path | None:
    """A file of the checkpoint, None where it has none or it cannot be had now."""
    try:
        found = cached_file(
            name,
            file,
            local_files_only=not download,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{name}: {file} cannot be had: {error}") from error
    return None if found is None else Path(found)


def _read_shards(index: Path, find: Callable[[str], Path | None]) -> dict[str, StoredTensor]:
    """The tensors that an index names, out of the shards that it names."""
    places = _read_index(index)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(places.values())):
        wanted = [tensor for tensor, place in places.items() if place == shard]
        path = find(shard)
        if path is None:
            raise ModelLoadError(
                f"{index}: names {shard} for {_listed(wanted)}, and there is no such file; download it"
            )
        held = read_header(path)
        absent = [tensor for tensor in wanted if tensor not in held]
        if absent:
            raise ModelLoadError(
                f"{path}: has no tensor {_listed(absent)}, which {index.name} says is in it; "
                "the files are of different versions: download all of them again"
            )
        tensors |= held
    return tensors


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(
            f"{path}: cannot be read as an index of shards: {error!r}; download it again"
        ) from error
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise ModelLoadError(f"{path}: weight_map must give a file name for every tensor; download it again")
    return places


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, checked against its size.

    Raises:
        ModelLoadError: It cannot be read, is no safetensors file, or ends before its last tensor does.
    """
    try:
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            raw = file.read(num_bytes) if num_bytes <= MAX_HEADER_BYTES else b""
            room = file.seek(0, 2) - 8 - num_bytes
        tensors = _parsed(json.loads(raw))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{path}: has no whole safetensors header; the file is cut off or is no safetensors file: "
            "download it again"
        ) from error
    _check_size(path, tensors, room)
    return tensors


def _parsed(header: dict[str, Any]) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(entry["dtype"], tuple(entry["shape"]), int(entry["data_offsets"][1]))
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _check_size(path: Path, tensors: Mapping[str, StoredTensor], room: int) -> None:
    cut = sorted((stored.end, name) for name, stored in tensors.items() if stored.end > room)
    if cut:
        end, _ = cut[-1]
        raise ModelLoadError(
            f"{path}: is cut off: it has {max(room, 0):,} of {end:,} bytes of tensors, and so lacks "
            f"{_listed([name for _, name in cut])}; download it again"
        )


def _listed(names: Iterable[str]) -> str:
    """The first names of many."""
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
