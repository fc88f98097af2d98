"""What each format of an exported model needs to run, checked before ultralytics would try to install it."""

from importlib.util import find_spec

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
    """Raise `ModelUnsupported`, naming the package, when the runtime of the model's format is missing."""
    name = path.rstrip("/")
    for ending, (module, package) in _RUNTIMES.items():
        if name.endswith(ending) and find_spec(module) is None:
            raise ModelUnsupported(
                f"{path} needs the package {package}, which is not installed: "
                f"pip install {package}, or use another format, such as .pt"
            )
