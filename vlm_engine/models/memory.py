"""What a model needs in memory, worked out from its shape before a weight is read."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vlm_engine.config import EngineConfig
from vlm_engine.errors import NotEnoughMemory
from vlm_engine.kv_cache import bytes_per_token
from vlm_engine.models.free_memory import free_memory
from vlm_engine.models.quantizing import SCALE_BYTES, decoder_linears

GIB = 2**30
MIN_CACHE_TOKENS = 4096
"""Tokens of the smallest KV cache that is worth a start, where the model's context is longer."""

# why: beside what is counted there are buffers of libraries; CUDA's own context is made at its first use.
_LIBRARIES = {"cpu": GIB // 4, "cuda": GIB}
_LARGE_PICTURE_TOKENS = 4096
_PATCHES_PER_TOKEN = 4
_COPIES = 3


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes on the device of a running engine.

    Args:
        weights: In the element type chosen, quantized where that is asked for.
        kv_cache: Of the tokens configured, else of the fewest that are worth a start.
        encoder_cache: Embeddings of ``encoder_cache_tokens`` image tokens.
        working: An estimate of what steps, encoder slices and libraries take besides.
    """

    weights: int
    kv_cache: int
    encoder_cache: int
    working: int

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.kv_cache + self.encoder_cache + self.working

    def __str__(self) -> str:
        """The sum and its parts."""
        parts = (
            f"weights {gib(self.weights)}",
            f"KV cache {gib(self.kv_cache)}",
            f"encoder cache {gib(self.encoder_cache)}",
            f"working room {gib(self.working)}",
        )
        return f"{gib(self.total)} ({', '.join(parts)})"


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """Who asks for memory: a model by its shape, and how it would run.

    Args:
        config: Limits of the engine.
        skeleton: The stock model without weights, on torch's ``meta`` device.
        dtype: Element type with which it would run.
        device: Where it would run.
        is_converted: Whether its files hold another element type, so that all weights are copied.
    """

    config: EngineConfig
    skeleton: Any
    dtype: torch.dtype
    device: torch.device
    is_converted: bool

    @property
    def text(self) -> Any:
        """Configuration of the decoder."""
        return self.skeleton.config.get_text_config()

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory of one token in the KV cache."""
        text = self.text
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return bytes_per_token(text.num_hidden_layers, text.num_key_value_heads, head_dim, self.dtype)

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together."""
        longest = int(self.text.max_position_embeddings)
        return min(self.config.max_model_len or longest, longest)

    @property
    def words(self) -> str:
        """The weights' element type as people read it."""
        dtype, kind = str(self.dtype).removeprefix("torch."), self.config.quantization
        return dtype if kind == "none" else f"{kind} and {dtype}"

    @property
    def cache_tokens(self) -> int:
        """Tokens of the KV cache, the fewest that are worth a start where none are configured."""
        return self.config.kv_cache_tokens or min(MIN_CACHE_TOKENS, self.max_model_len)

    def needs(self) -> MemoryNeeds:
        """What it takes on its device."""
        return MemoryNeeds(
            self._weights(),
            self.cache_tokens * self.kv_bytes_per_token,
            self.config.encoder_cache_tokens * self._bytes_per_image_token(),
            self._working(),
        )

    def _weights(self) -> int:
        size = self.dtype.itemsize * sum(weight.numel() for weight in self.skeleton.parameters())
        head = self.skeleton.get_output_embeddings()
        is_tied = head.weight is self.skeleton.get_input_embeddings().weight
        if self.config.quantization == "int8":
            linears = [*decoder_linears(self.skeleton), head]
            size -= self.dtype.itemsize * sum(
                each.weight.numel() for each in linears if each is not head or not is_tied
            )
            size += sum(each.weight.numel() + SCALE_BYTES * each.out_features for each in linears)
        elif is_tied and self.is_converted:
            # why: the head is packed for its kernel, the embedding is read by rows; unconverted, that stays a
            # mapped file of which only the rows in use are in memory
            size += head.weight.numel() * self.dtype.itemsize
        return int(size)

    def _bytes_per_image_token(self) -> int:
        vision = getattr(self.skeleton.config, "vision_config", None)
        if vision is None:
            return 0
        num_deepstack = len(getattr(vision, "deepstack_visual_indexes", None) or ())
        return int(self.text.hidden_size) * (1 + num_deepstack) * self.dtype.itemsize

    def _working(self) -> int:
        """A step of the most tokens, logits and their copies, a long context gathered, a large picture."""
        text, config = self.text, self.config
        step = config.max_num_batched_tokens * 4 * (text.hidden_size + text.intermediate_size) * 4
        logits = config.max_num_seqs * text.vocab_size * 4 * _COPIES
        layer = self.kv_bytes_per_token // text.num_hidden_layers
        context = min(self.cache_tokens, self.max_model_len) * layer * _COPIES
        return int(step + logits + context) + self._picture() + _LIBRARIES.get(self.device.type, 0)

    def _picture(self) -> int:
        decoder = set(decoder_linears(self.skeleton))
        others = [each for each in self.skeleton.modules() if isinstance(each, nn.Linear)]
        head = self.skeleton.get_output_embeddings()
        widths = [each.out_features for each in others if each not in decoder and each is not head]
        tokens = min(self.config.encoder_cache_tokens, _LARGE_PICTURE_TOKENS)
        patches = tokens * _PATCHES_PER_TOKEN
        return patches * max(widths, default=0) * self.dtype.itemsize * _COPIES

    def changed(self, **changes: Any) -> "Demand":
        """The same model, run otherwise."""
        config = replace(self.config, **changes)
        dtype = self.dtype if config.dtype == self.config.dtype else getattr(torch, config.dtype)
        return replace(self, config=config, dtype=dtype)


def check_memory(demand: Demand) -> MemoryNeeds:
    """Refuse what would not fit, before it is loaded.

    Returns:
        What it needs.

    Raises:
        NotEnoughMemory: It says what is needed, what is there, and which settings would fit.
    """
    needs, free = demand.needs(), free_memory(demand.device)
    name = demand.config.model
    if needs.total > free:
        raise NotEnoughMemory(
            f"{name}: needs {needs} in {demand.words} on {demand.device}, {gib(free)} are free; "
            f"{what_would_fit(demand, free)}"
        )
    host = free_memory(torch.device("cpu"))
    if demand.device.type != "cpu" and demand.is_converted and needs.weights > host:
        raise NotEnoughMemory(
            f"{name}: its weights are converted in main memory, which takes {gib(needs.weights)}, "
            f"{gib(host)} are free; set dtype: auto to load them as they are stored"
        )
    return needs


def what_would_fit(demand: Demand, free: int) -> str:
    """Settings with which a model that does not fit would, as a sentence."""
    needs, found = demand.needs(), []
    tokens = (free - needs.total + needs.kv_cache) // demand.kv_bytes_per_token
    if tokens >= min(MIN_CACHE_TOKENS, demand.max_model_len):
        found.append(f"kv_cache_tokens: {tokens // demand.config.block_size * demand.config.block_size}")
    found += [
        ", ".join(f"{name}: {value}" for name, value in change.items())
        for change in _changes(demand)
        if demand.changed(**change).needs().total <= free
    ]
    if found:
        return f"it would fit with {' or with '.join(found)}"
    left = max(0, free - needs.total + needs.weights) // demand.dtype.itemsize
    return f"about {left / 1e6:,.0f} million parameters would fit in {demand.words}"


def _changes(demand: Demand) -> list[dict[str, Any]]:
    """What could be set otherwise, what costs least first."""
    smaller: dict[str, Any] = {"encoder_cache_tokens": MIN_CACHE_TOKENS}
    half = {"dtype": "bfloat16"}
    int8 = {"quantization": "int8"}
    single = [smaller] if demand.config.encoder_cache_tokens > MIN_CACHE_TOKENS else []
    single += [half] if demand.dtype.itemsize > torch.bfloat16.itemsize else []
    single += [int8] if demand.config.quantization == "none" else []
    every = {name: value for change in single for name, value in change.items()}
    return [*single, every] if len(single) > 1 else single


def gib(num_bytes: int) -> str:
    """Bytes as people read them."""
    return f"{num_bytes / GIB:.2f} GiB"
