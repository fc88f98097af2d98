"""From a directory or hub name to a model that runs in the engine."""

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from vlm_engine.attention import register
from vlm_engine.config import EngineConfig
from vlm_engine.errors import ModelLoadError, UnsupportedModel
from vlm_engine.models.base import ModelSpec, PromptPreparer, VisionLanguageModel
from vlm_engine.models.gemma3 import gemma3, gemma3_text
from vlm_engine.models.gemma3_prompt import Gemma3Prompts
from vlm_engine.models.hub import hub_problem, is_hub_name
from vlm_engine.models.internvl import internvl
from vlm_engine.models.internvl_prompt import InternVLPrompts
from vlm_engine.models.memory import Demand, check_memory
from vlm_engine.models.quantizing import check_installed, loading_arguments, quantize_head
from vlm_engine.models.qwen_prompt import QwenPrompts
from vlm_engine.models.qwen_vl import QwenVL
from vlm_engine.models.smolvlm import smolvlm
from vlm_engine.models.smolvlm_prompt import SmolVLMPrompts
from vlm_engine.models.text import TextPrompts, text_model
from vlm_engine.models.weight_files import StoredTensor, read_tensors, stored_dtype
from vlm_engine.native.library import KernelsUnavailable, load_library
from vlm_engine.varlen import PAGE_MULTIPLE, works

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Family:
    """What makes a family's parts.

    Args:
        prompts: From processor (of a text family: tokenizer) and config.
        model: From the stock model, the prompts and the spec.
        stock: The transformers class that loads the stock model.
    """

    prompts: Callable[[Any, Any], PromptPreparer]
    model: Callable[[Any, Any, ModelSpec], VisionLanguageModel]
    stock: Any = AutoModelForImageTextToText


FAMILIES: dict[str, Family] = {
    "gemma3": Family(Gemma3Prompts, gemma3),
    "gemma3_text": Family(TextPrompts, gemma3_text, AutoModelForCausalLM),
    "idefics3": Family(SmolVLMPrompts, smolvlm),
    "internvl": Family(InternVLPrompts, internvl),
    "llama": Family(TextPrompts, text_model, AutoModelForCausalLM),
    "qwen2_5_vl": Family(QwenPrompts, QwenVL),
    "qwen2_vl": Family(QwenPrompts, QwenVL),
    "qwen3": Family(TextPrompts, text_model, AutoModelForCausalLM),
    "qwen3_vl": Family(QwenPrompts, QwenVL),
    "smolvlm": Family(SmolVLMPrompts, smolvlm),
}

_FAULTS = (
    ("lacks {} tensors", "missing_keys"),
    ("has {} unknown tensors", "unexpected_keys"),
    ("has {} tensors of other shapes than config.json tells", "mismatched_keys"),
)


def load_prompts(config: EngineConfig) -> PromptPreparer:
    """Load what reads conversations for a checkpoint, without its weights.

    Raises:
        UnsupportedModel: Its ``model_type`` has no adapter.
        ModelLoadError: It is not there, cannot be read, or has no chat template.
    """
    check_installed(config)
    return _make_prompts(config.model, read_config(config.model))


def load_model(config: EngineConfig) -> VisionLanguageModel:
    """Load a checkpoint of a supported family.

    Raises:
        UnsupportedModel: Its ``model_type`` has no adapter, or it is quantized already.
        NotEnoughMemory: It does not fit beside its caches; nothing was loaded.
        ModelLoadError: It is not there, cannot be read, lacks tensors, or has no chat template.
    """
    check_installed(config)
    settings = read_config(config.model)
    prompts = _make_prompts(config.model, settings)
    demand = describe(config, settings, read_tensors(config.model, download=True))
    needs = check_memory(demand)
    family = FAMILIES[settings.model_type]
    try:
        model = _load_weights(demand, family)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"{config.model}: cannot be loaded: {error}") from error
    stops = _stop_token_ids(model.generation_config.eos_token_id, prompts.tokenizer.eos_token_id)
    spec = replace(_spec(demand, model, stops), reserved_bytes=needs.encoder_cache + needs.working)
    return family.model(model, prompts, spec)


def describe(config: EngineConfig, settings: Any, tensors: Mapping[str, StoredTensor]) -> Demand:
    """A checkpoint as it would run, without its weights.

    Args:
        config: Limits of the engine.
        settings: The checkpoint's configuration.
        tensors: What its files hold.

    Raises:
        UnsupportedModel: It is quantized already.
        ModelLoadError: No model can be made of its configuration, or there is no such device.
    """
    if getattr(settings, "quantization_config", None) is not None:
        raise UnsupportedModel(
            f"{config.model}: is quantized already, which is not supported; use the original with "
            "quantization: int8"
        )
    stored = stored_dtype(tensors)
    asked = settings.dtype or stored if config.dtype == "auto" else config.dtype
    dtype = getattr(torch, asked) if isinstance(asked, str) else asked
    try:
        with torch.device("meta"):
            skeleton = FAMILIES[settings.model_type].stock.from_config(deepcopy(settings))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelLoadError(f"{config.model}: config.json describes no model: {error}") from error
    return Demand(config, skeleton, dtype, resolve_device(config.device), is_converted=stored != dtype)


