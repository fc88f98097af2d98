"""The paged attention function itself, against plain causal attention over each sequence alone."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vlm_engine.attention import AttentionMetadata, paged_attention, prepare
from vlm_engine.kv_cache import KVCache
from vlm_engine.spans import Span

HEAD_DIM = 64
BLOCK = 16
LAYER: Any = SimpleNamespace(layer_idx=1)
CPU = torch.device("cpu")


def make_cache(num_blocks: int, num_kv_heads: int) -> KVCache:
    """A cache full of NaN: whoever reads a slot that was not written sees it."""
    cache = KVCache(2, num_blocks * BLOCK, num_kv_heads, HEAD_DIM, dtype=torch.float32, device=CPU)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    return cache


def random_sequence(
    num_tokens: int, num_heads: int, num_kv_heads: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, values ``[1, heads, num_tokens, HEAD_DIM]``."""
    generator = torch.Generator().manual_seed(seed)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    q, k, v = (torch.randn(1, n, num_tokens, HEAD_DIM, generator=generator) for n in heads)
    return q, k, v


def one_pass(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention in float64, ``[1, num_tokens, num_heads, HEAD_DIM]``."""
    num_shared = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(num_shared, dim=1) for t in (k, v))
    return scaled_dot_product_attention(q.double(), k, v, is_causal=True).transpose(1, 2).float()


def block_tables(lengths: Sequence[int], *, is_scattered: bool) -> tuple[list[list[int]], int]:
    """Blocks of each sequence, and how many there are in all."""
    counts = [-(-length // BLOCK) for length in lengths]
    ids = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(4)).tolist()
    ids = ids if is_scattered else sorted(ids)
    return [[ids.pop() if is_scattered else ids.pop(0) for _ in range(count)] for count in counts], sum(
        counts
    )


def attend(
    parts: Sequence[tuple[Tensor, Tensor, Tensor]], metadata: AttentionMetadata, window: int | None = None
) -> Tensor:
    q, k, v = (torch.cat([part[i] for part in parts], dim=2) for i in range(3))
    out, weights = paged_attention(LAYER, q, k, v, None, HEAD_DIM**-0.5, window, paged=metadata)
    assert weights is None
    return out


def cut(sequence: tuple[Tensor, Tensor, Tensor], start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (tensor[:, :, start:end] for tensor in sequence)
    return q, k, v


@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("num_kv_heads", [8, 2, 1])
def test_a_thousand_tokens_in_chunks_of_256(num_kv_heads: int, is_scattered: bool) -> None:
    """256, 256, 256 and 232 tokens against one causal pass, 8 heads of 64."""
    sequence = random_sequence(1000, 8, num_kv_heads, seed=1)
    (blocks,), num_blocks = block_tables([1000], is_scattered=is_scattered)
    cache = make_cache(num_blocks, num_kv_heads)
    outputs = []
    for start in range(0, 1000, 256):
        end = min(start + 256, 1000)
        metadata = prepare([Span(end - start, end, blocks)], cache, BLOCK, CPU)
        outputs.append(attend([cut(sequence, start, end)], metadata))
    assert [output.shape[1] for output in outputs] == [256, 256, 256, 232]
    torch.testing.assert_close(torch.cat(outputs, dim=1), one_pass(*sequence), rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_any_chunk_size(chunk: int) -> None:
    sequence = random_sequence(100, 4, 2, seed=2)
    (blocks,), num_blocks = block_tables([100], is_scattered=True)
    cache = make_cache(num_blocks, 2)
    outputs = []
    for start in range(0, 100, chunk):
        end = min(start + chunk, 100)
        metadata = prepare([Span(end - start, end, blocks)], cache, BLOCK, CPU)
        outputs.append(attend([cut(sequence, start, end)], metadata))
    torch.testing.assert_close(torch.cat(outputs, dim=1), one_pass(*sequence), rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_scattered", [False, True])
def test_sequences_of_one_step_do_not_see_each_other(is_scattered: bool) -> None:
    """Decodes of several lengths, a first chunk, a later chunk and a whole prompt, packed into one row."""
    spans = [(49, 50), (0, 1), (96, 97), (0, 40), (30, 77), (16, 18)]
    sequences = [random_sequence(end, 4, 2, seed=10 + i) for i, (_, end) in enumerate(spans)]
    tables, num_blocks = block_tables([end for _, end in spans], is_scattered=is_scattered)
    cache = make_cache(num_blocks, 2)
    for (start, _), sequence, blocks in zip(spans, sequences, tables, strict=True):
        if start:
            metadata = prepare([Span(start, start, blocks)], cache, BLOCK, CPU)
            attend([cut(sequence, 0, start)], metadata)
    step = [Span(end - start, end, blocks) for (start, end), blocks in zip(spans, tables, strict=True)]
    parts = [cut(sequence, start, end) for (start, end), sequence in zip(spans, sequences, strict=True)]
    output = attend(parts, prepare(step, cache, BLOCK, CPU))
    expected = [one_pass(*s)[:, start:end] for (start, end), s in zip(spans, sequences, strict=True)]
    torch.testing.assert_close(output, torch.cat(expected, dim=1), rtol=0, atol=1e-5)


def dense(
    sequence: tuple[Tensor, Tensor, Tensor], both_ways: Sequence[tuple[int, int]], window: int | None
) -> Tensor:
    """As `one_pass`, by the rule itself: the past and one's own image, of both what is in the window."""
    q, k, v = (t.double() for t in sequence)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    place = torch.arange(q.shape[2])
    mask = place[:, None] >= place
    for begin, end in both_ways:
        mask[begin:end, begin:end] = True
    if window is not None:
        mask &= place > place[:, None] - window
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).float()


