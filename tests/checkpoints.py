"""Complete checkpoints of real architectures with seeded random weights, small enough for a test on one CPU.

A folder looks like one from the hub: weights, tokenizer, chat template, image processor, generation config.
The weights are scaled so that greedy output varies from token to token and depends on the picture, on the
text and on the order of both: an engine that loses a token, a position or an image gives other tokens.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
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
# why: as those on the hub, whose templates leave out a content that is no list
SMOL_CHAT_TEMPLATE = """
<|im_start|>
{%- for message in messages -%}
{{ message['role'] | capitalize }}{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}
{{ part['text'] }}
{%- elif part['type'] == 'image' -%}
{{ '<image>' }}
{%- endif -%}
{%- endfor -%}
{{ '<end_of_utterance>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ 'Assistant:' }}
{%- endif -%}
"""
# why: as those of text models, which take a string only
TEXT_CHAT_TEMPLATE = """
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
SMOL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
)
TILE_MARKERS = ("<global-img>", *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)))
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


def tiny_qwen2_vl(folder: Path, *, dtype: str = "float32", seed: int = 0) -> Path:
    """Write a Qwen2-VL checkpoint (own head, QKV bias, layer norms in its tower) and return its folder.

    One image token covers 28x28 pixels.
    """
    tokenizer = qwen_tokenizer()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    config = Qwen2VLConfig(
        text_config=_text_config(tokenizer, rope_parameters=rope),
        vision_config=vision | {"patch_size": 14},
        tie_word_embeddings=False,
        **_token_ids(tokenizer),
    )
    _write_model(folder, Qwen2VLForConditionalGeneration(config), tokenizer, dtype, seed)
    _write_tokenizer(folder, tokenizer)
    image = {"patch_size": 14, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    _write_processors(folder, "Qwen2VLProcessor", "Qwen2VLVideoProcessor", image)
    return folder


def tiny_smolvlm(folder: Path, *, dtype: str = "float32", seed: int = 0, split: bool = True) -> Path:
    """Write a SmolVLM2 checkpoint and return its folder.

    Markers of tiles are tokens. An image becomes two or four tiles and a picture of the whole,
    without `split` the latter alone; each is 38x38 pixels, of which 36x36 are read, and 9 tokens.
    """
    tokenizer = smol_tokenizer((*SMOL_TOKENS, *TILE_MARKERS))
    config = SmolVLMConfig(**_smol_config(tokenizer, image_size=38, patch_size=4, scale_factor=3))
    _write_model(folder, SmolVLMForConditionalGeneration(config), tokenizer, dtype, seed)
    _write_tokenizer(folder, tokenizer, SMOL_CHAT_TEMPLATE)
    _write_smol_processors(folder, "SmolVLM", side=38, num_tokens=9, split=split)
    return folder


def tiny_idefics3(folder: Path, *, dtype: str = "float32", seed: int = 0, split: bool = True) -> Path:
    """Write an Idefics3 checkpoint and return its folder.

    As `tiny_smolvlm`, but markers of tiles are plain text of many tokens, and a tile is 32x32
    pixels and 4 tokens.
    """
    tokenizer = smol_tokenizer(SMOL_TOKENS)
    config = Idefics3Config(**_smol_config(tokenizer, image_size=32, patch_size=4, scale_factor=4))
    _write_model(folder, Idefics3ForConditionalGeneration(config), tokenizer, dtype, seed)
    _write_tokenizer(folder, tokenizer, SMOL_CHAT_TEMPLATE)
    _write_smol_processors(folder, "Idefics3", side=32, num_tokens=4, split=split)
    return folder


def tiny_llama(folder: Path, *, dtype: str = "float32", seed: int = 0) -> Path:
    """Write a text-only Llama checkpoint and return its folder."""
    tokenizer = qwen_tokenizer()
    config = LlamaConfig(**_text_config(tokenizer, head_dim=16, tie_word_embeddings=False))
    return _write_text_model(folder, LlamaForCausalLM(config), tokenizer, dtype, seed)


def tiny_qwen3(folder: Path, *, dtype: str = "float32", seed: int = 0) -> Path:
    """Write a text-only Qwen3 checkpoint (tied head, norms on queries and keys) and return its folder."""
    tokenizer = qwen_tokenizer()
    config = Qwen3Config(**_text_config(tokenizer, head_dim=16, tie_word_embeddings=True))
    return _write_text_model(folder, Qwen3ForCausalLM(config), tokenizer, dtype, seed)


def qwen_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE of 400 tokens: English words of a scene are merged, every other script is bytes."""
    return _trained(SPECIAL_TOKENS, "<|im_end|>", TRAINING_LINES)


def smol_tokenizer(special_tokens: Sequence[str]) -> PreTrainedTokenizerFast:
    """The same for the families with tiles; markers that are no tokens are at least merged."""
    lines = (*TRAINING_LINES, "User: Assistant:", *TILE_MARKERS)
    base = _trained(special_tokens, "<end_of_utterance>", lines)
    return PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer,
        bos_token="<|im_start|>",
        eos_token="<end_of_utterance>",
        pad_token="<|im_end|>",
        extra_special_tokens=list(special_tokens),
    )


def _trained(special_tokens: Sequence[str], eos_token: str, lines: Sequence[str]) -> Qwen2Tokenizer:
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    base = Qwen2Tokenizer(
        vocab=alphabet, merges=[], eos_token=eos_token, extra_special_tokens=list(special_tokens)
    )
    return base.train_new_from_iterator([lines], VOCAB_SIZE)


def _text_config(tokenizer: Qwen2Tokenizer, **more: Any) -> dict[str, Any]:
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    return TEXT_CONFIG | {"vocab_size": len(tokenizer)} | ids | more


def _smol_config(
    tokenizer: PreTrainedTokenizerFast, *, image_size: int, patch_size: int, scale_factor: int
) -> dict[str, Any]:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": image_size,
        "patch_size": patch_size,
    }
    return {
        "text_config": {"model_type": "llama"} | _text_config(tokenizer, head_dim=16),
        "vision_config": vision,
        "scale_factor": scale_factor,
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "tie_word_embeddings": False,
    }


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
    special_ids = tokenizer.all_special_ids
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.copy_(_random_like(name, weight, generator))
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                # why: a small row makes a small logit, so that a greedy continuation holds no special token.
                weight[special_ids] *= 0.2
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    eos_ids = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
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
    is_strong = name.endswith(("o_proj.weight", "down_proj.weight")) and "vis" not in name
    gain = 4.0 if is_strong else 1.5
    return gain / math.sqrt(weight[0].numel()) * noise


def _write_text_model(
    folder: Path, model: PreTrainedModel, tokenizer: Qwen2Tokenizer, dtype: str, seed: int
) -> Path:
    _write_model(folder, model, tokenizer, dtype, seed)
    _write_tokenizer(folder, tokenizer, TEXT_CHAT_TEMPLATE)
    return folder


def _write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast, template: str = CHAT_TEMPLATE) -> None:
    tokenizer.chat_template = template.replace("\n{%-", "{%-").replace("-%}\n", "-%}").strip()
    tokenizer.save_pretrained(folder)


def _write_processors(folder: Path, processor: str, video_processor: str, image: dict[str, Any]) -> None:
    side = image["patch_size"] * 2
    size = {"shortest_edge": 4 * side**2, "longest_edge": 256 * side**2}
    shared = image | {"size": size, "merge_size": 2, "temporal_patch_size": 2, "processor_class": processor}
    _write_json(
        folder / "preprocessor_config.json", shared | {"image_processor_type": "Qwen2VLImageProcessor"}
    )
    _write_json(folder / "video_preprocessor_config.json", shared | {"video_processor_type": video_processor})


def _write_smol_processors(folder: Path, family: str, *, side: int, num_tokens: int, split: bool) -> None:
    image = {
        "image_processor_type": f"{family}ImageProcessor",
        "processor_class": f"{family}Processor",
        "do_image_splitting": split,
        "max_image_size": {"longest_edge": side},
        "size": {"longest_edge": 2 * side},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 1,
        "video_sampling": {"fps": 1, "max_frames": 4, "video_size": {"longest_edge": side}},
    }
    _write_json(folder / "preprocessor_config.json", image)
    _write_json(
        folder / "processor_config.json",
        {"image_seq_len": num_tokens, "processor_class": f"{family}Processor"},
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
