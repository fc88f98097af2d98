"""Attention of packed sequences through the paged KV cache.

transformers calls `paged_attention` in every decoder layer (it is registered with its
``AttentionInterface``); what the step knows comes along as the keyword ``paged`` and is prepared
once a step. Sequences are packed into one row, so no padding is computed outside the decodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from vlm_engine.kv_cache import KVCache
from vlm_engine.spans import Span
from vlm_engine.varlen import VarlenLayout, attend_varlen, lay_out

IMPLEMENTATION = "vlm_engine_paged"
Slots = slice | Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a step, the slots that they read, and which of these each may see, None for all before it."""

    rows: slice
    slots: Slots
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Layout:
    """Rows ``[0, n)`` of the decodes, one query each, then the other sequences."""

    decodes: _Part | None
    prefills: tuple[_Part, ...]


@dataclass(frozen=True)
class AttentionMetadata:
    """Everything that attention needs to know of a step, for all layers.

    Args:
        cache: Where keys and values are.
        spans: Sequences in the order of their rows; those with one query stand first.
        slots: Where the keys and values of each are, ``[num_context]`` on the CPU.
        write_slots: ``[num_tokens]``, where this step's keys and values go.
        block_size: Tokens a block.
        varlen: The step for the variable-length kernel, None for torch's plain one.
    """

    cache: KVCache
    spans: tuple[Span, ...]
    slots: tuple[Tensor, ...]
    write_slots: Tensor
    block_size: int = 16
    varlen: VarlenLayout | None = None
    _layouts: dict[int | None, _Layout] = field(default_factory=dict, repr=False, compare=False)

    def layout(self, window: int | None) -> _Layout:
        """What torch's attention needs for layers of one window: masks and padding, made on first use."""
        if window not in self._layouts:
            self._layouts[window] = self._lay_out(window)
        return self._layouts[window]

    def _lay_out(self, window: int | None) -> _Layout:
        device, spans = self.write_slots.device, self.spans
        firsts = [_first_seen(span, window) for span in spans]
        slots = [own[first:] for own, first in zip(self.slots, firsts, strict=True)]
        num_decodes = sum(span.num_queries == 1 for span in spans)
        prefills, row = [], num_decodes
        for index in range(num_decodes, len(spans)):
            span = spans[index]
            rows = slice(row, row + span.num_queries)
            mask = _mask(span, firsts[index], window, device)
            prefills.append(_Part(rows, _on(device, slots[index]), mask))
            row += span.num_queries
        return _Layout(_decodes(slots[:num_decodes], device) if num_decodes else None, tuple(prefills))


def prepare(
    spans: Sequence[Span], cache: KVCache, block_size: int, device: torch.device, *, use_varlen: bool = False
) -> AttentionMetadata:
    """Lay out a step.

    Args:
        spans: Sequences in the order of their rows; those with one query stand first.
        cache: The KV cache.
        block_size: Tokens a block.
        device: Where the model runs.
        use_varlen: Whether the variable-length kernel computes.
    """
    slots = tuple(_slots(span, block_size) for span in spans)
    write = torch.cat(
        [s[span.num_context - span.num_queries :] for s, span in zip(slots, spans, strict=True)]
    )
    num_decodes = sum(span.num_queries == 1 for span in spans)
    assert all(span.num_queries == 1 for span in spans[:num_decodes]), "decodes stand first"
    # why: the kernel knows no tokens that see later ones; steps with such run on the plain one
    is_plain = any(span.both_ways for span in spans)
    varlen = lay_out(spans, slots, block_size, device) if use_varlen and not is_plain else None
    return AttentionMetadata(cache, tuple(spans), slots, write.to(device), block_size, varlen)


