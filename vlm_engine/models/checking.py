"""What a checkpoint is and what it needs, by its configuration and its files' headers; no weight is read."""

from dataclasses import dataclass

from PIL import Image

from vlm_engine.config import EngineConfig
from vlm_engine.errors import RequestError
from vlm_engine.models.base import PromptPreparer
from vlm_engine.models.free_memory import free_memory
from vlm_engine.models.loading import describe, load_prompts, read_config
from vlm_engine.models.memory import MemoryNeeds, what_would_fit
from vlm_engine.models.weight_files import read_tensors

PICTURES = {"720p": (1280, 720), "1080p": (1920, 1080)}


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """What a checkpoint needs.

    Args:
        name: Directory or hub name.
        family: ``model_type`` of its configuration.
        num_parameters: Of the model; a tied head is counted once.
        dtype: Element type with which it would run.
        needs: Memory that an engine of it takes, by part; a load that does not find it is refused.
        kv_bytes_per_token: Memory of one token in the KV cache.
        max_model_len: Longest prompt and output together.
        image_tokens: Tokens of a picture, by the picture's name; None for a model without eyes.
        free_bytes: Free memory of the device now.
        advice: What would fit, where this does not.
    """

    name: str
    family: str
    num_parameters: int
    dtype: str
    needs: MemoryNeeds
    kv_bytes_per_token: int
    max_model_len: int
    image_tokens: dict[str, int | None]
    free_bytes: int
    advice: str

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the KV cache could hold beside all else."""
        left = self.free_bytes - self.needs.total + self.needs.kv_cache
        return max(0, left // self.kv_bytes_per_token)

    @property
    def fits(self) -> bool:
        """Whether it would be loaded."""
        return self.needs.total <= self.free_bytes


def check_checkpoint(config: EngineConfig) -> CheckpointReport:
    """Look at a checkpoint without loading or downloading it.

    Raises:
        UnsupportedModel: Its ``model_type`` has no adapter.
        ModelLoadError: It is not there, or its files cannot be read.
    """
    settings = read_config(config.model)
    prompts = load_prompts(config)
    demand = describe(config, settings, read_tensors(config.model))
    free = free_memory(demand.device)
    return CheckpointReport(
        name=config.model,
        family=settings.model_type,
        num_parameters=sum(weight.numel() for weight in demand.skeleton.parameters()),
        dtype=demand.words,
        needs=demand.needs(),
        kv_bytes_per_token=demand.kv_bytes_per_token,
        max_model_len=demand.max_model_len,
        image_tokens={name: _num_image_tokens(prompts, size) for name, size in PICTURES.items()},
        free_bytes=free,
        advice=what_would_fit(demand, free),
    )


def _num_image_tokens(prompts: PromptPreparer, size: tuple[int, int]) -> int | None:
    picture = Image.new("RGB", size)
    try:
        prompt = prompts.prepare([{"role": "user", "content": [{"type": "image", "image": picture}]}])
    except RequestError:
        return None
    return sum(int(run.length) for run in prompt.placeholders)
