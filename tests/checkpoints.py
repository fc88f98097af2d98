"""Complete checkpoints of real architectures with seeded random weights, small enough for a test on one CPU.

A folder looks like one from the hub: weights, tokenizer, chat template, image processor, generation config.
The weights are scaled so that greedy output varies from token to token and depends on the picture, on the
text and on the order of both: an engine that loses a token, a position or an image gives other tokens.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

VOCAB_SIZE = 400
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TRAINING_LINES = (
    "Describe this camera frame in one or two short sentences.",
    "Detected: 2 person (left, middle), 1 car (right).",
    "Two people are walking on the left, and a red car is parked on the right.",
    "What is happening in this picture? Is anybody there?",
    "It is night and the street is empty. You are a helpful assistant.",
    "system user assistant",
)
CHAT_TEMPLATE = """
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' -%}
{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
DEEPSTACK_LAYERS = [0, 2]
TEXT_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
VISION_CONFIG = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}


def tiny_qwen3_vl(folder: Path, *, dtype: str = "float32", seed: int = 0) -> Path:
    """Write a Qwen3-VL checkpoint (tied head, interleaved m-RoPE, DeepStack) and return its folder.

    One image token covers 32x32 pixels.
    """
    tokenizer = qwen_tokenizer()
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    config = Qwen3VLConfig(
        text_config=_text_config(tokenizer, head_dim=16, rope_parameters=rope),
        vision_config=VISION_CONFIG
        | {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": DEEPSTACK_LAYERS},
        tie_word_embeddings=True,
        **_token_ids(tokenizer),
    )
    _write_model(folder, Qwen3VLForConditionalGeneration(config), tokenizer, dtype, seed)
    _write_tokenizer(folder, tokenizer)
    image = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    _write_processors(folder, "Qwen3VLProcessor", "Qwen3VLVideoProcessor", image)
    return folder


def tiny_qwen2_5_vl(folder: Path, *, dtype: str = "float32", seed: int = 0) -> Path:
    """Write a Qwen2.5-VL checkpoint (own head, QKV bias, window attention) and return its folder.

    Two of its four vision blocks attend over the whole image. One image token covers 28x28 pixels,
    one attention window 2x2 image tokens.
    """
    tokenizer = qwen_tokenizer()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLConfig(
        text_config=_text_config(tokenizer, rope_parameters=rope),
        vision_config=VISION_CONFIG | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1, 3]},
        tie_word_embeddings=False,
        **_token_ids(tokenizer),
    )
    _write_model(folder, Qwen2_5_VLForConditionalGeneration(config), tokenizer, dtype, seed)
    _write_tokenizer(folder, tokenizer)
    image = {"patch_size": 14, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    _write_processors(folder, "Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", image)
    return folder


def qwen_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE of 400 tokens: English words of a scene are merged, every other script is bytes."""
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    base = Qwen2Tokenizer(
        vocab=alphabet, merges=[], eos_token="<|im_end|>", extra_special_tokens=list(SPECIAL_TOKENS)
    )
    return base.train_new_from_iterator([TRAINING_LINES], VOCAB_SIZE)


def _text_config(tokenizer: Qwen2Tokenizer, **more: Any) -> dict[str, Any]:
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    return TEXT_CONFIG | {"vocab_size": len(tokenizer)} | ids | more


def _token_ids(tokenizer: Qwen2Tokenizer) -> dict[str, int]:
    tokens = {
        "image": "image_pad",
        "video": "video_pad",
        "vision_start": "vision_start",
        "vision_end": "vision_end",
    }
    return {f"{key}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in tokens.items()}


def _write_model(
    folder: Path, model: PreTrainedModel, tokenizer: Qwen2Tokenizer, dtype: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    special_ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.copy_(_random_like(name, weight, generator))
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                # why: a small row makes a small logit, so that a greedy continuation holds no special token.
                weight[special_ids] *= 0.2
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    eos_ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    _write_json(folder / "generation_config.json", {"eos_token_id": eos_ids, "do_sample": False})


def _random_like(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(weight.shape, generator=generator)
    if weight.ndim == 1:
        centre = 1.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0 if "norm" in name else 0.0
        return (centre if name.endswith("weight") else 0.0) + 0.1 * noise
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return 0.3 * noise
    # why: far above the 0.02 of a fresh model, so that attention and MLPs move the residual stream and the
    # next token is not just the last one again. Measured in 100 greedy tokens: 40 to 80 different ones, the
    # smallest lead of the best logit about 1e-3 with float32 noise below 1e-4.
    gain = 4.0 if name.endswith(("o_proj.weight", "down_proj.weight")) and "language_model" in name else 1.5
    return gain / math.sqrt(weight[0].numel()) * noise


def _write_tokenizer(folder: Path, tokenizer: Qwen2Tokenizer) -> None:
    tokenizer.chat_template = CHAT_TEMPLATE.replace("\n{%-", "{%-").replace("-%}\n", "-%}").strip()
    tokenizer.save_pretrained(folder)


def _write_processors(folder: Path, processor: str, video_processor: str, image: dict[str, Any]) -> None:
    side = image["patch_size"] * 2
    size = {"shortest_edge": 4 * side**2, "longest_edge": 256 * side**2}
    shared = image | {"size": size, "merge_size": 2, "temporal_patch_size": 2, "processor_class": processor}
    _write_json(
        folder / "preprocessor_config.json", shared | {"image_processor_type": "Qwen2VLImageProcessor"}
    )
    _write_json(folder / "video_preprocessor_config.json", shared | {"video_processor_type": video_processor})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
