"""The kernels as torch sees them; tensors are on the CPU, bfloat16 and contiguous unless told otherwise.

Weights may be int8 codes with a scale for each of their rows: a step of few rows reads half as much memory.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlm_engine.native.library import Linear, load_library

PANEL_COLUMNS = 32


def can_pack(linear: nn.Linear) -> bool:
    """Whether the kernels take a layer: on the CPU, an even number of inputs, bfloat16 or codes of it."""
    weight = linear.weight
    is_known = type(weight) is nn.Parameter or is_coded(weight)
    return (
        is_known
        and weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and not linear.in_features % 2
    )


def is_coded(weight: Any) -> bool:
    """Whether a weight is held as int8 codes (``qdata``) with a scale for each row, as torchao does."""
    scale = getattr(weight, "scale", None)
    return isinstance(scale, Tensor) and weight.qdata.dtype == torch.int8 and scale.numel() == len(weight)


class NativeLinear(nn.Module):
    """A linear layer in the kernels' packed layout; the plain weight is not kept.

    invariant: a row's result does not depend on the other rows, bit by bit.

    Args:
        linear: The layer to replace.
        others: Layers of the same input whose columns follow.
    """

    def __init__(self, linear: nn.Linear, *others: nn.Linear) -> None:
        super().__init__()
        layers = (linear, *others)
        self.in_features = linear.in_features
        self.out_features = sum(layer.out_features for layer in layers)
        self._panels = _pack(torch.cat([_numbers(layer) for layer in layers]), None)
        self._scales = _joined_scales([_scales(layer) for layer in layers])
        self._bias = _joined_bias(layers)
        self.packed = _packed(
            self._panels, self._scales, self._bias, self.out_features, self.in_features, activation=0
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[…, in_features]`` to ``[…, out_features]``."""
        return self._run(x, torch.bfloat16)

    def wide(self, x: Tensor) -> Tensor:
        """`forward` in float32 (of bfloat16 precision), without another pass over the result."""
        return self._run(x, torch.float32)

    def _run(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        out = torch.empty(len(rows), self.out_features, dtype=dtype)
        places = (out.data_ptr(), None) if dtype == torch.bfloat16 else (None, out.data_ptr())
        load_library().vlm_linear(ctypes.byref(self.packed), rows.data_ptr(), None, *places, len(rows))
        return out.view(*x.shape[:-1], self.out_features)


class NativeGate(nn.Module):
    """``silu(gate(x)) * up(x)`` in one pass.

    Args:
        gate: Its layer.
        up: Its layer.
    """

    def __init__(self, gate: nn.Linear, up: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = gate.in_features, gate.out_features
        self._panels = _pack(_numbers(gate), _numbers(up))
        self._scales = _paired_scales(_scales(gate), _scales(up))
        self._bias = _joined_bias((gate, up))
        self.packed = _packed(
            self._panels, self._scales, self._bias, 2 * self.out_features, self.in_features, activation=1
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[…, in_features]`` to ``[…, out_features]``."""
        rows = x.reshape(-1, self.in_features).contiguous()
        out = torch.empty(len(rows), self.out_features, dtype=torch.bfloat16)
        load_library().vlm_linear(
            ctypes.byref(self.packed), rows.data_ptr(), None, out.data_ptr(), None, len(rows)
        )
        return out.view(*x.shape[:-1], self.out_features)


def _numbers(linear: nn.Linear) -> Tensor:
    """What is packed of a layer's weight: bfloat16 or codes, ``[out_features, in_features]``."""
    weight: Any = linear.weight
    return (weight.qdata if is_coded(weight) else weight).detach()  # type: ignore[no-any-return]


def _scales(linear: nn.Linear) -> Tensor | None:
    """A coded weight's scales, ``[out_features]``."""
    weight: Any = linear.weight
    return weight.scale.detach().flatten().float() if is_coded(weight) else None


def _joined_scales(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Scales of layers side by side, filled up to whole panels; None for plain layers."""
    scales = [part for part in parts if part is not None]
    return _filled_up(torch.cat(scales), PANEL_COLUMNS) if scales else None


def _paired_scales(gate: Tensor | None, up: Tensor | None) -> Tensor | None:
    """Scales in the order of a gated layer's panels: sixteen of gates, sixteen of ups."""
    if gate is None or up is None:
        return None
    halves = [_filled_up(part, PANEL_COLUMNS // 2).view(-1, PANEL_COLUMNS // 2) for part in (gate, up)]
    return torch.cat(halves, dim=1).flatten()


def _filled_up(values: Tensor, unit: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % unit))


def _pack(weight: Tensor, up: Tensor | None) -> Tensor:
    library = load_library()
    columns, depth = weight.shape[0] * (1 if up is None else 2), weight.shape[1]
    panels = torch.empty(library.vlm_packed_size(columns, depth), dtype=weight.dtype)
    first, second = weight.contiguous(), None if up is None else up.contiguous()
    pack = library.vlm_pack_codes if weight.dtype == torch.int8 else library.vlm_pack_linear
    pack(first.data_ptr(), pointer(second), panels.data_ptr(), columns, depth)
    return panels


def _joined_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    parts = [torch.zeros(each.out_features) if each.bias is None else each.bias.float() for each in layers]
    return torch.cat(parts).contiguous()


def _packed(
    panels: Tensor, scales: Tensor | None, bias: Tensor | None, columns: int, depth: int, *, activation: int
) -> Linear:
    return Linear(panels.data_ptr(), pointer(scales), pointer(bias), columns, depth, activation)


class NativeRMSNorm(nn.Module):
    """Root mean square norm, rounded where the stock one rounds.

    Args:
        weight: ``[hidden]``.
        epsilon: Added to the mean square.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self._weight, self._epsilon = weight.detach().float().contiguous(), epsilon

    def forward(self, x: Tensor) -> Tensor:
        """``[num_rows, hidden]`` to the same."""
        x, out = x.contiguous(), torch.empty_like(x)
        load_library().vlm_rms_norm(
            x.data_ptr(), self._weight.data_ptr(), out.data_ptr(), *x.shape, self._epsilon
        )
        return out


def split_heads(qkv: Tensor, rotation: tuple[Tensor, Tensor] | None, out: Tensor, first: int) -> None:
    """Queries, keys and values by heads, the first two rotated.

    Args:
        qkv: ``[num_rows, 3 * num_heads * head_dim]``.
        rotation: cos and sin, float32 ``[num_rows, …, head_dim]``, halves alike; None rotates nothing.
        out: ``[3, num_heads, all_rows, head_dim]``, written from row `first` on.
        first: Where the rows go.
    """
    _, num_heads, all_rows, head_dim = out.shape
    assert out.is_contiguous()
    cos, sin = rotation or (None, None)
    load_library().vlm_split_heads(
        qkv.data_ptr(),
        pointer(cos),
        pointer(sin),
        out.data_ptr(),
        len(qkv),
        num_heads,
        head_dim,
        all_rows,
        first,
    )


class AttentionPanels:
    """Keys and values of several heads for attention both ways, packed as the kernels read them.

    Args:
        num_heads: Heads.
        num_keys: Rows of each.
        head_dim: Size of a head, even.
    """

    def __init__(self, num_heads: int, num_keys: int, head_dim: int) -> None:
        library = load_library()
        self.shape = (num_heads, num_keys, head_dim)
        self._keys = torch.empty(num_heads * library.vlm_keys_size(num_keys, head_dim), dtype=torch.bfloat16)
        self._values = torch.empty(
            num_heads * library.vlm_values_size(num_keys, head_dim), dtype=torch.bfloat16
        )

    def pack(self, keys: Tensor, values: Tensor) -> None:
        """Take ``[num_heads, num_keys, head_dim]`` each."""
        assert keys.shape == values.shape == self.shape
        assert keys.is_contiguous()
        assert values.is_contiguous()
        load_library().vlm_pack_panels(
            keys.data_ptr(),
            values.data_ptr(),
            self._keys.data_ptr(),
            self._values.data_ptr(),
            *self.shape,
            0,
            self.shape[1],
        )

    def attend(self, query: Tensor, scale: float) -> Tensor:
        """From ``[num_heads, num_rows, head_dim]``, the rows of a head contiguous, to rows first."""
        num_heads, num_keys, head_dim = self.shape
        num_rows = query.shape[1]
        assert query.stride()[1:] == (head_dim, 1)
        out = torch.empty(num_rows, num_heads, head_dim, dtype=torch.bfloat16)
        load_library().vlm_attend_panels(
            query.data_ptr(),
            query.stride(0),
            self._keys.data_ptr(),
            self._values.data_ptr(),
            out.data_ptr(),
            num_heads,
            num_rows,
            num_keys,
            head_dim,
            scale,
        )
        return out


def attend_windows(qkv: Tensor, bounds: Tensor, scale: float) -> Tensor:
    """Attention inside windows.

    Args:
        qkv: ``[3, num_heads, num_rows, head_dim]``, the rows of each head contiguous.
        bounds: int64 ``[num_windows + 1]``, from 0 to ``num_rows``.
        scale: Factor on the scores.

    Returns:
        ``[num_rows, num_heads, head_dim]``.
    """
    _, num_heads, num_rows, head_dim = qkv.shape
    assert qkv.stride()[2:] == (head_dim, 1)
    out = torch.empty(num_rows, num_heads, head_dim, dtype=torch.bfloat16)
    query, keys, values = (part.data_ptr() for part in qkv)
    load_library().vlm_attend_windows(
        query,
        keys,
        values,
        qkv.stride(1),
        out.data_ptr(),
        bounds.data_ptr(),
        len(bounds) - 1,
        num_heads,
        head_dim,
        scale,
    )
    return out


def pointer(tensor: Tensor | None) -> Any:
    """Where a tensor's numbers are, None for none."""
    return None if tensor is None else tensor.data_ptr()
