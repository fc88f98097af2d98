"""Attention of a packed step in one call of torch's variable-length kernel (CUDA).

Keys and values are read through the block table where blocks are as large as the kernel wants its pages
(FlashAttention 2 wants multiples of 256); smaller blocks are gathered first, still for all sequences at once.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vlm_engine.spans import Span

log = logging.getLogger(__name__)

PAGE_MULTIPLE = 256
CAUSAL = (-1, 0)


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """What the kernel needs to know of a step; all tensors int32 on the device.

    Args:
        cu_queries: ``[n + 1]``, where each sequence's rows begin.
        cu_keys: ``[n + 1]``, the same for what it sees.
        max_queries: Most rows of a sequence.
        max_keys: Most keys of a sequence.
        num_keys: ``[n]``, keys of each; None where they are gathered.
        block_table: ``[n, blocks]``, padded with zeros; None where they are gathered.
        slots: int64 ``[num_keys in all]``, what to gather; None with a block table.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int
    num_keys: Tensor | None = None
    block_table: Tensor | None = None
    slots: Tensor | None = None


def lay_out(
    spans: Sequence[Span], slots: Sequence[Tensor], block_size: int, device: torch.device
) -> VarlenLayout:
    """The layout of a step; arguments as of `vlm_engine.attention.prepare`, and the slots of each span."""
    queries = [span.num_queries for span in spans]
    keys = [span.num_context for span in spans]
    cu_queries, cu_keys = (_ints([0, *accumulate(sizes)], device) for sizes in (queries, keys))
    if block_size % PAGE_MULTIPLE:
        gathered = torch.cat(list(slots)).to(device)
        return VarlenLayout(cu_queries, cu_keys, max(queries), max(keys), slots=gathered)
    used = [list(span.block_ids)[: -(-span.num_context // block_size)] for span in spans]
    width = max(map(len, used))
    table = _ints([own + [0] * (width - len(own)) for own in used], device)
    return VarlenLayout(cu_queries, cu_keys, max(queries), max(keys), _ints(keys, device), table)


def _ints(values: Sequence[object], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def attend_varlen(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: VarlenLayout,
    block_size: int,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Attention of one layer.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``, bfloat16 or float16 on CUDA.
        keys: ``[num_slots, num_kv_heads, head_dim]``, those of this step written.
        values: As `keys`.
        layout: The step.
        block_size: Tokens a block.
        scale: Factor on the scores; None means ``head_dim ** -0.5``.
        window: Newest keys that a query sees, its own among them; None for all.

    Returns:
        ``[num_tokens, num_heads, head_dim]``.
    """
    from torch.nn.attention.varlen import varlen_attn

    if layout.slots is not None:
        keys, values = keys[layout.slots], values[layout.slots]
    else:
        keys, values = (part.view(-1, block_size, *part.shape[1:]) for part in (keys, values))
    return varlen_attn(  # type: ignore[return-value]
        query.contiguous(),
        keys,
        values,
        layout.cu_queries,
        layout.cu_keys,
        layout.max_queries,
        layout.max_keys,
        scale=scale,
        window_size=CAUSAL if window is None else (window - 1, 0),
        enable_gqa=query.shape[1] != keys.shape[-2],
        seqused_k=layout.num_keys,
        block_table=layout.block_table,
    )


@torch.inference_mode()
def works(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    *,
    window: int | None = None,
) -> bool:
    """Whether the kernel is there for a model and agrees with torch's plain attention, tried on the device.

    A prompt whose first part is cached and a decode in one call, against each alone; else the log says why.
    """
    device = torch.device("cuda")
    blocks = -(-40 // block_size)
    spans = [Span(1, 33, list(range(blocks))), Span(7, 40, list(range(blocks, 2 * blocks)))]
    shape = (2 * blocks * block_size, num_kv_heads, head_dim)
    generator = torch.Generator(device).manual_seed(0)
    keys, values = torch.randn((2, *shape), generator=generator, device=device, dtype=dtype)
    query = torch.randn((8, num_heads, head_dim), generator=generator, device=device, dtype=dtype)
    slots = [
        torch.arange(first, first + span.num_context)
        for first, span in zip((0, blocks * block_size), spans, strict=True)
    ]
    try:
        layout = lay_out(spans, slots, block_size, device)
        given = attend_varlen(query, keys, values, layout, block_size, None, window)
    except (RuntimeError, ValueError, TypeError, ImportError, NotImplementedError) as error:
        log.info("attention runs on torch's plain kernels: %s", str(error).splitlines()[0])
        return False
    is_close = torch.allclose(
        given.float(), _plainly(query, keys, values, spans, slots, window).float(), atol=0.03
    )
    if not is_close:
        log.warning("attention runs on torch's plain kernels: the variable-length one gives other numbers")
    return is_close


def _plainly(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Sequence[Span],
    slots: Sequence[Tensor],
    window: int | None,
) -> Tensor:
    """What attention gives sequence by sequence."""
    parts, row = [], 0
    for span, own in zip(spans, slots, strict=True):
        before = span.num_context - span.num_queries
        mask = torch.ones(span.num_queries, span.num_context, dtype=torch.bool, device=query.device)
        mask.tril_(before)
        if window is not None:
            mask.triu_(before - window + 1)
        q = query[row : row + span.num_queries].transpose(0, 1)[None]
        k, v = (part[own.to(query.device)].transpose(0, 1)[None] for part in (keys, values))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
        row += span.num_queries
    return torch.cat(parts)
