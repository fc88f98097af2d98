"""Where a number was measured: machine, versions, commit."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("vision-appliance", "torch", "transformers", "numpy", "httpx")
_COMMAND_TIMEOUT_S = 10.0


def environment() -> dict[str, Any]:
    """`machine`, `versions`, and the `commit` of this checkout (None outside of one)."""
    return {"machine": machine(), "versions": versions(), "commit": commit()}


def machine() -> dict[str, Any]:
    """Processor, cores of the machine and of this process, memory in GiB, GPUs, load over the last minute."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * page_bytes / 2**30, 1),
        "gpus": _gpus(),
        "system": platform.platform(),
        "load": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide about speed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def commit() -> str | None:
    """The commit that this code was checked out from, with `-dirty` when files differ from it."""
    here = str(Path(__file__).parent)
    return _output("git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return names.splitlines() if names else []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints, None when it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
