"""What each format of an exported model needs to run, and how many cores it takes."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from vision.errors import ModelUnsupported

_RUNTIMES = {
    ".onnx": ("onnxruntime", "onnxruntime"),
    "_openvino_model": ("openvino", "openvino"),
    ".tflite": ("ai_edge_litert", "ai-edge-litert"),
    ".engine": ("tensorrt", "tensorrt"),
    ".mlpackage": ("coremltools", "coremltools"),
    "_saved_model": ("tensorflow", "tensorflow"),
    ".pb": ("tensorflow", "tensorflow"),
    "_ncnn_model": ("ncnn", "ncnn"),
    ".mnn": ("MNN", "MNN"),
    "_paddle_model": ("paddle", "paddlepaddle"),
}
"""End of the model's name → module that must be there, package that brings it."""


def check_runtime(path: str) -> None:
    """Raise `ModelUnsupported`, naming the package, when the runtime of the model's format is missing.

    why: ultralytics would try to install it.
    """
    name = path.rstrip("/")
    for ending, (module, package) in _RUNTIMES.items():
        if name.endswith(ending) and find_spec(module) is None:
            raise ModelUnsupported(
                f"{path} needs the package {package}, which is not installed: "
                f"pip install {package}, or use another format, such as .pt"
            )


def share_cores(backend: Any, model: str, num_threads: int) -> None:
    """Have an OpenVINO model compute on so many cores of the CPU, whichever the system gives it.

    why: by default it takes all, whose threads wait for each other, spinning; and it ties them to the first
    cores, which this process may have been told to leave to others.

    Args:
        backend: ultralytics' ``AutoBackend``, as a predictor holds it once it has run; others are left alone.
        model: path that it was loaded from.
        num_threads: 1 or more.
    """
    compile_model = getattr(backend, "compile_model", None)
    if backend.format != "openvino" or not isinstance(compile_model, partial):
        return
    if compile_model.keywords.get("device_name") != "CPU":
        return
    wanted = {"INFERENCE_NUM_THREADS": num_threads, "ENABLE_CPU_PINNING": False}
    config = {**compile_model.keywords["config"], **wanted}
    backend.backend.compile_model = partial(compile_model, config=config)
    core = cast(Any, compile_model.func).__self__
    network = core.read_model(str(next(Path(model).glob("*.xml"))))
    backend.backend.ov_compiled_model = backend.backend.compile_model(network)
