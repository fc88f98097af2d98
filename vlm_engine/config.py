"""Settings of the engine."""

from dataclasses import dataclass
from typing import Literal

DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What model runs, where, and within which limits.

    Args:
        model: Directory of a Hugging Face checkpoint, or its hub name.
        dtype: Element type of the weights; ``auto`` takes the checkpoint's.
        device: ``cpu``, ``cuda``, ``cuda:1`` …; ``auto`` takes CUDA where there is one.
        max_model_len: Longest prompt and output together, in tokens; None takes the model's.
        block_size: Tokens a KV block.
        kv_cache_tokens: Size of the KV cache in tokens; None takes a share of the free memory, at
            most what ``max_num_seqs`` sequences of ``max_model_len`` need.
        kv_cache_memory: That share, 0 to 1.
        max_num_seqs: Sequences that run at once.
        max_num_batched_tokens: Tokens a step computes, and so the largest prefill chunk.
        encoder_cache_tokens: Image tokens whose embeddings are kept; also the largest image.
        num_threads: Threads of torch's CPU kernels; None leaves torch's default.
        enable_prefix_caching: Reuse the KV blocks of equal prompt starts.

    Raises:
        ValueError: A number is out of its range; the message names the field.
    """

    model: str
    dtype: DType = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_tokens: int | None = None
    kv_cache_memory: float = 0.3
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    encoder_cache_tokens: int = 16384
    num_threads: int | None = None
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        positive = ("block_size", "max_num_seqs", "max_num_batched_tokens", "encoder_cache_tokens")
        optional = ("max_model_len", "kv_cache_tokens", "num_threads")
        for name in (*positive, *optional):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: must be at least 1, not {value}")
        if not 0 < self.kv_cache_memory <= 1:
            raise ValueError(f"kv_cache_memory: must be above 0 and at most 1, not {self.kv_cache_memory}")
        if self.dtype not in DType.__args__:  # type: ignore[attr-defined]
            raise ValueError(f"dtype: must be one of {', '.join(DType.__args__)}, not {self.dtype}")  # type: ignore[attr-defined]
