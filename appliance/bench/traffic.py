"""Requests made from a seed: questions of random words, pictures of coloured noise."""

import base64
import io
import json
import math
import random
from typing import Any

import numpy as np
from PIL import Image

from appliance.bench.plan import LoadPlan

MAX_FRAMES = 512
"""Pictures are made before a run and held in memory; a run that needs more sends them again."""

CLOSED_LOOP_FRAMES = 64
FRAME_QUESTION = "Describe this camera frame in one or two short sentences."
_BLOCK_PX = 40
_NOISE = 12
_NUM_WORDS = 30
_WORDS = str.split("""
anchor apple barn basket candle cedar cloud copper desert drum ember fence field flute gravel harvest island
jacket kettle lake lamp maple marble meadow needle ocean orchard pebble pillow quarry rain ribbon saddle shore
stable tower tunnel valley velvet wagon walnut willow winter yarn
""")


def num_frames_to_make(plan: LoadPlan) -> int:
    """How many different pictures the plan wants, at most `MAX_FRAMES`."""
    if plan.frame_concurrency:
        return max(CLOSED_LOOP_FRAMES, plan.frame_concurrency)
    return min(MAX_FRAMES, math.ceil(plan.frame_rate * (plan.warm_up_s + plan.seconds)))


def chat_body(plan: LoadPlan, model: str, words: random.Random) -> dict[str, Any]:
    """A question of its own, so that no prefix cache knows it; about 60 tokens."""
    text = " ".join(words.choices(_WORDS, k=_NUM_WORDS))
    question = f"Case {words.randrange(10**6)}: {text}. What connects these? Explain in a few sentences."
    return _body(plan, model, question, plan.chat_tokens)


def frame_body(plan: LoadPlan, model: str, index: int) -> dict[str, Any]:
    """The question about picture `index` of the plan."""
    jpeg = frame_jpeg(plan.image_size, plan.seed, index)
    url = f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"
    content = [{"type": "text", "text": FRAME_QUESTION}, {"type": "image_url", "image_url": {"url": url}}]
    body = _body(plan, model, content, plan.frame_tokens)
    return body if plan.frame_priority is None else body | {"priority": plan.frame_priority}


def frame_jpeg(size: tuple[int, int], seed: int, index: int) -> bytes:
    """A JPEG of `size` (width, height): blocks of colour, blurred, under noise; equal for equal arguments."""
    rng = np.random.default_rng((seed, index))
    width, height = size
    shape = (height // _BLOCK_PX + 1, width // _BLOCK_PX + 1, 3)
    blocks = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))
    smooth = np.asarray(blocks.resize(size, Image.Resampling.BILINEAR)).astype(np.int16)
    noise = rng.integers(-_NOISE, _NOISE + 1, (height, width, 1), dtype=np.int16)
    buffer = io.BytesIO()
    Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


def encoded(body: dict[str, Any]) -> bytes:
    """The body as it goes over the wire."""
    return json.dumps(body, separators=(",", ":")).encode()


def _body(plan: LoadPlan, model: str, content: object, max_tokens: int) -> dict[str, Any]:
    options: dict[str, Any] = {"include_usage": True}
    # why: answers of equal length make runs comparable; counts in every chunk tell merged tokens.
    extensions = {} if plan.is_plain else {"ignore_eos": True}
    if not plan.is_plain:
        options["continuous_usage_stats"] = True
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": options,
        **extensions,
    }
