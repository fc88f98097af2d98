"""From a directory or hub name to a model that runs in the engine."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from vlm_engine.attention import register
from vlm_engine.config import EngineConfig
from vlm_engine.errors import ModelLoadError, UnsupportedModel
from vlm_engine.models.base import ModelSpec, PromptPreparer, VisionLanguageModel
from vlm_engine.models.qwen_prompt import QwenPrompts
from vlm_engine.models.qwen_vl import QwenVL


@dataclass(frozen=True, slots=True)
class Family:
    """What makes a family's parts: `prompts` of processor and config, `model` of the stock model."""

    prompts: Callable[[Any, Any], PromptPreparer]
    model: Callable[[Any, Any, ModelSpec], VisionLanguageModel]


FAMILIES: dict[str, Family] = {
    "qwen2_5_vl": Family(QwenPrompts, QwenVL),
    "qwen3_vl": Family(QwenPrompts, QwenVL),
}


def load_prompts(config: EngineConfig) -> PromptPreparer:
    """Load what reads conversations for a checkpoint, without its weights.

    Raises:
        UnsupportedModel: Its ``model_type`` has no adapter.
        ModelLoadError: It is not there, cannot be read, or has no chat template.
    """
    settings = _read_config(config.model)
    family = settings.model_type
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModel(f"{config.model}: family {family!r} is not supported; supported are {known}")
    try:
        processor = AutoProcessor.from_pretrained(config.model)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{config.model}: the processor cannot be loaded: {error}") from error
    if not getattr(processor, "chat_template", None):
        raise ModelLoadError(f"{config.model}: the processor has no chat template, so it cannot chat")
    return FAMILIES[family].prompts(processor, settings)


def load_model(config: EngineConfig) -> VisionLanguageModel:
    """Load a checkpoint of a supported family.

    Raises:
        UnsupportedModel: Its ``model_type`` has no adapter.
        ModelLoadError: It is not there, cannot be read, lacks tensors, or has no chat template.
    """
    prompts = load_prompts(config)
    device = resolve_device(config.device)
    try:
        model = _load_weights(config, device)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"{config.model}: cannot be loaded: {error}") from error
    eos = model.generation_config.eos_token_id
    stops = _stop_token_ids(prompts.tokenizer.eos_token_id if eos is None else eos)
    spec = _spec(config, model, device, stops)
    return FAMILIES[spec.family].model(model, prompts, spec)


def _read_config(name: str) -> Any:
    path = Path(name)
    if name.startswith((".", "/", "~")) and not path.expanduser().is_dir():
        raise ModelLoadError(f"{name}: there is no such directory; give a checkpoint directory or a hub name")
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{name}: no readable checkpoint with this name: {error}") from error


def resolve_device(name: str) -> torch.device:
    """The device that a configuration names.

    Raises:
        ModelLoadError: CUDA is asked for and not available, or the name is no device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"device {name!r} is not known; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError(f"device {name!r}: torch finds no CUDA device here; use auto or cpu")
    return device


def _load_weights(config: EngineConfig, device: torch.device) -> Any:
    dtype = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    model, info = AutoModelForImageTextToText.from_pretrained(
        config.model, dtype=dtype, output_loading_info=True
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"{config.model}: the checkpoint lacks {len(missing)} tensors: {', '.join(missing[:5])}"
        )
    model.set_attn_implementation({"text_config": register()})
    return model.eval().requires_grad_(False).to(device)


def _spec(config: EngineConfig, model: Any, device: torch.device, stops: frozenset[int]) -> ModelSpec:
    text = model.config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelSpec(
        name=config.model,
        family=model.config.model_type,
        num_layers=text.num_hidden_layers,
        num_kv_heads=text.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=text.vocab_size,
        max_model_len=text.max_position_embeddings,
        stop_token_ids=stops,
        dtype=model.dtype,
        device=device,
    )


def _stop_token_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
