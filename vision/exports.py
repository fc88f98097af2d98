"""The same network in a form that is faster on a CPU: an OpenVINO export of a `.pt`, made once and kept."""

import errno
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vision.openvino_network import NetworkInfo, OpenVinoNetwork
from vision.runtimes import share_cores
from vision.selftest import check_agreement
from vision.ultralytics_quiet import import_ultralytics

log = logging.getLogger(__name__)

FORMAT = 1
"""Raised when exports are made in another way."""

NUM_KEPT = 8
"""Exports that the folder holds: the newest in use; another version of a package makes another one."""

ROOM = 3, 2**22
"""An export takes so many times the room of its weights (kept in half precision), and bytes for its graph."""

MAKING_S = 3600.0
"""Nobody takes so long to make one."""

_ENDING = "_openvino_model"
_MAKING = "making-"


def why_no_export(model: str, device: str) -> str | None:
    """Say why a model cannot be exported to OpenVINO here; None when it can.

    Args:
        model: path of the model.
        device: where it is to compute, as ``cpu`` or ``cuda:0``.
    """
    if not model.endswith(".pt"):
        return f"only a .pt can be exported, not {model}"
    if device != "cpu":
        return f"OpenVINO is for a CPU, and the detector computes on {device}"
    if find_spec("openvino") is None:
        return "the package openvino is not installed: pip install -e '.[openvino]'"
    return None


class Export(NamedTuple):
    """One export, twice.

    Attributes:
        yolo: ultralytics' ``Model`` of it, which can be cut off from the device by a gate.
        options: keywords for its ``predict``.
        network: the same, faster.
    """

    yolo: Any
    options: dict[str, Any]
    network: OpenVinoNetwork


def exported(native: Any, options: dict[str, Any], model: str) -> Export:
    """Return the network of a `.pt` as an OpenVINO export.

    It is taken from the user's cache, or made; where that cannot be written it is made for this once. What
    does not load, or disagrees with the original, is not kept but made again. Nothing is installed or
    downloaded.

    Args:
        native: ultralytics' ``Model`` of the `.pt`, with its predictor set up.
        options: keywords for its ``predict``.
        model: path of the `.pt`.

    Raises:
        ModelBroken: the export does not find what the original finds.
        Exception: whatever the converter, the runtime or the file system raise.
    """
    imgsz = native.predictor.args.imgsz
    is_end2end = bool(native.predictor.model.end2end)
    kept = _user_cache() / _name(Path(model), imgsz, is_end2end)
    if kept.is_dir():
        try:
            return _loaded(native, options, kept, Path(model))
        except Exception as error:
            log.warning("the detector's export %s cannot be used and is made again: %r", kept, error)
    return _loaded(native, options, kept, Path(model))


def _loaded(native: Any, options: dict[str, Any], kept: Path, weights: Path) -> Export:
    import torch

    imgsz = native.predictor.args.imgsz
    is_end2end = bool(native.predictor.model.end2end)
    # why: where there is a GPU of Intel's too, ultralytics would leave the choice to OpenVINO
    of_export = {**options, "imgsz": imgsz, "device": "intel:cpu"}
    with _export_of(weights, kept, imgsz, is_end2end) as folder:
        yolo = import_ultralytics().YOLO(str(folder), task=native.task)
        network = OpenVinoNetwork(folder, _info(native, is_end2end))
        check_agreement(native, network, options)
        # why: its own loading shows what is wrong with the files, and only a run of it sets its cores up
        yolo.predict([np.zeros((64, 64, 3), np.uint8)], **of_export)
        share_cores(yolo.predictor.model, str(folder), torch.get_num_threads())
    return Export(yolo, of_export, network)


def _info(native: Any, is_end2end: bool) -> NetworkInfo:
    import torch

    height, width = native.predictor.imgsz
    backend = native.predictor.model
    num_classes, stride = len(backend.names), int(backend.stride)
    return NetworkInfo((height, width), stride, num_classes, is_end2end, torch.get_num_threads())


@contextmanager
def _export_of(weights: Path, kept: Path, imgsz: int | list[int], is_end2end: bool) -> Iterator[Path]:
    """The folder of the export, `kept` if that can be; it must be loaded before this ends."""
    with ExitStack() as stack:
        if not kept.is_dir():
            place = _place(kept.parent, ROOM[0] * weights.stat().st_size + ROOM[1])
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=place, prefix=_MAKING))
            made = _make(weights, imgsz, is_end2end, Path(folder))
            kept = made if place is None else _keep(made, kept)
        try:
            yield kept
        except Exception:
            shutil.rmtree(kept, ignore_errors=True)
            raise
    with suppress(OSError):
        os.utime(kept)
        _forget_old(kept.parent)


def _place(cache: Path, num_bytes: int) -> Path | None:
    """Where an export can be made: in the cache, else in the folder for temporary files (None).

    Raises:
        OSError: there is no room in either.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
        _check_room(cache, num_bytes)
    except OSError as error:
        log.warning("the detector's export is made at each start, since it cannot be kept: %s", error)
        _check_room(Path(tempfile.gettempdir()), num_bytes)
        return None
    return cache


def _check_room(folder: Path, num_bytes: int) -> None:
    # why: where a disk is full, the converter says "iostream error" after all of its work
    if shutil.disk_usage(folder).free < num_bytes:
        raise OSError(errno.ENOSPC, f"no room for {num_bytes / 2**20:.0f} MB", str(folder))


def _make(weights: Path, imgsz: int | list[int], is_end2end: bool, folder: Path) -> Path:
    log.info("exporting %s to OpenVINO, which takes some seconds and is done once", weights)
    yolo = import_ultralytics().YOLO(str(weights))
    # why: the export is written beside the file that this names
    yolo.model.pt_path = str(folder / "model.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = yolo.export(
            format="openvino", dynamic=True, device="cpu", imgsz=imgsz, nms=False if is_end2end else None
        )
    return Path(made)


def _keep(made: Path, kept: Path) -> Path:
    """invariant: under the name that others look for there are only whole exports."""
    try:
        return made.rename(kept)
    except OSError:
        # why: another process may have made the same one meanwhile
        if not kept.is_dir():
            raise
        return kept


def _forget_old(cache: Path) -> None:
    by_age = sorted(cache.glob(f"*{_ENDING}"), key=lambda path: path.stat().st_mtime)
    # why: who is ended hard while he makes one leaves it behind
    stopped = [path for path in cache.glob(f"{_MAKING}*") if time.time() - path.stat().st_mtime > MAKING_S]
    for path in (*by_age[:-NUM_KEPT], *stopped):
        shutil.rmtree(path, ignore_errors=True)


def _name(weights: Path, imgsz: int | list[int], is_end2end: bool) -> str:
    """All that decides what the export is: any difference makes another one."""
    packages = {name: version(name) for name in ("openvino", "torch", "ultralytics")}
    identity = {"format": FORMAT, "imgsz": imgsz, "end2end": is_end2end, **packages}
    digest = sha256(weights.read_bytes())
    digest.update(json.dumps(identity, sort_keys=True).encode())
    stem = re.sub(r"\W", "-", weights.stem)[:40]
    return f"{stem}-{digest.hexdigest()[:16]}{_ENDING}"


def _user_cache() -> Path:
    """The folder for what may be lost (XDG base directories; ``~/Library/Caches`` on macOS)."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if not (named and Path(named).is_absolute()):
        named = str(Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache"))
    return Path(named) / "vision-appliance" / "detectors"
