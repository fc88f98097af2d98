"""Settings of the engine."""

from dataclasses import dataclass
from typing import Literal, get_args

DType = Literal["auto", "float32", "bfloat16", "float16"]
SchedulerKind = Literal["latency", "static"]
CpuKernels = Literal["auto", "native", "torch"]
Quantization = Literal["none", "int8"]
EncodeRoad = Literal["auto", "between", "beside"]
SpeculativeMethod = Literal["ngram"]
MAX_MS = 3_600_000.0


@dataclass(frozen=True, slots=True)
class TurnConfig:
    """How detectors in other processes of this machine share the engine's device.

    Args:
        address: Path of the Unix socket on which they ask for turns; the engine makes it.
        min_per_s: Batches a second that each of them gets under any chat load, of 30 % of the time at most.

    Raises:
        ValueError: A number is out of its range; the message names the field.
    """

    address: str
    min_per_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.min_per_s <= 1000:
            raise ValueError(f"min_per_s: must be above 0 and at most 1000, not {self.min_per_s}")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Which tokens are guessed and computed beside the next one; names as in vLLM.

    Args:
        method: ``ngram`` takes what followed when the last tokens stood in prompt or output before.
        num_speculative_tokens: Most tokens guessed at once.
        prompt_lookup_min: Fewest last tokens that must stand there.
        prompt_lookup_max: Most last tokens that are looked for.
        max_cached_answers: So many of the newest answers to background requests (descriptions of frames) are
            looked in as well for such requests, as they often say the same; 0 for none.

    Raises:
        ValueError: A number is out of its range; the message names the field.
    """

    method: SpeculativeMethod = "ngram"
    num_speculative_tokens: int = 6
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    max_cached_answers: int = 64

    def __post_init__(self) -> None:
        if self.method not in get_args(SpeculativeMethod):
            known = ", ".join(get_args(SpeculativeMethod))
            raise ValueError(f"method: must be one of {known}, not {self.method}")
        if not 0 <= self.max_cached_answers <= 10000:
            raise ValueError(f"max_cached_answers: must be from 0 to 10000, not {self.max_cached_answers}")
        for name, most in (("num_speculative_tokens", 32), ("prompt_lookup_min", 32)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name}: must be from 1 to {most}, not {getattr(self, name)}")
        if not self.prompt_lookup_min <= self.prompt_lookup_max <= 32:
            allowed = f"from prompt_lookup_min ({self.prompt_lookup_min}) to 32"
            raise ValueError(f"prompt_lookup_max: must be {allowed}, not {self.prompt_lookup_max}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What model runs, where, and within which limits.

    Args:
        model: Directory of a Hugging Face checkpoint, or its hub name.
        dtype: Element type of the weights; ``auto`` takes the checkpoint's.
        quantization: ``int8`` keeps the weights of the decoder and its head in eight bits, with a scale
            for each of their rows, by torchao; ``none`` keeps them in `dtype`.
        device: ``cpu``, ``cuda``, ``cuda:1`` …; ``auto`` takes CUDA where there is one.
        max_model_len: Longest prompt and output together, in tokens; None takes the model's.
        block_size: Tokens a KV block; on CUDA 256 lets attention read the cache in place.
        kv_cache_tokens: Size of the KV cache in tokens; None takes a share of the free memory, at
            most what ``max_num_seqs`` sequences of ``max_model_len`` need.
        kv_cache_memory: That share, 0 to 1.
        chat_kv_reserve: Share of the KV cache that background work leaves to chats, for those that come
            and for what chats may want to find again; 0 for none. A background request that is larger
            than what is left may still go into it, until a chat needs it.
        max_num_seqs: Sequences that run at once.
        max_num_batched_tokens: Most tokens a step computes, and so the largest prefill chunk.
        scheduler: ``latency`` fills steps by milliseconds so that chats keep their targets;
            ``static`` fills them by `max_num_batched_tokens` and encodes images whole.
        chat_itl_ms: Milliseconds from one token of a chat to its next.
        chat_ttft_ms: Milliseconds to the first token of a short chat prompt.
        background_share: Least share of the time that background work gets under any chat load.
        background_ttft_ms: Milliseconds to the first token of a background request. What is in time with
            less than `chat_itl_ms` leaves is spread, so that chats are faster than their target.
        encoder_cache_tokens: Image tokens whose embeddings are kept; also the largest image.
        num_threads: Threads of torch's CPU kernels; None leaves torch's default.
        enable_prefix_caching: Reuse the KV blocks of equal prompt starts.
        cpu_kernels: ``native`` runs bfloat16 on the CPU with the engine's own kernels, built by ``g++``
            on first use; ``auto`` does so where they can be had, ``torch`` never.
        cuda_graphs: Replay decode steps as CUDA graphs; needs blocks of 256 tokens (`block_size`).
        encode: ``between`` runs encoder slices between forward passes on all threads of the CPU, ``beside``
            runs them and background prompts on one thread of its own, at the same time as the steps of
            chats; ``auto`` takes `beside` with the native kernels.
        cost_cache: Where it is kept what steps take, so that the next start need not measure it:
            ``auto`` for the user's cache (``XDG_CACHE_HOME``), ``off``, or a folder.
        trace_steps: How many of the newest steps are kept in detail, to be looked at by
            `appliance bench trace`; 0 keeps none.
        speculative: Guess tokens and compute several at once; None for one at a time. No answer changes, but
            where rounding depends on what is computed together (CUDA, torch's bfloat16) and two tokens tie.

    Raises:
        ValueError: A number is out of its range; the message names the field.
    """

    model: str
    dtype: DType = "auto"
    quantization: Quantization = "none"
    device: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_tokens: int | None = None
    kv_cache_memory: float = 0.3
    chat_kv_reserve: float = 0.2
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    scheduler: SchedulerKind = "latency"
    chat_itl_ms: float = 100.0
    chat_ttft_ms: float = 500.0
    background_share: float = 0.1
    background_ttft_ms: float = 4000.0
    encoder_cache_tokens: int = 16384
    num_threads: int | None = None
    enable_prefix_caching: bool = True
    cpu_kernels: CpuKernels = "auto"
    cuda_graphs: bool = True
    encode: EncodeRoad = "auto"
    cost_cache: str = "off"
    trace_steps: int = 0
    speculative: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        self._check_counts()
        for name in ("chat_itl_ms", "chat_ttft_ms", "background_ttft_ms"):
            if not 0 < getattr(self, name) <= MAX_MS:
                allowed = f"above 0 and at most {MAX_MS:.0f} milliseconds"
                raise ValueError(f"{name}: must be {allowed}, not {getattr(self, name)}")
        for name in ("kv_cache_memory", "background_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: must be above 0 and at most 1, not {getattr(self, name)}")
        if not 0 <= self.chat_kv_reserve < 1:
            raise ValueError(f"chat_kv_reserve: must be at least 0 and below 1, not {self.chat_kv_reserve}")
        kinds = (
            ("dtype", DType),
            ("quantization", Quantization),
            ("scheduler", SchedulerKind),
            ("cpu_kernels", CpuKernels),
            ("encode", EncodeRoad),
        )
        for name, choices in ((name, get_args(kind)) for name, kind in kinds):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: must be one of {', '.join(choices)}, not {getattr(self, name)}")

    def _check_counts(self) -> None:
        positive = ("block_size", "max_num_seqs", "max_num_batched_tokens", "encoder_cache_tokens")
        optional = ("max_model_len", "kv_cache_tokens", "num_threads")
        for name in (*positive, *optional):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: must be at least 1, not {value}")
        if self.trace_steps < 0:
            raise ValueError(f"trace_steps: must be 0 or more, not {self.trace_steps}")
