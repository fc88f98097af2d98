"""What the runner asks of a model family."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vlm_engine.attention import AttentionMetadata
from vlm_engine.request import Message
from vlm_engine.sequence import Placeholder


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The numbers of a loaded model that the engine needs.

    Args:
        name: Directory or hub name it was loaded from.
        family: ``model_type`` of its configuration.
        num_layers: Decoder layers.
        num_kv_heads: Key/value heads of a layer.
        head_dim: Size of a head.
        vocab_size: Rows of the output layer.
        max_model_len: Positions that the model was made for.
        stop_token_ids: Ids that end an answer.
        dtype: Element type of weights and cache.
        device: Where it runs.
        reserved_bytes: Memory beside weights and KV cache that encoder cache and steps may come to need.
        use_kernels: Whether the CPU kernels of `vlm_engine.native` are used.
        use_varlen: Whether attention runs on torch's variable-length kernel.
        use_graphs: Whether decode steps are replayed as CUDA graphs.
        max_new_tokens: Longest answer where a request names none, as the checkpoint says; None says nothing.
    """

    name: str
    family: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    stop_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    reserved_bytes: int = 0
    use_kernels: bool = False
    use_varlen: bool = False
    use_graphs: bool = False
    max_new_tokens: int | None = None

    def usual_tokens(self, least: int) -> int | None:
        """Tokens at which an answer ends that may be as long as it likes, `least` or more; None: anywhere."""
        return None if self.max_new_tokens is None else max(self.max_new_tokens, least)


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """One preprocessed image.

    Args:
        pixels: What the tower takes, for the Qwen families ``[num_patches, patch_dim]``.
        grid: ``(frames, rows, columns)`` of patches.
    """

    pixels: Tensor
    grid: tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedPrompt:
    """A conversation as the model reads it.

    Args:
        token_ids: Prompt tokens, image tokens expanded.
        positions: ``[num_axes, num_tokens]`` rotary positions.
        position_delta: What is added to the index of a later token to give its position.
        placeholders: Where each image's tokens are.
        images: The images, in the order of `placeholders`.
    """

    token_ids: list[int]
    positions: Tensor
    position_delta: int
    placeholders: tuple[Placeholder, ...]
    images: tuple[ImageInput, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """Image embeddings that replace token embeddings of a step.

    Args:
        first_row: Row of the packed batch where they go.
        features: One ``[num_rows, hidden]`` tensor for the input embeddings, then one for each
            DeepStack layer.
    """

    first_row: int
    features: tuple[Tensor, ...]


class ImageEncoder(Protocol):
    """A vision tower that runs an image in slices."""

    def slices(self, image: ImageInput) -> Sequence[Any]:
        """The image's slices, in the order in which they must run."""

    def start(self, image: ImageInput) -> Any:
        """State of an image before its first slice."""

    def run(self, state: Any, slices: Sequence[Any]) -> None:
        """Run some slices, next in order."""

    def features(self, state: Any) -> tuple[Tensor, ...]:
        """After the last slice: ``[num_image_tokens, hidden]``, then the same for DeepStack."""


class PromptPreparer(Protocol):
    """Reads conversations for a family; needs no weights, so it can live in another process."""

    tokenizer: Any

    @property
    def reads_videos(self) -> bool:
        """Whether `prepare` takes videos."""

    def prepare(self, messages: Sequence[Message]) -> PreparedPrompt:
        """Tokens, positions and pixels of a conversation; raises `RequestError` on bad input."""


class VisionLanguageModel(Protocol):
    """A loaded model of one family."""

    spec: ModelSpec

    @property
    def prompts(self) -> PromptPreparer:
        """What reads conversations for it."""

    @property
    def encoder(self) -> ImageEncoder:
        """The vision tower."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, images: Sequence[ImageRows], paged: AttentionMetadata
    ) -> Tensor:
        """Hidden states ``[num_tokens, hidden]`` of a packed step."""

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, hidden]`` to ``[n, vocab_size]`` in float32."""