# The images of the sequence below are at 10 to 30 and at 45 to 52: cut before them, behind, and inside one
# whose first part was computed with all of it (as a cached prefix ends).
CUTS = {
    "one": (60,),
    "around": (10, 30, 45, 52, 53, 54, 60),
    "text": (4, 33, 60),
    "singles": (8, 9, 10, 31, 60),
}


@pytest.mark.parametrize("window", [None, 1, 6, 33, 100])
@pytest.mark.parametrize("cuts", CUTS)
def test_images_that_attend_both_ways_and_windows(cuts: str, window: int | None) -> None:
    sequence, both_ways = random_sequence(60, 4, 2, seed=5), ((10, 30), (45, 52))
    (blocks,), num_blocks = block_tables([60], is_scattered=True)
    cache, outputs, start = make_cache(num_blocks, 2), [], 0
    for end in CUTS[cuts]:
        own = tuple(pair for pair in both_ways if pair[0] < end and start < pair[1])
        metadata = prepare([Span(end - start, end, blocks, own)], cache, BLOCK, CPU)
        outputs.append(attend([cut(sequence, start, end)], metadata, window))
        start = end
    wanted = dense(sequence, both_ways, window)
    torch.testing.assert_close(torch.cat(outputs, dim=1), wanted, rtol=0, atol=1e-5)
    again = prepare([Span(9, 30, blocks, both_ways[:1])], cache, BLOCK, CPU)
    output = attend([cut(sequence, 21, 30)], again, window)
    torch.testing.assert_close(output, wanted[:, 21:30], rtol=0, atol=1e-5)


def test_windows_of_sequences_side_by_side() -> None:
    """Decodes of several lengths, longer and shorter than the window, and a chunk."""
    lengths, window = (3, 20, 50, 40), 18
    sequences = [random_sequence(length, 4, 2, seed=30 + length) for length in lengths]
    tables, num_blocks = block_tables(lengths, is_scattered=True)
    cache = make_cache(num_blocks, 2)
    for sequence, length, blocks in zip(sequences, lengths, tables, strict=True):
        attend([sequence], prepare([Span(length, length, blocks)], cache, BLOCK, CPU))
    counts = (1, 1, 1, 9)
    spans = [Span(n, length, blocks) for n, length, blocks in zip(counts, lengths, tables, strict=True)]
    last = [cut(s, length - n, length) for s, n, length in zip(sequences, counts, lengths, strict=True)]
    output = attend(last, prepare(spans, cache, BLOCK, CPU), window)
    wanted = [dense(s, (), window)[:, -n:] for s, n in zip(sequences, counts, strict=True)]
    torch.testing.assert_close(output, torch.cat(wanted, dim=1), rtol=0, atol=1e-5)


def test_other_layers_are_left_alone() -> None:
    sequence = random_sequence(20, 2, 2, seed=3)
    cache = make_cache(2, 2)
    attend([sequence], prepare([Span(20, 20, [1, 0])], cache, BLOCK, CPU))
    assert cache.keys[0].isnan().all()
    assert torch.equal(cache.keys[1][BLOCK : 2 * BLOCK], sequence[1][0, :, :BLOCK].transpose(0, 1))
    assert torch.equal(cache.values[1][:4], sequence[2][0, :, BLOCK:].transpose(0, 1))
    assert cache.values[1][4:BLOCK].isnan().all()


def test_what_a_stranger_left_in_the_cache_harms_nobody() -> None:
    """Decodes of several lengths side by side, with NaN in every block that is none of theirs."""
    lengths = (3, 20, 50)
    sequences = [random_sequence(length, 4, 2, seed=20 + length) for length in lengths]
    cache, tables = make_cache(12, 2), [[5], [7, 2], [11, 3, 9, 4]]
    for sequence, length, blocks in zip(sequences, lengths, tables, strict=True):
        attend([sequence], prepare([Span(length, length, blocks)], cache, BLOCK, CPU))
    spans = [Span(1, length, blocks) for length, blocks in zip(lengths, tables, strict=True)]
    last = [cut(sequence, length - 1, length) for sequence, length in zip(sequences, lengths, strict=True)]
    output = attend(last, prepare(spans, cache, BLOCK, CPU))
    expected = torch.cat([one_pass(*sequence)[:, -1:] for sequence in sequences], dim=1)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
