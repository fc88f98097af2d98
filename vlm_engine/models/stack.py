"""The decoder's layers over a packed step: the stock ones, or all of them in the CPU kernels."""

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vlm_engine.attention import AttentionMetadata
from vlm_engine.kv_cache import KVCache
from vlm_engine.models.base import ImageRows, ModelSpec
from vlm_engine.models.graphs import GraphStack
from vlm_engine.models.packing import pack_linears
from vlm_engine.native.library import Geometry, Layer, Span, load_library
from vlm_engine.native.ops import NativeGate, NativeLinear, can_pack, pointer

# invariant: layers of these classes are norm, rotary attention, norm, SiLU-gated MLP, and nothing else.
LLAMA_LIKE = frozenset(
    {
        "LlamaDecoderLayer",
        "Qwen2DecoderLayer",
        "Qwen3DecoderLayer",
        "Qwen2VLDecoderLayer",
        "Qwen2_5_VLDecoderLayer",
        "Qwen3VLTextDecoderLayer",
    }
)


class DecoderStack(Protocol):
    """From input embeddings to what the head reads."""

    def __call__(
        self, embeds: Tensor, positions: Tensor, images: Sequence[ImageRows], paged: AttentionMetadata
    ) -> Tensor:
        """Run a step.

        Args:
            embeds: ``[num_tokens, hidden]``, the images' input embeddings in their rows; may be changed.
            positions: As the stock decoder takes them, ``[1, num_tokens]`` or ``[3, 1, num_tokens]``.
            images: For DeepStack: what each of the first layers adds to the images' rows.
            paged: The step.

        Returns:
            ``[num_tokens, hidden]``, after the last norm.
        """


def make_stack(decoder: Any, spec: ModelSpec) -> DecoderStack:
    """The fastest way to run the layers of a stock decoder; the stock layers may be gone afterwards."""
    if spec.use_kernels and _is_llama_like(decoder):
        return NativeStack(decoder, spec)
    pack_linears(decoder, use_kernels=spec.use_kernels)
    stack = StockStack(decoder)
    return GraphStack(stack, spec.max_model_len) if spec.use_graphs else stack


class StockStack:
    """The stock decoder, whose layers use the paged attention.

    Args:
        decoder: For example ``LlamaModel``.
    """

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def __call__(
        self, embeds: Tensor, positions: Tensor, images: Sequence[ImageRows], paged: AttentionMetadata
    ) -> Tensor:
        """See `DecoderStack`."""
        output = self._decoder(
            inputs_embeds=embeds[None],
            position_ids=positions,
            use_cache=False,
            paged=paged,
            **_deepstack(images, embeds),
        )
        return output.last_hidden_state[0]  # type: ignore[no-any-return]


def _deepstack(images: Sequence[ImageRows], embeds: Tensor) -> dict[str, Any]:
    """The stock decoder's DeepStack arguments: which rows are image rows, and what each layer adds."""
    if not images or len(images[0].features) == 1:
        return {}
    mask = torch.zeros(1, len(embeds), dtype=torch.bool, device=embeds.device)
    for rows in images:
        mask[0, rows.first_row : rows.first_row + len(rows.features[0])] = True
    layers = zip(*(rows.features[1:] for rows in images), strict=True)
    return {"visual_pos_masks": mask, "deepstack_visual_embeds": [torch.cat(layer) for layer in layers]}


def _is_llama_like(decoder: Any) -> bool:
    linears = [module for module in decoder.layers.modules() if isinstance(module, nn.Linear)]
    # why: the kernels know no window
    has_windows = "sliding_attention" in (getattr(decoder.config, "layer_types", None) or ())
    names = {type(layer).__name__ for layer in decoder.layers}
    return names <= LLAMA_LIKE and not has_windows and all(map(can_pack, linears))


class NativeStack:
    """All layers in the CPU kernels, a step without a line of Python between them.

    invariant: what a token's row gives does not depend on how the step was put together, bit by bit.

    Args:
        decoder: A stock decoder with layers out of `LLAMA_LIKE`; they are taken over and removed from it.
        spec: The model's numbers.
    """

    def __init__(self, decoder: Any, spec: ModelSpec) -> None:
        self._rotary, self._norm = decoder.rotary_emb, decoder.norm.weight.detach().float()
        self._kept: list[Any] = []
        attention = decoder.layers[0].self_attn
        self._geometry = Geometry(
            decoder.config.hidden_size,
            decoder.config.num_attention_heads,
            spec.num_kv_heads,
            spec.head_dim,
            attention.scaling,
            decoder.config.rms_norm_eps,
        )
        self._layers = (Layer * spec.num_layers)(*map(self._take, decoder.layers))
        decoder.layers = nn.ModuleList()
        self._cache: KVCache | None = None

    def _take(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        parts = (
            NativeLinear(attention.q_proj, attention.k_proj, attention.v_proj),
            NativeLinear(attention.o_proj),
            NativeGate(mlp.gate_proj, mlp.up_proj),
            NativeLinear(mlp.down_proj),
        )
        sources = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            getattr(attention, "q_norm", None),
            getattr(attention, "k_norm", None),
        )
        norms = [None if norm is None else norm.weight.detach().float().contiguous() for norm in sources]
        self._kept += [parts, norms]
        # why: else all weights would be in memory twice until the last layer is taken
        layer._modules.clear()
        return Layer(*map(pointer, norms), *(part.packed for part in parts))

    def __call__(
        self, embeds: Tensor, positions: Tensor, images: Sequence[ImageRows], paged: AttentionMetadata
    ) -> Tensor:
        """See `DecoderStack`."""
        self._use(paged.cache)
        hidden = embeds.contiguous()
        cos, sin = (part[0].float().contiguous() for part in self._rotary(embeds[None], positions))
        slots = [each.to(torch.int32) for each in paged.slots]
        rows, spans = 0, (Span * len(slots))()
        for index, (span, own) in enumerate(zip(paged.spans, slots, strict=True)):
            spans[index] = Span(rows, span.num_queries, span.num_context, own.data_ptr())
            rows += span.num_queries
        num_deep = len(images[0].features) - 1 if images else 0
        for depth in range(num_deep):
            self._run(depth, depth + 1, hidden, cos, sin, paged.write_slots, spans)
            for image in images:
                features = image.features[1 + depth]
                hidden[image.first_row : image.first_row + len(features)] += features
        self._run(num_deep, len(self._layers), hidden, cos, sin, paged.write_slots, spans)
        return self._normed(hidden)

    def _run(
        self, first: int, last: int, hidden: Tensor, cos: Tensor, sin: Tensor, write_slots: Tensor, spans: Any
    ) -> None:
        load_library().vlm_decoder(
            ctypes.byref(self._geometry),
            ctypes.addressof(self._layers[first]),
            last - first,
            hidden.data_ptr(),
            len(hidden),
            cos.data_ptr(),
            sin.data_ptr(),
            write_slots.data_ptr(),
            spans,
            len(spans),
        )

    def _normed(self, hidden: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        load_library().vlm_rms_norm(
            hidden.data_ptr(), self._norm.data_ptr(), out.data_ptr(), *hidden.shape, self._geometry.epsilon
        )
        return out

    def _use(self, cache: KVCache) -> None:
        """Tell the layers where their keys and values are."""
        if cache is self._cache:
            return
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        self._cache = cache
