"""The first steps of an engine, made up to learn what steps cost before anybody waits for one."""

import platform
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import asdict
from hashlib import sha256
from itertools import cycle
from pathlib import Path

import torch
import transformers
from PIL import Image

from vlm_engine.budget import Moment
from vlm_engine.config import EngineConfig
from vlm_engine.cost_cache import CostCache, Identity, cache_folder
from vlm_engine.cost_model import StepWork
from vlm_engine.models.base import ModelSpec
from vlm_engine.models.loading import read_config
from vlm_engine.request import GenerationRequest, Message
from vlm_engine.sampling_params import SamplingParams
from vlm_engine.sequence import Placeholder, Sequence

DECODES = StepWork(num_tokens=2, num_samples=2, num_context=200)
"""A step by which stored costs are compared with measured ones."""

_CHUNKS = (16, 256, 64, 128, 32, 512)
_SLICES = (1, 3, 2, 6, 4, 12)
_WITHOUT_COST = frozenset(
    {
        "background_share",
        "background_ttft_ms",
        "chat_itl_ms",
        "chat_kv_reserve",
        "chat_ttft_ms",
        "cost_cache",
        "device",
        "dtype",
        "enable_prefix_caching",
        "encoder_cache_tokens",
        "kv_cache_memory",
        "kv_cache_tokens",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "model",
        "num_threads",
        "scheduler",
        "speculative",
        "trace_steps",
    }
)
"""Settings that change what runs when, not how long it takes."""


class VariedBudget:
    """Steps of many shapes, whatever they take; a `StepBudget` for calibration.

    why: costs are told apart only by steps that differ; a fast device would encode a picture in one step.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.counts: Counter[str] = Counter()
        self._chunks, self._slices = cycle(_CHUNKS), cycle(_SLICES)
        self._num_tokens = self._num_slices = 0

    def begin(self, moment: Moment) -> None:
        """See `WorkBudget`."""
        self._num_tokens = min(next(self._chunks), self.max_num_batched_tokens)
        self._num_slices = next(self._slices)

    def fit_tokens(self, sequence: Sequence, num_wanted: int) -> int:
        """See `WorkBudget`."""
        if sequence.is_decoding:
            return 1
        return min(num_wanted, max(self._num_tokens, sequence.num_together if self._num_tokens else 0))

    def spend_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """See `WorkBudget`."""
        self._num_tokens = max(0, self._num_tokens - num_tokens)

    def take_slices(self, sequence: Sequence, image: Placeholder, num_done: int) -> int:
        """See `WorkBudget`."""
        count = min(self._num_slices, len(image.slices) - num_done)
        self._num_slices -= count
        return count

    def take_proposed(self, sequence: Sequence, costs_ms: Items[float]) -> int:
        """See `StepBudget`."""
        return 0

    @property
    def has_chats(self) -> bool:
        """See `StepBudget`."""
        return False

    def fit_turn(self, costs_ms: Items[float]) -> int:
        """See `StepBudget`."""
        return 0

    def spend_turn(self, cost_ms: float) -> None:
        """See `StepBudget`."""


def full_requests() -> Iterator[GenerationRequest]:
    """Texts of several lengths, then a picture of a camera's size.

    why: what attention over many patches and long contexts costs cannot be told from few.
    """
    yield from (_request(index, _text(length)) for index, length in enumerate((1, 16, 64, 2, 160)))
    yield _request(5, _picture((1280, 720)))
    yield _request(6, _picture((448, 256)))


def short_requests() -> Iterator[GenerationRequest]:
    """A small picture and two texts: enough to warm the kernels up and to see whether stored costs fit."""
    yield _request(0, _picture((448, 256)))
    yield from (_request(index, _text(length)) for index, length in ((1, 4), (2, 32)))


def cost_cache(config: EngineConfig, spec: ModelSpec) -> CostCache:
    """The cache of what steps of a loaded model cost here."""
    return CostCache(cache_folder(config.cost_cache), _identity(config, spec))


def _request(index: int, message: Message) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    return GenerationRequest(f"warm-up-{index}", [message], sampling)


def _text(length: int) -> Message:
    return {"role": "user", "content": "a b c d " * length}


def _picture(size: tuple[int, int]) -> Message:
    grey = Image.new("RGB", size, (128, 128, 128))
    return {"role": "user", "content": [{"type": "image", "image": grey}]}


def _identity(config: EngineConfig, spec: ModelSpec) -> Identity:
    """What decides the costs: model, device, threads, versions, and every setting not known to be harmless.

    why: of the checkpoint only its configuration counts: shapes take time, values do not.
    """
    settings = {name: value for name, value in asdict(config).items() if name not in _WITHOUT_COST}
    return {
        **settings,
        "config": _config_digest(config.model),
        "dtype": str(spec.dtype),
        "use_kernels": spec.use_kernels,
        "device": _device_name(spec.device),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _config_digest(model: str) -> str:
    config = read_config(model)
    config.name_or_path = ""
    return sha256(config.to_json_string(use_diff=False).encode()).hexdigest()[:20]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
