"""Whether the devices that settings name are there."""

from collections.abc import Iterator

from appliance.findings import Finding
from appliance.settings import Settings


def check_detector_device(settings: Settings) -> Iterator[Finding]:
    """Whether the detector can compute where it is to."""
    if reason := _why_no_device(settings.detector.device):
        yield Finding("detector.device", reason)


def check_engine_device(settings: Settings) -> Iterator[Finding]:
    """Whether the engine can compute where it is to."""
    if reason := _why_no_device(settings.engine.device):
        yield Finding("engine.device", reason)


def _why_no_device(name: str) -> str | None:
    if name in {"auto", "cpu"}:
        return None
    # why: it takes seconds, and what is there is known to it alone
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        return f"{name!r} is not known: use auto, cpu or cuda"
    num_devices = torch.cuda.device_count() if device.type == "cuda" else None
    if num_devices == 0:
        return f"torch finds no CUDA device here, and {name!r} needs one: use auto or cpu"
    if num_devices is not None and (device.index or 0) >= num_devices:
        return f"there is no {name!r}: the last of the CUDA devices is cuda:{num_devices - 1}"
    return None
