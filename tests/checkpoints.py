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
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
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

from tests.tiny_tokenizers import (
    CHAT_TEMPLATE,
    GEMMA_CHAT_TEMPLATE,
    INTERN_CHAT_TEMPLATE,
    SMOL_CHAT_TEMPLATE,
    SMOL_TOKENS,
    TEXT_CHAT_TEMPLATE,
    TILE_MARKERS,
    gemma_tokenizer,
    intern_tokenizer,
    qwen_tokenizer,
    smol_tokenizer,
)

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
TILE_VISION_CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
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


def tiny_internvl(
    folder: Path, *, dtype: str = "float32", seed: int = 0, decoder: str = "qwen2", **vision: Any
) -> Path:
    """Write an InternVL checkpoint (class token, any of several decoders) and return its folder.

    An image becomes three or four tiles and a picture of the whole, each 24x24 pixels and 9 tokens.
    `vision` changes its tower's configuration.
    """
    tokenizer, side = intern_tokenizer(), 24
    tile = {"image_size": side, "patch_size": 4, "attention_bias": True}
    config = InternVLConfig(
        text_config={"model_type": decoder} | _text_config(tokenizer, head_dim=16),
        vision_config=TILE_VISION_CONFIG | tile | vision,
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=9,
        tie_word_embeddings=False,
    )
    _write_model(folder, InternVLForConditionalGeneration(config), tokenizer, dtype, seed)
    _write_tokenizer(folder, tokenizer, INTERN_CHAT_TEMPLATE)
    _write_intern_processors(folder, side=side, num_tokens=9)
    return folder


def tiny_gemma3(folder: Path, *, dtype: str = "float32", seed: int = 0, **text: Any) -> Path:
    """Write a Gemma 3 checkpoint (tied head, byte fallback, two rope bases) and return its folder.

    An image becomes one picture of 48x48 pixels and 36 tokens that see each other; two of its three layers
    see 20 positions. `text` changes its decoder's configuration.
    """
    tokenizer, side = gemma_tokenizer(), 48
    config = Gemma3Config(
        text_config=_gemma_config(tokenizer) | text,
        vision_config=TILE_VISION_CONFIG | {"image_size": side, "patch_size": 4, "vision_use_head": False},
        mm_tokens_per_image=36,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )
    _write_model(folder, Gemma3ForConditionalGeneration(config), tokenizer, dtype, seed)
    _write_tokenizer(folder, tokenizer, GEMMA_CHAT_TEMPLATE)
    named = {"processor_class": "Gemma3Processor"}
    image = named | {"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": None}
    pixels = {"size": {"height": side, "width": side}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    _write_json(folder / "preprocessor_config.json", image | pixels)
    _write_json(folder / "processor_config.json", named | {"image_seq_length": 36})
    return folder


def tiny_gemma3_text(folder: Path, *, dtype: str = "float32", seed: int = 0, **text: Any) -> Path:
    """Write a text-only Gemma 3 checkpoint, its decoder that of `tiny_gemma3`, and return its folder."""
    tokenizer = gemma_tokenizer()
    config = Gemma3TextConfig(**_gemma_config(tokenizer) | text)
    _write_model(folder, Gemma3ForCausalLM(config), tokenizer, dtype, seed)
    _write_tokenizer(folder, tokenizer, GEMMA_CHAT_TEMPLATE)
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


def _text_config(tokenizer: Qwen2Tokenizer, **more: Any) -> dict[str, Any]:
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    return TEXT_CONFIG | {"vocab_size": len(tokenizer)} | ids | more


def _gemma_config(tokenizer: GemmaTokenizer) -> dict[str, Any]:
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "pad_token_id")}
    layers = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    own = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 20}
    return _text_config(tokenizer, **ids, **layers, **own)


def _smol_config(
    tokenizer: PreTrainedTokenizerFast, *, image_size: int, patch_size: int, scale_factor: int
) -> dict[str, Any]:
    vision = TILE_VISION_CONFIG | {"image_size": image_size, "patch_size": patch_size}
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
    bytes_alone = [index for piece, index in tokenizer.get_vocab().items() if piece.startswith("<0x")]
    special_ids = [*tokenizer.all_special_ids, *bytes_alone]
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.copy_(_random_like(name, weight, generator))
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                # why: a small row makes a small logit, so that a greedy continuation holds no special token,
                # nor bytes alone of a tokenizer of pieces (whose decoder replaces more than the bad ones).
                weight[special_ids] *= 0.2
        _fit_gemma(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    ends = [tokenizer.eos_token, "<|endoftext|>", "<end_of_turn>"]
    eos_ids = [tokenizer.convert_tokens_to_ids(end) for end in ends if end in tokenizer.get_vocab()]
    _write_json(folder / "generation_config.json", {"eos_token_id": eos_ids, "do_sample": False})


def _fit_gemma(model: PreTrainedModel) -> None:
    """Gemma's norms add 1 to their weight, and it scales its embeddings up.

    The last norm makes the logits of the small embeddings of the head as large as those of others.
    """
    for name, part in model.named_modules():
        kind = type(part).__name__
        if kind == "Gemma3RMSNorm" and not name.endswith(("q_norm", "k_norm")):
            part.get_parameter("weight").add_(7.0 if name.endswith("model.norm") else -1.0)
        if kind == "Gemma3TextScaledWordEmbedding":
            part.get_parameter("weight").div_(part.scalar_embed_scale)


def _random_like(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(weight.shape, generator=generator)
    if weight.ndim == 1:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return 1.5 + 0.1 * noise
        is_scale = "norm" in name and name.endswith("weight")
        return (1.0 if is_scale or "lambda" in name else 0.0) + 0.1 * noise
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


def _write_intern_processors(folder: Path, *, side: int, num_tokens: int) -> None:
    named = {"processor_class": "InternVLProcessor"}
    shared = named | {"size": {"height": side, "width": side}}
    tiles = {"crop_to_patches": True, "min_patches": 3, "max_patches": 4}
    image = shared | tiles | {"image_processor_type": "GotOcr2ImageProcessor"}
    _write_json(folder / "preprocessor_config.json", image)
    video = shared | {"video_processor_type": "InternVLVideoProcessor"}
    _write_json(folder / "video_preprocessor_config.json", video)
    _write_json(folder / "processor_config.json", named | {"image_seq_length": num_tokens})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
