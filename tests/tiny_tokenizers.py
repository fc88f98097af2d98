"""Tiny tokenizers and chat templates in the forms in which families bring them."""

from collections.abc import Sequence

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

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
INTERN_CHAT_TEMPLATE = """
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}
{{ part['text'] }}
{%- else -%}
{{ '<IMG_CONTEXT>\\n' if part['type'] == 'image' else '<video>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
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
INTERN_TOKENS = {
    "turn_token": "<|im_start|>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
TILE_MARKERS = ("<global-img>", *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)))


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


def intern_tokenizer() -> PreTrainedTokenizerFast:
    """The same with InternVL's image tokens, each by its name."""
    special = ("<|endoftext|>", "<|im_end|>", *INTERN_TOKENS.values())
    return PreTrainedTokenizerFast(
        tokenizer_object=_trained(special, "<|im_end|>", TRAINING_LINES).backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=INTERN_TOKENS,
    )


def _trained(special_tokens: Sequence[str], eos_token: str, lines: Sequence[str]) -> Qwen2Tokenizer:
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    base = Qwen2Tokenizer(
        vocab=alphabet, merges=[], eos_token=eos_token, extra_special_tokens=list(special_tokens)
    )
    return base.train_new_from_iterator([lines], VOCAB_SIZE)
