"""The demo VLM's size, and a training forward that equals the stock Qwen3-VL at a fraction of its cost.

Pictures of one size go through the tower as a batch ``[B, N, D]``; the text half runs over trees: one
prefix (with the picture) and several branches that each see the prefix and themselves.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

GRID = (16, 28)
NUM_PICTURE_TOKENS = GRID[0] * GRID[1] // 4


def model_config(vocab_size: int, special_ids: dict[str, int]) -> Any:
    """Build the Qwen3-VL configuration of the demo model."""
    from transformers import Qwen3VLConfig

    text = {
        "vocab_size": vocab_size,
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "pad_token_id": special_ids["<|endoftext|>"],
        "bos_token_id": None,
        "eos_token_id": special_ids["<|im_end|>"],
    }
    vision = {
        "depth": 4,
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_heads": 3,
        "out_hidden_size": 192,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=special_ids["<|image_pad|>"],
        video_token_id=special_ids["<|video_pad|>"],
        vision_start_token_id=special_ids["<|vision_start|>"],
        vision_end_token_id=special_ids["<|vision_end|>"],
    )


@dataclass(slots=True)
class Trees:
    """A batch of T prefixes of P tokens with K branches of L tokens each.

    ids, positions (m-RoPE, [3, ...]), picture (row of the flat picture tokens, -1 for text), and
    targets (the next token where it belongs to an answer, -100 elsewhere). Padding: prefix ids at
    the end, marked by ``prefix_length``; branch ids at the end, with targets of -100.
    """

    prefix_ids: Tensor
    prefix_positions: Tensor
    prefix_picture: Tensor
    prefix_length: Tensor
    branch_ids: Tensor
    branch_positions: Tensor
    targets: Tensor


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _rms(x: Tensor, norm: nn.Module) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)  # type: ignore[arg-type]


class FastVlm:
    """The training forward over the modules of a stock ``Qwen3VLForConditionalGeneration``.

    It owns no weights. ``grid`` is the patch grid (rows, columns) that every picture has.
    """

    def __init__(self, model: Any, grid: tuple[int, int] = GRID) -> None:
        self.visual, self.text = model.model.visual, model.model.language_model
        self.heads = model.config.vision_config.num_heads
        self.text_config = model.config.text_config
        self.num_patches = grid[0] * grid[1]
        self._place_patches(grid)

    def _place_patches(self, grid: tuple[int, int]) -> None:
        from transformers.vision_utils import (
            get_vision_interpolation_indices_and_weights,
            get_vision_position_ids,
        )

        sizes = torch.tensor([[1, *grid]])
        visual = self.visual
        self.taps, self.tap_weights = get_vision_interpolation_indices_and_weights(
            sizes, visual.num_grid_per_side, "bilinear", True, 2
        )
        positions = get_vision_position_ids(sizes, 2)
        self.cos, self.sin = visual.rotary_pos_emb(torch.zeros(1), positions)

    def encode(self, pixels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run the tower up to the last layer of its mergers.

        pixels: [B, N, 768], patches in merge order, one temporal frame. Returns what the last linear
        layers of the merger and of the DeepStack mergers read, each [B, N / 4, 4 * D].
        """
        visual = self.visual
        weight = visual.patch_embed.proj.weight.sum(2).flatten(1)
        x = F.linear(pixels, weight, visual.patch_embed.proj.bias)
        places = (visual.pos_embed(self.taps) * self.tap_weights[..., None].to(x.dtype)).sum(1)
        x = x + places
        cos, sin = self.cos.to(x.dtype)[:, None], self.sin.to(x.dtype)[:, None]
        deep = []
        for i, block in enumerate(visual.blocks):
            x = x + self._vision_attention(block.attn, block.norm1(x), cos, sin)
            x = x + block.mlp(block.norm2(x))
            if i in visual.deepstack_visual_indexes:
                deep.append(x)
        mergers = visual.deepstack_merger_list
        return _merge(visual.merger, x), [_merge(m, d) for m, d in zip(mergers, deep, strict=True)]

    def _vision_attention(self, attn: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = attn.qkv(x).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.unbind(2)
        q = ((q * cos + _rotate_half(q) * sin) * attn.scaling).transpose(1, 2)
        k = (k * cos + _rotate_half(k) * sin).permute(0, 2, 3, 1)
        out = torch.softmax(q @ k, -1) @ v.transpose(1, 2)
        return attn.proj(out.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]

    def finish(self, merged: Tensor, deep: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Apply the last linear layers of the mergers: what the text half reads, [B, N / 4, width]."""
        mergers = self.visual.deepstack_merger_list
        finished = [m.linear_fc2(d) for m, d in zip(mergers, deep, strict=True)]
        return self.visual.merger.linear_fc2(merged), finished

    def _text_rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = self.text.rotary_emb(torch.zeros(1, dtype=dtype), positions.reshape(3, 1, -1))
        return cos[0][:, None], sin[0][:, None]

    def answer_states(self, trees: Trees, pictures: Tensor, deep: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Run the text half; returns the states [M, D] that predict answer tokens, and those tokens [M]."""
        num_prefix = trees.prefix_ids.numel()
        ids = torch.cat((trees.prefix_ids.flatten(), trees.branch_ids.flatten()))
        slots = trees.prefix_picture.flatten()
        is_picture = (slots >= 0)[:, None]
        x = self.text.embed_tokens(ids)
        slots = slots.clamp(min=0)
        head = torch.where(is_picture, pictures.flatten(0, 1)[slots], x[:num_prefix])
        x = torch.cat((head, x[num_prefix:]))
        positions = torch.cat((trees.prefix_positions.flatten(1), trees.branch_positions.flatten(1)), 1)
        cos, sin = self._text_rope(positions, x.dtype)
        mask = self._branch_mask(trees, x.dtype)
        for i, layer in enumerate(self.text.layers):
            x = x + self._text_attention(
                layer.self_attn, _rms(x, layer.input_layernorm), cos, sin, mask, trees
            )
            x = x + layer.mlp(_rms(x, layer.post_attention_layernorm))
            if i < len(deep):
                extra = deep[i].flatten(0, 1)[slots] * is_picture
                x = torch.cat((x[:num_prefix] + extra, x[num_prefix:]))
        targets = trees.targets.flatten()
        wanted = (targets >= 0).nonzero()[:, 0]
        return _rms(x[num_prefix:][wanted], self.text.norm), targets[wanted]

    def _branch_mask(self, trees: Trees, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        """Additive masks: prefix padding [T, 1, 1, P] (None without), a branch's own future [L, L]."""
        places = torch.arange(trees.prefix_ids.shape[1])
        padded = (places >= trees.prefix_length[:, None])[:, None, None, :]
        length = trees.branch_ids.shape[2]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        low = torch.tensor(-1e4, dtype=dtype)
        zero = torch.tensor(0.0, dtype=dtype)
        padding = torch.where(padded, low, zero) if bool(padded.any()) else None
        return padding, torch.where(future, low, zero)

    def _text_attention(
        self, attn: Any, x: Tensor, cos: Tensor, sin: Tensor, mask: tuple[Tensor | None, Tensor], trees: Trees
    ) -> Tensor:
        heads, dim = self.text_config.num_attention_heads, attn.head_dim
        groups = attn.num_key_value_groups
        q = _rms(attn.q_proj(x).view(len(x), heads, dim), attn.q_norm)
        k = _rms(attn.k_proj(x).view(len(x), -1, dim), attn.k_norm)
        v = attn.v_proj(x).view(len(x), -1, dim).repeat_interleave(groups, 1)
        q = (q * cos + _rotate_half(q) * sin) * attn.scaling
        k = (k * cos + _rotate_half(k) * sin).repeat_interleave(groups, 1)
        out = tree_attention(q, k, v, mask, trees)
        return attn.o_proj(out.reshape(len(x), heads * dim))  # type: ignore[no-any-return]

    def loss(self, trees: Trees, pictures: Tensor, deep: list[Tensor]) -> Tensor:
        """Mean cross-entropy of the answer tokens."""
        states, targets = self.answer_states(trees, pictures, deep)
        logits = F.linear(states, self.text.embed_tokens.weight)
        return F.cross_entropy(logits.float(), targets)


def _merge(merger: Any, x: Tensor) -> Tensor:
    width = merger.hidden_size
    batch = x.shape[0]
    if merger.use_postshuffle_norm:
        x = merger.norm(x.reshape(batch, -1, width))
    else:
        x = merger.norm(x).reshape(batch, -1, width)
    return merger.act_fn(merger.linear_fc1(x))  # type: ignore[no-any-return]


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: tuple[Tensor | None, Tensor], trees: Trees
) -> Tensor:
    """Attention over trees: a prefix sees its past, a branch the prefix and its own past.

    q (scaled), k, v: [T * P + T * K * L, heads, dim], prefixes before branches. Returns the same shape.
    """
    count, branches, length = trees.branch_ids.shape
    prefix = trees.prefix_ids.shape[1]
    heads, dim = q.shape[1:]
    cut = count * prefix
    pq, pk, pv = (t[:cut].view(count, prefix, heads, dim).transpose(1, 2) for t in (q, k, v))
    first = F.scaled_dot_product_attention(pq, pk, pv, is_causal=True, scale=1.0)
    bq, bk, bv = (t[cut:].view(count, branches, length, heads, dim).permute(0, 3, 1, 2, 4) for t in (q, k, v))
    far = bq.reshape(count, heads, -1, dim) @ pk.transpose(-1, -2)
    far = far if mask[0] is None else far + mask[0]
    near = bq @ bk.transpose(-1, -2) + mask[1]
    scores = torch.cat((far.view(count, heads, branches, length, prefix), near), -1)
    weights = torch.softmax(scores, -1)
    from_prefix = weights[..., :prefix].reshape(count, heads, -1, prefix) @ pv
    second = from_prefix.view(bq.shape) + weights[..., prefix:] @ bv
    return torch.cat(
        (
            first.transpose(1, 2).reshape(cut, heads, dim),
            second.permute(0, 2, 3, 1, 4).reshape(-1, heads, dim),
        )
    )
