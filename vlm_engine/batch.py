"""A plan as tensors: the packed tokens of one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlm_engine.attention import AttentionMetadata, prepare
from vlm_engine.kv_cache import KVCache
from vlm_engine.models.base import ImageRows, PreparedPrompt
from vlm_engine.plan import Chunk
from vlm_engine.spans import Span

Features = Mapping[bytes, tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's input; rows are tokens, sequences stand one after the other.

    Args:
        chunks: The plan's chunks in the order of their rows, single tokens first.
        token_ids: ``[num_tokens]``.
        positions: ``[num_axes, num_tokens]``.
        images: Image embeddings that go into the rows.
        sample_rows: ``[num_samples]``, of each chunk that reaches the newest token the row of that, then
            those of its proposed ones.
        paged: What attention needs.
    """

    chunks: tuple[Chunk, ...]
    token_ids: Tensor
    positions: Tensor
    images: tuple[ImageRows, ...]
    sample_rows: Tensor
    paged: AttentionMetadata


def build_batch(
    chunks: Sequence[Chunk],
    prompts: Mapping[str, PreparedPrompt],
    features: Features,
    cache: KVCache,
    block_size: int,
    device: torch.device,
    *,
    use_varlen: bool = False,
    use_graphs: bool = False,
) -> Batch:
    """Pack the chunks of a plan.

    Args:
        chunks: At most one for each sequence, none empty.
        prompts: By request id.
        features: Embeddings of every image that a chunk reads, by digest.
        cache: The KV cache.
        block_size: Tokens a block.
        device: Where the model runs.
        use_varlen: Whether attention runs on the variable-length kernel.
        use_graphs: Whether steps of single rows are replayed, so that proposed tokens stand as such.
    """
    ordered = sorted(chunks, key=lambda chunk: chunk.num_tokens > 1 and not (use_graphs and chunk.proposed))
    first_rows, num_rows = [], 0
    for chunk in ordered:
        first_rows.append(num_rows)
        num_rows += chunk.num_tokens
    images = [
        rows
        for chunk, first in zip(ordered, first_rows, strict=True)
        for rows in _image_rows(chunk, first, features)
    ]
    token_ids = [t for chunk in ordered for t in chunk.token_ids]
    positions = torch.cat(
        [chunk_positions(prompts[c.sequence.request_id], c.start, c.start + c.num_tokens) for c in ordered],
        dim=1,
    )
    samples = [
        row
        for c, first in zip(ordered, first_rows, strict=True)
        if c.samples
        for row in range(first + c.end - c.start - 1, first + c.num_tokens)
    ]
    spans = [span for chunk in ordered for span in _spans(chunk, use_graphs=use_graphs)]
    return Batch(
        tuple(ordered),
        torch.tensor(token_ids, device=device),
        positions.to(device),
        tuple(images),
        torch.tensor(samples, dtype=torch.long, device=device),
        prepare(spans, cache, block_size, device, use_varlen=use_varlen),
    )


def _spans(chunk: Chunk, *, use_graphs: bool) -> list[Span]:
    """A chunk as attention sees it.

    why: keys and values of all rows are written before any is read, so that a row of its own that sees one
    position more than the row before gives the same as a row of a chunk, and fits a recorded decode step.
    """
    block_ids, end = chunk.sequence.block_ids, chunk.start + chunk.num_tokens
    if use_graphs and chunk.proposed:
        return [Span(1, seen, block_ids) for seen in range(chunk.end, end + 1)]
    return [Span(chunk.num_tokens, end, block_ids, _both_ways(chunk))]


def chunk_positions(prompt: PreparedPrompt, start: int, end: int) -> Tensor:
    """``[num_axes, end - start]``: the prompt's own positions, after it the index plus the delta."""
    num_prompt = prompt.positions.shape[1]
    own = prompt.positions[:, start:end]
    if end <= num_prompt:
        return own
    later = torch.arange(max(start, num_prompt), end) + prompt.position_delta
    return torch.cat([own, later.expand(len(own), -1)], dim=1)


def _both_ways(chunk: Chunk) -> tuple[tuple[int, int], ...]:
    images = chunk.sequence.images_between(chunk.start, chunk.end)
    return tuple((image.start, image.end) for image in images if image.attends_both_ways)


def _image_rows(chunk: Chunk, first_row: int, features: Features) -> list[ImageRows]:
    """The part of each image that the chunk covers, and the row where it goes."""
    rows = []
    for image in chunk.sequence.images_between(chunk.start, chunk.end):
        begin, end = max(chunk.start, image.start), min(chunk.end, image.end)
        part = slice(begin - image.start, end - image.start)
        own = tuple(feature[part] for feature in features[image.digest])
        rows.append(ImageRows(first_row + begin - chunk.start, own))
    return rows
