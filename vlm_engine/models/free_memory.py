"""Memory that a device has left, of main memory within the limits of containers and services."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch


def free_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes that can be allocated on a device now; of main memory within the limits of the control groups.

    Args:
        device: ``cpu`` or a CUDA device.
        root: Where ``proc`` and ``sys`` are.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *_group_rooms(root)]))


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """A version of the control groups: where its tree is, and its files' names."""

    tree: str
    limit: str
    usage: str
    reclaimable: tuple[str, ...]


_VERSIONS = {
    "": _GroupFiles("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": _GroupFiles(
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


def _group_rooms(root: Path) -> Iterator[int]:
    """What each control group of this process, and each group around it, leaves of its limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for name in {"", "memory"} & set(controllers.split(",")):
            files = _VERSIONS[name]
            tree = root / files.tree
            own = tree / path.lstrip("/")
            # why: inside a container the path is often the host's, while the tree begins at the container
            for folder in (own, *own.parents) if own.is_dir() else (tree,):
                if folder.is_relative_to(tree):
                    yield from _room(folder, files)


def _room(folder: Path, files: _GroupFiles) -> Iterator[int]:
    """The limit less what is in use and not just a cache of files; nothing where there is no limit."""
    try:
        limit = (folder / files.limit).read_text(encoding="ascii").strip()
        used = int((folder / files.usage).read_text(encoding="ascii"))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return
    stat = dict(line.split(" ", 1) for line in lines)
    if limit != "max":
        yield int(limit) - used + sum(int(stat.get(name, 0)) for name in files.reclaimable)
