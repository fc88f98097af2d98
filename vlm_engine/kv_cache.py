"""The tensors behind the block pool."""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of all layers, by slot; slot ``block_id * block_size + offset``.

    Args:
        num_layers: Decoder layers.
        num_slots: Tokens that fit, a whole number of blocks.
        num_kv_heads: Key/value heads.
        head_dim: Size of a head.
        dtype: Element type, that of the model.
        device: Where the tensors live.
        spare_slots: As many more, a whole block, behind the others, for rows without a sequence.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        spare_slots: int = 0,
    ) -> None:
        self.spare_block = num_slots // spare_slots if spare_slots else None
        shape = (num_slots + spare_slots, num_kv_heads, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``[num_tokens, num_kv_heads, head_dim]`` at ``slots [num_tokens]`` of a layer."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Memory that one token takes in the cache, in bytes."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
