"""The classes of a detection model, read out of its file: nothing is loaded, and no code of it runs."""

import mmap
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def class_names(model: str | Path) -> tuple[str, ...] | None:
    """The names, in the order of their ids; None where the file does not tell them, or cannot be read.

    Known are a ``.pt`` of ultralytics, and exports with their names in them: folders, ``.onnx``, ``.tflite``.
    """
    path = Path(model)
    read = _of_folder if path.is_dir() else _READERS.get(path.suffix.lower())
    try:
        names = read(path) if read else None
    except Exception:
        # why: a file may be damaged in any way, which whoever loads it tells better
        return None
    found = tuple(dict(names).values()) if isinstance(names, Mapping) else tuple(names or ())
    return found if found and all(isinstance(name, str) for name in found) else None


def _of_folder(path: Path) -> Any:
    return yaml.safe_load((path / "metadata.yaml").read_text(encoding="utf-8"))["names"]


def _of_checkpoint(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        inner = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(inner) as file:
            held = _Unpickler(file).load()
    return (held.get("ema") or held["model"]).names


def _of_tflite(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        text = archive.read(archive.namelist()[0]).decode()
    # why: newer files have JSON, older ones a table as Python prints it; both are YAML
    return yaml.safe_load(text)["names"]


def _of_onnx(path: Path) -> Any:
    """The entry ``names`` of the model's metadata, which are pairs of texts (protobuf) after the network."""
    key = b"\n\x05names\x12"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if (found := data.rfind(key)) < 0:
            return None
        at = found + len(key)
        length = shift = 0
        while True:
            byte, at = data[at], at + 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return yaml.safe_load(data[at : at + length].decode())


class _Anything:
    """Stands for every class and function that the pickle names."""

    def __new__(cls, *arguments: Any, **options: Any) -> "_Anything":
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **options: Any) -> "_Anything":
        return _Anything()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def append(self, value: Any) -> None:
        """As of a list."""

    extend = append


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Anything]:
        return _Anything

    def persistent_load(self, pid: Any) -> None:
        return None


_READERS = {".pt": _of_checkpoint, ".onnx": _of_onnx, ".tflite": _of_tflite}
