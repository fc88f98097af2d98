"""Packed linear layers compute what plain ones do."""

import copy

import pytest
import torch
from torch import nn

from vlm_engine.models.packing import PackedLinear, pack_linears


def layers(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(48, 80, bias=False), nn.SiLU(), nn.Sequential(nn.Linear(80, 24)))
    return model.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("shape", [(1, 48), (2, 48), (300, 48), (1, 7, 48)])
def test_packed_layers_give_the_same(shape: tuple[int, ...]) -> None:
    plain = layers(torch.bfloat16)
    packed = copy.deepcopy(plain)
    if not pack_linears(packed):
        pytest.skip("this torch has no packed linear layers")
    x = torch.randn(shape, dtype=torch.bfloat16)
    with torch.inference_mode():
        wanted, given = plain(x), packed(x)
    assert given.shape == wanted.shape
    assert torch.allclose(wanted.float(), given.float(), atol=0.02, rtol=0.02)
    assert isinstance(packed[2][0], PackedLinear)


def test_float32_stays_as_it_is() -> None:
    """Token equality with `generate()` is proved in float32 on the stock layers."""
    model = layers(torch.float32)
    assert pack_linears(model) == 0
    assert type(model[0]) is nn.Linear