def _make_prompts(name: str, settings: Any) -> PromptPreparer:
    family = settings.model_type
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModel(f"{name}: family {family!r} is not supported; supported are {known}")
    try:
        # why: for a text model this is its tokenizer
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ModelLoadError(f"{name}: the processor cannot be loaded: {error}") from error
    if not getattr(processor, "chat_template", None):
        raise ModelLoadError(f"{name}: the processor has no chat template, so it cannot chat")
    return FAMILIES[family].prompts(processor, settings)


def read_config(name: str) -> Any:
    """The configuration of a checkpoint.

    Raises:
        ModelLoadError: There is none that can be read.
    """
    path = Path(name).expanduser()
    if path.is_file():
        raise ModelLoadError(
            f"{name} is a file, and a vision-language model is a folder with config.json and *.safetensors: "
            "give that folder, or a hub name"
        )
    if name.startswith((".", "/", "~")) and not path.is_dir():
        raise ModelLoadError(f"{name}: there is no such directory; give a checkpoint directory or a hub name")
    problem = hub_problem() if is_hub_name(name) else None
    try:
        # why: where nothing is said, one that brings code along asks at the terminal whether to run it
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if problem is not None and isinstance(error, OSError):
            raise ModelLoadError(
                f"{name}: is not on this machine, and {problem}; give a checkpoint directory, or connect once"
            ) from error
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


def _load_weights(demand: Demand, family: Family) -> Any:
    name = demand.config.model
    quantized = loading_arguments(demand.skeleton) if demand.config.quantization == "int8" else {}
    model, info = family.stock.from_pretrained(
        name,
        dtype=demand.dtype,
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **quantized,
    )
    for what, key in _FAULTS:
        found = sorted(each if isinstance(each, str) else each[0] for each in info[key])
        if found:
            listed = ", ".join(found[:5]) + (" …" if len(found) > 5 else "")
            raise ModelLoadError(f"{name}: the checkpoint {what.format(len(found))}: {listed}")
    text = model.config.get_text_config()
    _check_layers(name, text)
    model.set_attn_implementation(register() if text is model.config else {"text_config": register()})
    if quantized:
        quantize_head(model)
    return model.eval().requires_grad_(False).to(demand.device)


def _check_layers(name: str, text: Any) -> None:
    """Refuse decoders with layers that are no attention over all, or over a window, of what is cached."""
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModel(f"{name}: layers of kind {', '.join(sorted(kinds))} are not supported")


def _spec(demand: Demand, model: Any, stops: frozenset[int]) -> ModelSpec:
    config, device = demand.config, demand.device
    text = model.config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    use_varlen = (
        device.type == "cuda"
        and model.dtype in {torch.bfloat16, torch.float16}
        and all(
            works(
                text.num_attention_heads,
                text.num_key_value_heads,
                head_dim,
                config.block_size,
                model.dtype,
                window=window,
            )
            for window in _windows(text)
        )
    )
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
        use_kernels=_use_kernels(config, model.dtype, device),
        use_varlen=use_varlen,
        use_graphs=use_varlen and config.cuda_graphs and not config.block_size % PAGE_MULTIPLE,
        max_new_tokens=model.generation_config.max_new_tokens,
    )


def _windows(text: Any) -> list[int | None]:
    """Windows of the layers of a decoder, each once; None for layers that see all."""
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    return [text.sliding_window if kind == "sliding_attention" else None for kind in sorted(kinds)]


def _use_kernels(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the CPU kernels are to be used; raises where they are asked for and cannot be had."""
    fits = device.type == "cpu" and dtype == torch.bfloat16
    if config.cpu_kernels == "torch" or not (fits or config.cpu_kernels == "native"):
        return False
    try:
        load_library()
    except KernelsUnavailable as error:
        if config.cpu_kernels == "native":
            raise ModelLoadError(f"cpu_kernels: native: {error}; or use cpu_kernels: auto") from None
        log.info("the CPU runs on torch's kernels: %s", error)
        return False
    if not fits:
        raise ModelLoadError(
            f"cpu_kernels: native: they compute bfloat16 on the CPU, not {dtype} on {device}; "
            "set dtype: bfloat16 and device: cpu, or use cpu_kernels: auto"
        )
    return True


def _stop_token_ids(*values: int | list[int] | None) -> frozenset[int]:
    """All ids that end an answer.

    why: the tokenizer's own counts too, since a checkpoint without a generation config falls back
    to its family's default, which need not be in its vocabulary.
    """
    lists = [value if isinstance(value, list) else [value] for value in values]
    return frozenset(token_id for ids in lists for token_id in ids if token_id is not None)
