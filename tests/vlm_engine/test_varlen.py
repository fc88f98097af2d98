"""The variable-length kernel is told the right thing: a kernel in plain torch that follows its documentation
stands in for it on a CPU; on CUDA the real one is compared."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen
from torch.nn.functional import scaled_dot_product_attention

from tests.vlm_engine.reference import Case, Family, run
from vlm_engine import varlen
from vlm_engine.attention import attend, prepare
from vlm_engine.kv_cache import KVCache
from vlm_engine.spans import Span

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16


def documented_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """``torch.nn.attention.varlen.varlen_attn`` as its docstring tells it, causal from the lower right."""
    assert all(t.dtype == torch.int32 for t in (cu_seq_q, cu_seq_k))
    left, right = window_size
    assert right == 0
    assert enable_gqa == (query.shape[1] != key.shape[-2])
    assert (block_table is None) == (seqused_k is None)
    out = torch.full_like(query, torch.nan)
    for i in range(len(cu_seq_q) - 1):
        rows = slice(int(cu_seq_q[i]), int(cu_seq_q[i + 1]))
        if block_table is None:
            k, v = (t[int(cu_seq_k[i]) : int(cu_seq_k[i + 1])] for t in (key, value))
        else:
            assert seqused_k is not None
            k, v = (t[block_table[i].long()].flatten(0, 1)[: int(seqused_k[i])] for t in (key, value))
        num_queries, num_keys = rows.stop - rows.start, len(k)
        assert num_queries <= max_q
        assert num_keys <= max_k
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril_(num_keys - num_queries)
        if left >= 0:
            mask.triu_(num_keys - num_queries - left)
        q, k, v = (t.transpose(0, 1)[None] for t in (query[rows], k, v))
        part = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        out[rows] = part[0].transpose(0, 1)
    return out


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_varlen, "varlen_attn", documented_kernel)


def spans_of(block_size: int) -> list[Span]:
    """Two decodes, a chunk behind a cached part, a whole prompt; blocks in no order."""
    lengths = [(1, 5), (1, 3 * block_size), (6, 2 * block_size + 7), (9, 9)]
    blocks = iter([7, 2, 9, 4, 0, 5, 1, 8, 3, 6, 11, 10, 12])
    return [Span(n, total, [next(blocks) for _ in range(-(-total // block_size))]) for n, total in lengths]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("window", [None, 1, 5, 600])
@pytest.mark.parametrize("block_size", [4, 16, 256])
def test_it_gives_what_plain_attention_gives(block_size: int, window: int | None) -> None:
    torch.manual_seed(1)
    cpu, spans = torch.device("cpu"), spans_of(block_size)
    cache = KVCache(1, 13 * block_size, NUM_KV_HEADS, HEAD_DIM, dtype=torch.float32, device=cpu)
    cache.keys[0].normal_()
    cache.values[0].normal_()
    query = torch.randn(sum(span.num_queries for span in spans), NUM_HEADS, HEAD_DIM)
    plain = attend(query, 0, prepare(spans, cache, block_size, cpu), 0.3, window)
    step = prepare(spans, cache, block_size, cpu, use_varlen=True)
    assert step.varlen is not None
    assert (step.varlen.block_table is not None) == (block_size % 256 == 0)
    assert torch.allclose(attend(query, 0, step, 0.3, window), plain, atol=1e-5)


@pytest.fixture
def family(qwen2_5_vl_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    family = Family.load(qwen2_5_vl_checkpoint)
    object.__setattr__(family.model.spec, "use_varlen", True)
    yield family
    object.__setattr__(family.model.spec, "use_varlen", False)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("block_size", [16, 256])
def test_tokens_equal_generate(family: Family, block_size: int) -> None:
    cases = [
        Case("text", ("What is happening here?",), 12),
        Case("frame", ("and", family.picture(3), "What is this?"), 8),
        Case("two", (family.picture(4, 4, 4), "and", family.picture(3)), 8),
    ]
    engine = family.engine(block_size=block_size, max_num_batched_tokens=20)
    assert run(engine, cases, every=2) == {case.name: family.greedy(case) for case in cases}


def test_a_kernel_that_is_not_there_or_lies_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(varlen.torch, "device", lambda name: torch.empty(0).device)
    monkeypatch.setattr(varlen.torch, "Generator", lambda device: torch.random.default_generator)
    sizes = (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, 16, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(torch_varlen, "varlen_attn", documented_kernel)
        assert varlen.works(*sizes)
        assert varlen.works(*sizes, window=5)
        patch.setattr(torch_varlen, "varlen_attn", lambda query, *_, **__: query)
        assert not varlen.works(*sizes)
        assert "gives other numbers" in caplog.text
    assert not varlen.works(*sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("block_size", [16, 256])
def test_the_real_kernel_works(block_size: int) -> None:
    assert varlen.works(12, 4, 64, block_size, torch.bfloat16)
