"""Weights in eight bits: which layers, and how they are made while a checkpoint is read."""

import importlib.util
from collections.abc import Iterator
from typing import Any

from torch import nn

from vlm_engine.config import EngineConfig
from vlm_engine.errors import ModelLoadError

HINT = "quantization: int8 needs torchao: pip install -e '.[int8]', or set quantization: none"
SCALE_BYTES = 5
"""Of a row: its scale, and torchao's zero point, which is zero."""


def decoder_linears(model: Any) -> Iterator[nn.Linear]:
    """The decoder's layers: quantized, as the head is, since every step reads them whole.

    why: the vision tower computes more than it reads, so that eight bits make nothing faster there.

    Args:
        model: A stock model, with or without weights.
    """
    return (each for each in model.get_decoder().modules() if isinstance(each, nn.Linear))


def quantize_head(model: Any) -> None:
    """Give a loaded model's head weights of its own in eight bits; a tied embedding stays as it is."""
    from torchao.quantization import quantize_

    quantize_(model.get_output_embeddings(), _kind())


def check_installed(config: EngineConfig) -> None:
    """Say before anything is read that torchao is missing.

    Raises:
        ModelLoadError: It is asked for and not installed.
    """
    if config.quantization == "int8" and importlib.util.find_spec("torchao") is None:
        raise ModelLoadError(HINT)


def loading_arguments(skeleton: Any) -> dict[str, Any]:
    """What `from_pretrained` takes to quantize a decoder as it is read, so that it is never wide in memory.

    Args:
        skeleton: The stock model without weights.

    Raises:
        ModelLoadError: torchao is not installed, or cannot be used.
    """
    try:
        from transformers import TorchAoConfig

        kind = _kind()
    except ImportError as error:
        raise ModelLoadError(f"{HINT} ({error})") from None
    quantized = set(decoder_linears(skeleton))
    others = [
        name
        for name, module in skeleton.named_modules()
        if isinstance(module, nn.Linear) and module not in quantized
    ]
    return {"quantization_config": TorchAoConfig(kind, modules_to_not_convert=others)}


def _kind() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig(set_inductor_config=False)