def _slots(span: Span, block_size: int) -> Tensor:
    blocks = torch.tensor(span.block_ids, dtype=torch.long)
    return (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[: span.num_context]


def _on(device: torch.device, slots: Tensor) -> Slots:
    """The slots as a slice where they are consecutive, so that reading them copies nothing."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first + 1 == len(slots) and bool((slots[1:] > slots[:-1]).all()):
        return slice(first, last + 1)
    return slots.to(device)


def _first_seen(span: Span, window: int | None) -> int:
    """First position that any query of a span sees."""
    return 0 if window is None else max(0, span.num_context - span.num_queries - window + 1)


def _mask(span: Span, first: int, window: int | None, device: torch.device) -> Tensor | None:
    """``[num_queries, num_context - first]``, True where a query may look; None for all that is before it."""
    before = span.num_context - span.num_queries
    is_windowed = window is not None and window < span.num_context
    if not (before or is_windowed or span.both_ways):
        return None
    mask = torch.ones(span.num_queries, span.num_context - first, dtype=torch.bool, device=device)
    mask.tril_(before - first)
    for begin, end in span.both_ways:
        mask[max(begin - before, 0) : end - before, max(begin - first, 0) : end - first] = True
    return mask if window is None else mask.triu_(before - first - window + 1)


def _decodes(slots: list[Tensor], device: torch.device) -> _Part:
    rows = slice(0, len(slots))
    if len(slots) == 1:
        return _Part(rows, _on(device, slots[0]), None)
    padded = nn.utils.rnn.pad_sequence(slots, batch_first=True, padding_value=-1)
    # why: a masked value still counts if it is NaN (0 * NaN), so padding must read no stranger's slot
    padded = torch.where(padded < 0, padded[:, :1], padded)
    lengths = torch.tensor([len(s) for s in slots])
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    return _Part(rows, padded.to(device), mask[:, None, None, :].to(device))


def attend(
    query: Tensor, layer: int, metadata: AttentionMetadata, scale: float | None, window: int | None = None
) -> Tensor:
    """Attention of one layer: variable-length on CUDA, else torch's ``scaled_dot_product_attention``.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``; keys and values are already written.
        layer: Index of the layer.
        metadata: The step.
        scale: Factor on the scores; None means ``head_dim ** -0.5``.
        window: Newest positions that a query of this layer sees, its own among them; None for all.

    Returns:
        ``[num_tokens, num_heads, head_dim]``.
    """
    keys, values = metadata.cache.keys[layer], metadata.cache.values[layer]
    if metadata.varlen is not None:
        return attend_varlen(query, keys, values, metadata.varlen, metadata.block_size, scale, window)
    parts = []
    layout = metadata.layout(window)
    if layout.decodes is not None:
        parts.append(_attend_decodes(query, keys, values, layout.decodes, scale))
    for span in layout.prefills:
        q, k, v = (t.transpose(0, 1)[None] for t in (query[span.rows], keys[span.slots], values[span.slots]))
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=span.mask, is_causal=span.mask is None, scale=scale, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _attend_decodes(
    query: Tensor, keys: Tensor, values: Tensor, decodes: _Part, scale: float | None
) -> Tensor:
    """One query a sequence: the heads that share a key head become the queries of one call."""
    n, (_, num_heads, head_dim), num_kv_heads = decodes.rows.stop, query.shape, keys.shape[1]
    q = query[:n].reshape(n, num_kv_heads, num_heads // num_kv_heads, head_dim)
    k, v = (t[decodes.slots].view(n, -1, num_kv_heads, head_dim).transpose(1, 2) for t in (keys, values))
    out = scaled_dot_product_attention(q, k, v, attn_mask=decodes.mask, scale=scale)
    return out.reshape(n, num_heads, head_dim)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    *,
    paged: AttentionMetadata,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: write this step's keys and values, then attend through the cache.

    Args:
        module: The attention layer; its ``layer_idx`` names the layer.
        query: ``[1, num_heads, num_tokens, head_dim]``.
        key: ``[1, num_kv_heads, num_tokens, head_dim]``, rotated.
        value: As `key`.
        attention_mask: Not used; who sees whom is in `paged`.
        scaling: Factor on the scores.
        sliding_window: Newest positions that a query of this layer sees, its own among them; None for all.
        paged: The step.

    Returns:
        ``[1, num_tokens, num_heads, head_dim]`` and no weights.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    paged.cache.write(layer, paged.write_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    out = attend(query[0].transpose(0, 1), layer, paged, scaling, sliding_window)
    return out[None], None


def register() -> str:
    """Make the paged attention known to transformers; returns its name.

    why: it is given no function for masks, so that transformers prepares none (`masking_utils` says so), nor
    what it would need for one: measured 0.4 ms a step of a decoder with windows.
    """
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    return IMPLEMENTATION
