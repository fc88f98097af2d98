"""Attention both ways inside a vision tower, row range by row range: with torch, or in the CPU kernels."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vlm_engine.models.base import ModelSpec
from vlm_engine.native.ops import AttentionPanels, attend_windows, split_heads

Segment = tuple[int, int]
Rotation = tuple[Tensor, Tensor] | None


class TowerAttention(Protocol):
    """Queries, keys and values of the block at hand of one image."""

    def put(self, qkv: Tensor, first: int, rotation: Rotation) -> None:
        """Take ``[num_rows, 3 * num_heads * head_dim]`` as rows from `first` on.

        Args:
            qkv: What the block's projection gave.
            first: First of the rows.
            rotation: cos and sin, float32 ``[num_rows, 1, head_dim]``; None without rotary positions.
        """

    def rows(self, start: int, end: int, frame: Segment) -> Tensor:
        """Rows ``[start, end)`` over all keys of their frame: ``[end - start, num_heads, head_dim]``.

        The rows of a frame are asked for in order, after all of them were put.
        """

    def windows(self, segments: Sequence[Segment]) -> Tensor:
        """Neighbouring windows, each over its own keys: their rows, as `rows` gives them."""


def make_attention(num_heads: int, num_rows: int, head_dim: int, spec: ModelSpec) -> TowerAttention:
    """Room for one image."""
    kind = NativeTowerAttention if spec.use_kernels and not head_dim % 2 else TorchTowerAttention
    return kind(num_heads, num_rows, head_dim, spec)


class TorchTowerAttention:
    """With torch's ``scaled_dot_product_attention``; sizes as in `make_attention`."""

    def __init__(self, num_heads: int, num_rows: int, head_dim: int, spec: ModelSpec) -> None:
        # why: by heads, since attention reads a head's keys as one piece of memory (a quarter faster)
        shape = (3, num_heads, num_rows, head_dim)
        self._qkv = torch.empty(shape, dtype=spec.dtype, device=spec.device)

    def put(self, qkv: Tensor, first: int, rotation: Rotation) -> None:
        """See `TowerAttention`."""
        _, num_heads, _, head_dim = self._qkv.shape
        parts, rows = qkv.view(len(qkv), 3, num_heads, head_dim), slice(first, first + len(qkv))
        if rotation is None:
            self._qkv[:, :, rows] = parts.permute(1, 2, 0, 3)
            return
        self._qkv[:2, :, rows] = _rotate(parts[:, :2], *rotation).permute(1, 2, 0, 3)
        self._qkv[2, :, rows] = parts[:, 2].transpose(0, 1)

    def rows(self, start: int, end: int, frame: Segment) -> Tensor:
        """See `TowerAttention`."""
        keys, values = self._qkv[1:, None, :, slice(*frame)]
        return scaled_dot_product_attention(self._qkv[0, None, :, start:end], keys, values)[0].transpose(0, 1)

    def windows(self, segments: Sequence[Segment]) -> Tensor:
        """See `TowerAttention`."""
        runs = _equal_runs(segments)
        return torch.cat([_attend_run(self._qkv[:, :, begin:end], count) for begin, end, count in runs])


class NativeTowerAttention:
    """In the CPU kernels; sizes as in `make_attention`, the size of a head even."""

    def __init__(self, num_heads: int, num_rows: int, head_dim: int, spec: ModelSpec) -> None:
        self._qkv = torch.empty(3, num_heads, num_rows, head_dim, dtype=torch.bfloat16)
        self._scale = head_dim**-0.5
        self._panels: AttentionPanels | None = None

    def put(self, qkv: Tensor, first: int, rotation: Rotation) -> None:
        """See `TowerAttention`."""
        self._panels = None
        split_heads(qkv, rotation, self._qkv, first)

    def rows(self, start: int, end: int, frame: Segment) -> Tensor:
        """See `TowerAttention`."""
        if self._panels is None or start == frame[0]:
            _, num_heads, _, head_dim = self._qkv.shape
            self._panels = AttentionPanels(num_heads, frame[1] - frame[0], head_dim)
            self._panels.pack(*(part.contiguous() for part in self._qkv[1:, :, slice(*frame)]))
        return self._panels.attend(self._qkv[0, :, start:end], self._scale)

    def windows(self, segments: Sequence[Segment]) -> Tensor:
        """See `TowerAttention`."""
        first, last = segments[0][0], segments[-1][1]
        bounds = torch.tensor([begin - first for begin, _ in segments] + [last - first])
        return attend_windows(self._qkv[:, :, first:last], bounds, self._scale)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in float32, as the stock tower does; ``[rows, 2, heads, head_dim]``."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return wide * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def _attend_run(qkv: Tensor, num_windows: int) -> Tensor:
    """Attention inside windows of one size: ``[3, heads, rows, head_dim]`` to ``[rows, heads, head_dim]``."""
    _, num_heads, num_rows, head_dim = qkv.shape
    query, keys, values = qkv.reshape(3, num_heads, num_windows, -1, head_dim)
    attended = scaled_dot_product_attention(query, keys, values)
    return attended.reshape(num_heads, num_rows, head_dim).transpose(0, 1)


def _equal_runs(segments: Sequence[Segment]) -> list[tuple[int, int, int]]:
    """Neighbouring windows of one size as ``(begin, end, count)``, to be attended in one call."""
    runs: list[tuple[int, int, int]] = []
    for begin, end in segments:
        if runs and (runs[-1][1] - runs[-1][0]) == (end - begin) * runs[-1][2]:
            runs[-1] = (runs[-1][0], end, runs[-1][2] + 1)
        else:
            runs.append((begin, end, 1))
    return runs
