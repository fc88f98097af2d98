"""Builds and loads the kernels' shared library; pure Python, no torch."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, c_float, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

from vlm_engine.cost_cache import user_cache

log = logging.getLogger(__name__)

SOURCES = ("kernels.cpp", "decoder.h", "attention.h", "linear.h", "simd.h")
CPU_FLAGS = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512vbmi"})
COMPILERS = ("g++", "c++")
OPTIONS = (
    "-std=c++17",
    "-O3",
    "-mtune=native",
    *(f"-m{flag.replace('_', '')}" for flag in sorted(CPU_FLAGS)),
    "-mfma",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-Wno-maybe-uninitialized",
)
BUILD_TIMEOUT_S = 300
KERNELS_ENV = "VLM_ENGINE_KERNELS_DIR"


class KernelsUnavailable(RuntimeError):
    """The kernels cannot be had on this machine; the message says why and what to do."""


class Linear(ctypes.Structure):
    """A packed layer, see ``linear.h``."""

    _fields_ = (
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("columns", c_int64),
        ("depth", c_int64),
        ("activation", c_int64),
    )


class Span(ctypes.Structure):
    """One sequence's share of a step, see ``decoder.h``."""

    _fields_ = (
        ("first_row", c_int64),
        ("num_queries", c_int64),
        ("num_context", c_int64),
        ("slots", c_void_p),
    )


class Geometry(ctypes.Structure):
    """What all layers of a decoder share, see ``decoder.h``."""

    _fields_ = (
        ("hidden", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("scale", c_float),
        ("epsilon", c_float),
    )


class Layer(ctypes.Structure):
    """One decoder layer, see ``decoder.h``."""

    _fields_ = (
        ("norm1", c_void_p),
        ("norm2", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


_POINTER, _INT = c_void_p, c_int64
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "vlm_set_threads": (None, (_INT, _INT)),
    "vlm_set_team": (None, (_INT,)),
    "vlm_tile_rows": (_INT, ()),
    "vlm_packed_size": (_INT, (_INT, _INT)),
    "vlm_pack_linear": (None, (_POINTER, _POINTER, _POINTER, _INT, _INT)),
    "vlm_pack_codes": (None, (_POINTER, _POINTER, _POINTER, _INT, _INT)),
    "vlm_linear": (None, (POINTER(Linear), _POINTER, _POINTER, _POINTER, _POINTER, _INT)),
    "vlm_rms_norm": (None, (_POINTER, _POINTER, _POINTER, _INT, _INT, c_float)),
    "vlm_decoder": (
        None,
        (
            POINTER(Geometry),
            _POINTER,
            _INT,
            _POINTER,
            _INT,
            _POINTER,
            _POINTER,
            _POINTER,
            POINTER(Span),
            _INT,
        ),
    ),
    "vlm_split_heads": (None, (_POINTER,) * 4 + (_INT,) * 5),
    "vlm_keys_size": (_INT, (_INT, _INT)),
    "vlm_values_size": (_INT, (_INT, _INT)),
    "vlm_pack_panels": (None, (_POINTER,) * 4 + (_INT,) * 5),
    "vlm_attend_panels": (None, (_POINTER, _INT, _POINTER, _POINTER, _POINTER) + (_INT,) * 4 + (c_float,)),
    "vlm_attend_windows": (
        None,
        (_POINTER,) * 3 + (_INT, _POINTER, _POINTER) + (_INT,) * 3 + (c_float,),
    ),
}


@lru_cache(1)
def load_library() -> ctypes.CDLL:
    """The kernels, built first if they are not in the cache.

    Built files lie in ``$VLM_ENGINE_KERNELS_DIR``, else ``$XDG_CACHE_HOME/vision-appliance/kernels``, and are
    found again by a hash of sources, options, compiler and processor. Torch must be imported before, so that
    both use one OpenMP runtime.

    Raises:
        KernelsUnavailable: Wrong processor or no compiler, or the compiler failed.
    """
    _check_processor()
    compiler = _find_compiler()
    path = _cache_dir() / f"kernels-{_key(compiler)}.so"
    if not path.exists():
        _build(compiler, path)
    try:
        return _declared(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(
            f"{path}: cannot be loaded: {error}; delete it to have it built again"
        ) from None


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
    return library


def _check_processor() -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise KernelsUnavailable(f"there are none for {platform.system()} on {platform.machine()}")
    missing = CPU_FLAGS - _cpu_info().get("flags", frozenset())
    if missing:
        raise KernelsUnavailable(f"the processor has no {', '.join(sorted(missing))}")


@lru_cache(1)
def _cpu_info() -> dict[str, frozenset[str]]:
    """Words of each field of the first processor."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): frozenset(value.split()) for name, _, value in pairs}


def _find_compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    for name in names:
        found = shutil.which(name)
        # why: another compiler brings an OpenMP runtime of its own, whose threads would fight with torch's
        if found and "Free Software Foundation" in _run([found, "--version"]):
            return found
    raise KernelsUnavailable(f"no GNU C++ compiler ({', '.join(names)}) was found: install g++")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise KernelsUnavailable(f"{command[0]} failed: {error.stderr.strip()[-2000:]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{command[0]} failed: {error}") from None
    return done.stdout


def _key(compiler: str) -> str:
    here = Path(__file__).parent
    parts = [(here / name).read_bytes() for name in SOURCES]
    processor = " ".join(sorted(_cpu_info().get("model name", ())) + sorted(_cpu_info().get("model", ())))
    parts += [" ".join(OPTIONS).encode(), _run([compiler, "--version"]).encode(), processor.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cache_dir() -> Path:
    path = Path(os.environ.get(KERNELS_ENV) or user_cache() / "vision-appliance" / "kernels")
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise KernelsUnavailable(
            f"{path}: cannot be made: {error}; name another place in {KERNELS_ENV}"
        ) from None
    # why: what lies there is run, so nobody else may have put it there
    if path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o022:
        raise KernelsUnavailable(f"{path}: others may write there; name a place of your own in {KERNELS_ENV}")
    return path


def _build(compiler: str, path: Path) -> None:
    """Compile beside the goal and move it there, so that two processes do not see half a file."""
    log.info("building the CPU kernels with %s (a few seconds, once)", compiler)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            half = Path(folder) / path.name
            _run([compiler, *OPTIONS, str(Path(__file__).parent / "kernels.cpp"), "-o", str(half)])
            half.replace(path)
    except OSError as error:
        raise KernelsUnavailable(
            f"{path}: cannot be written: {error}; name another place in {KERNELS_ENV}"
        ) from None
