"""Starting weights: a picture's low frequencies, smooth places, and sizes that keep the variance."""

import math
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def initialize(model: Any) -> None:
    """Set the starting weights of a stock model in place (float32)."""
    depth = len(model.model.language_model.layers) + len(model.model.visual.blocks)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            is_output = name.endswith(("proj", "linear_fc2", "o_proj", "down_proj"))
            scale = 1 / math.sqrt(depth) if is_output else 1.0
            nn.init.normal_(module.weight, std=scale / math.sqrt(module.in_features))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    nn.init.normal_(model.model.language_model.embed_tokens.weight, std=0.05)
    visual = model.model.visual
    visual.patch_embed.proj.weight.copy_(cosine_filters(visual.patch_embed.proj.weight.shape))
    nn.init.zeros_(visual.patch_embed.proj.bias)
    visual.pos_embed.weight.copy_(smooth_places(visual.pos_embed.weight.shape))
    for merger in visual.deepstack_merger_list:
        nn.init.zeros_(merger.linear_fc2.weight)


def cosine_filters(shape: torch.Size) -> Tensor:
    """First layer as the lowest two-dimensional cosines of brightness and two colour differences.

    shape: [width, 3, frames, 16, 16]. High frequencies are amplified as natural pictures lack them.
    """
    width, _, frames, size, _ = shape
    order = sorted(
        ((u, v) for u in range(size) for v in range(size)), key=lambda f: (f[0] + f[1], abs(f[0] - f[1]))
    )
    colours = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, 0.0], [-0.5, -0.5, 1.0]])
    colours = colours / colours.norm(dim=1, keepdim=True)
    places = (torch.arange(size) + 0.5) / size
    filters = []
    for i in range(width):
        u, v = order[i // 3]
        wave = torch.cos(math.pi * u * places)[:, None] * torch.cos(math.pi * v * places)
        gain = 0.5 * (1 + u + v) * (1.0 if i % 3 == 0 else 1.6)
        filters.append(colours[i % 3][:, None, None] * wave / wave.norm() * gain / size * 1.2)
    return torch.stack(filters)[:, :, None].expand(-1, -1, frames, -1, -1) / frames


def smooth_places(shape: torch.Size) -> Tensor:
    """Position embeddings as random mixtures of low cosines over the square grid: [side * side, width]."""
    side, width = math.isqrt(shape[0]), shape[1]
    places = torch.linspace(0, 1, side)
    waves = [
        (torch.cos(math.pi * u * places)[:, None] * torch.cos(math.pi * v * places)).flatten()
        for u in range(6)
        for v in range(6)
        if u + v
    ]
    basis = torch.stack(waves, 1)
    return 0.3 * basis @ torch.randn(len(waves), width) / math.sqrt(len(waves) / 4)
