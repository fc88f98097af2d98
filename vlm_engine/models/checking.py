"""What a checkpoint is and what it needs, by its configuration and its files' headers; no weight is read."""

from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from safetensors import safe_open
from transformers.utils import cached_file

from vlm_engine.config import EngineConfig
from vlm_engine.errors import ModelLoadError, RequestError
from vlm_engine.kv_cache import bytes_per_token
from vlm_engine.models.base import PromptPreparer
from vlm_engine.models.loading import load_prompts, read_config, resolve_device

GIB = 2**30
PICTURES = {"720p": (1280, 720), "1080p": (1920, 1080)}
# why: beside weights and cache there are the tower's activations, the logits and the libraries
SHARE = 0.9


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """What a checkpoint needs.

    Args:
        name: Directory or hub name.
        family: ``model_type`` of its configuration.
        num_parameters: Of all tensors in its files; a tied head is counted once.
        dtype: Element type with which it would run.
        weight_bytes: Memory of the weights in that type.
        kv_bytes_per_token: Memory of one token in the KV cache.
        max_model_len: Longest prompt and output together.
        image_tokens: Tokens of a picture, by the picture's name; None for a model without eyes.
        free_bytes: Free memory of the device now.
    """

    name: str
    family: str
    num_parameters: int
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    max_model_len: int
    image_tokens: dict[str, int | None]
    free_bytes: int

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the KV cache could hold beside the weights."""
        left = int(self.free_bytes * SHARE) - self.weight_bytes
        return max(0, left // self.kv_bytes_per_token)

    @property
    def fits(self) -> bool:
        """Whether the weights fit, and beside them one sequence of 4,096 tokens, or of the model's length."""
        return self.num_cache_tokens >= min(4096, self.max_model_len)


def check_checkpoint(config: EngineConfig) -> CheckpointReport:
    """Look at a checkpoint without loading it.

    Raises:
        UnsupportedModel: Its ``model_type`` has no adapter.
        ModelLoadError: It is not there, or its files cannot be read.
    """
    settings = read_config(config.model)
    prompts = load_prompts(config)
    text = settings.get_text_config()
    num_parameters, stored = _tensors(config.model)
    dtype = stored if config.dtype == "auto" else getattr(torch, config.dtype)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return CheckpointReport(
        name=config.model,
        family=settings.model_type,
        num_parameters=num_parameters,
        dtype=str(dtype).removeprefix("torch."),
        weight_bytes=num_parameters * dtype.itemsize,
        kv_bytes_per_token=bytes_per_token(text.num_hidden_layers, text.num_key_value_heads, head_dim, dtype),
        max_model_len=min(config.max_model_len or text.max_position_embeddings, text.max_position_embeddings),
        image_tokens={name: _num_image_tokens(prompts, size) for name, size in PICTURES.items()},
        free_bytes=free_memory(resolve_device(config.device)),
    )


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo", encoding="ascii") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _tensors(name: str) -> tuple[int, torch.dtype]:
    """Number of parameters, and the element type that most of them have."""
    counts: dict[torch.dtype, int] = {}
    for path in _files(name):
        try:
            with safe_open(path, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - it is no mapping
                    part = tensors.get_slice(key)
                    dtype = _DTYPES.get(part.get_dtype(), torch.float32)
                    counts[dtype] = counts.get(dtype, 0) + _product(part.get_shape())
        except Exception as error:
            raise ModelLoadError(f"{path}: cannot be read as safetensors: {error}") from error
    return sum(counts.values()), max(counts, key=lambda dtype: counts[dtype])


def _files(name: str) -> list[Path]:
    folder = Path(str(cached_file(name, "config.json"))).parent
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(
            f"{name}: there are no .safetensors files in {folder}; download the weights first"
        )
    return files


def _product(shape: list[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _num_image_tokens(prompts: PromptPreparer, size: tuple[int, int]) -> int | None:
    picture = Image.new("RGB", size)
    try:
        prompt = prompts.prepare([{"role": "user", "content": [{"type": "image", "image": picture}]}])
    except RequestError:
        return None
    return sum(int(run.length) for run in prompt.placeholders)


_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
