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


# which things a word of a question or of an answer looks for
VEHICLES = ("car", "bus", "truck")
LOOKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("people", "anybody", "anyone", "somebody", "clothes", "wear", "wears"), ("person",)),
    **{word: (word,) for word in ("person", *VEHICLES, "bicycle", "dog")},
    "cars": ("car",),
    "buses": ("bus",),
    "trucks": ("truck",),
    "dogs": ("dog",),
    **dict.fromkeys(("bicycles", "bike", "bikes"), ("bicycle",)),
    **dict.fromkeys(("colour", "vehicle"), VEHICLES),
}
MARKED = ("person", *VEHICLES, "bicycle", "dog")
# how much of a word's own embedding a label channel carries
WORD_SHARES = {
    "cover": 0.4,
    "centre": 1.0,
    "second": 0.3,
    "action": 0.8,
    "time": 0.5,
    "place": 0.5,
    "token": 0.15,
}


@torch.no_grad()
def bind_words(model: Any, writer: nn.Linear, channels: dict[str, int], word_ids: dict[str, int]) -> None:
    """Let a picture token that shows a thing look like the thing's word, and one head look for it.

    channels: label channel names (``centre car``) to columns of ``writer``; word_ids: words to token
    ids. Without this start, the text half needs thousands of steps to find out that the word in a
    question and the mark in a picture token belong together.
    """
    table = model.model.language_model.embed_tokens.weight
    width = table.shape[1]
    marks = torch.linalg.qr(torch.randn(width, len(MARKED)))[0]
    writer.bias.zero_()
    for name, column in channels.items():
        kind, word = name.split()
        noise = nn.functional.normalize(torch.randn(width), dim=0)
        own = nn.functional.normalize(table[word_ids[word]], dim=0) if word in word_ids else noise
        value = WORD_SHARES.get(kind, 1.0) * own + 0.2 * noise
        if word in MARKED and kind in ("cover", "centre"):
            value = value + (1.0 if kind == "centre" else 0.4) * marks[:, MARKED.index(word)]
        writer.weight[:, column] = 1.1 * value
    _bind_head(model.model.language_model.layers[0].self_attn, table, marks, word_ids)


def _bind_head(attn: Any, table: Tensor, marks: Tensor, word_ids: dict[str, int]) -> None:
    """Set the first head so that a word's query meets the key of the picture tokens that bear its mark."""
    width, dim = table.shape[1], attn.head_dim
    known = [word for word in LOOKS if word in word_ids]
    words = nn.functional.normalize(table[[word_ids[word] for word in known]], dim=1)
    sought = [[MARKED.index(label) for label in LOOKS[word]] for word in known]
    wanted = torch.stack([nn.functional.normalize(marks[:, columns].sum(1), dim=0) for columns in sought])
    every = nn.functional.normalize(table, dim=1)
    gram = words.T @ words + 0.02 * every.T @ every + 1e-3 * torch.eye(width)
    to_mark = torch.linalg.solve(gram, words.T @ wanted).T
    frame = torch.linalg.qr(torch.randn(width, width))[0]
    keys, values = frame[:dim], frame[dim : 2 * dim]
    own = 0.35 * torch.eye(width)
    attn.k_proj.weight[:dim] = keys @ (own + 3 * marks @ marks.T)
    attn.q_proj.weight[:dim] = keys @ (own + 3 * to_mark + 1.5 * marks @ marks.T)
    attn.v_proj.weight[:dim] = 0.9 * values
    attn.o_proj.weight[:, :dim] = 0.7 * values.T
