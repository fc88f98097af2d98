"""Tiny tokenizers and chat templates in the forms in which families bring them."""

import json
from collections.abc import Sequence

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GemmaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

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
# why: as those on the hub, which begin with the text's first token, put a system message before the first
# turn's text, cut spaces off around texts and refuse turns out of order
GEMMA_CHAT_TEMPLATE = """
{{ bos_token }}
{%- set first = messages[0] -%}
{%- set turns = messages[1:] if first['role'] == 'system' else messages -%}
{%- for message in turns -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('turns must alternate, user first') }}
{%- endif -%}
{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
{%- if loop.first and first['role'] == 'system' -%}
{{ (first['content'] if first['content'] is string else first['content'][0]['text']) + '\\n\\n' }}
{%- endif -%}
{%- if message['content'] is string -%}
{{ message['content'] | trim }}
{%- else -%}
{%- for part in message['content'] -%}
{{ '<start_of_image>' if part['type'] == 'image' else part['text'] | trim }}
{%- endfor -%}
{%- endif -%}
{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""
GEMMA_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
    "start_of_turn_token": "<start_of_turn>",
    "end_of_turn_token": "<end_of_turn>",
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


def gemma_tokenizer() -> GemmaTokenizer:
    """Pieces with ``▁`` for a space, bytes for what is no piece, Gemma's image tokens, each by its name."""
    learner = Tokenizer(BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = BpeTrainer(vocab_size=128, initial_alphabet=["\n"], show_progress=False)
    learner.train_from_iterator((*TRAINING_LINES, "user model"), trainer)
    learned = json.loads(learner.to_str())["model"]
    named = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256)))
    return GemmaTokenizer(
        vocab={piece: index for index, piece in enumerate((*named, *learned["vocab"]))},
        merges=[tuple(pair) for pair in learned["merges"]],
        extra_special_tokens=GEMMA_TOKENS,
        add_bos_token=True,
    )


def _trained(special_tokens: Sequence[str], eos_token: str, lines: Sequence[str]) -> Qwen2Tokenizer:
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    base = Qwen2Tokenizer(
        vocab=alphabet, merges=[], eos_token=eos_token, extra_special_tokens=list(special_tokens)
    )
    return base.train_new_from_iterator([lines], VOCAB_SIZE)
