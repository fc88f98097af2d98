"""What the prefix cache and the encoder cache spare, in tokens of the prompts that are really sent."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from appliance.describer import prompt_of
from appliance.jobs import DescribeJob
from appliance.prompts import DEFAULT_INSTRUCTION
from tests.checkpoints import tiny_qwen3_vl
from vlm_engine import Engine, EngineConfig, GenerationRequest, SamplingParams, Usage

BLOCK = 16
WIDTH, HEIGHT = 1120, 640
GOAL = 0.95


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A model whose processor leaves 1120x640 pixels as they are: 700 tokens a frame."""
    folder = tiny_qwen3_vl(tmp_path_factory.mktemp("reuse"))
    path = folder / "preprocessor_config.json"
    options = json.loads(path.read_text()) | {"size": {"shortest_edge": 4096, "longest_edge": WIDTH * HEIGHT}}
    path.write_text(json.dumps(options))
    return Engine(EngineConfig(str(folder), device="cpu", block_size=BLOCK, kv_cache_tokens=16384))


def frame(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((WIDTH, HEIGHT))


def described(engine: Engine, seed: int, *, box_x: float = 20.0, prompt: str = DEFAULT_INSTRUCTION) -> Usage:
    """Put a frame to the model as the describer does."""
    seen = {"name": "person", "box": {"x1": box_x, "y1": 5.0, "x2": box_x + 9, "y2": 40.0}}
    job = DescribeJob(
        job_id="yard-1",
        camera="yard",
        source="yard",
        frame_index=seed,
        time_s=1.0,
        captured_at=1.0,
        track_id=1,
        label="person",
        reason="new_track",
        detections=[seen],
        width=WIDTH,
        height=HEIGHT,
        prompt=prompt,
        image=b"",
    )
    return asked(engine, prompt_of(job, frame(seed)))


def asked(engine: Engine, messages: Sequence[dict[str, Any]]) -> Usage:
    engine.add(
        GenerationRequest("x", messages, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    )
    while engine.has_work:
        for event in engine.step():
            usage = event.usage
    assert usage is not None
    return usage


def user(*parts: str | Image.Image) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


def num_encoded(engine: Engine) -> int:
    return engine.stats().num_encoded_images


def test_the_same_instruction_with_a_new_frame(engine: Engine) -> None:
    """What comes before the picture is not computed again: all full blocks of it."""
    described(engine, 1)
    before, second = num_encoded(engine), described(engine, 2)
    assert num_encoded(engine) == before + 1
    prompts = engine.model.prompts.prepare([user(f"{DEFAULT_INSTRUCTION}\n", frame(2))])
    assert second.cached_tokens == prompts.placeholders[0].start // BLOCK * BLOCK > 0


def test_the_same_frame_with_other_detections(engine: Engine) -> None:
    """A job that is delivered again, or another about the same frame, reads only the end of its prompt."""
    described(engine, 3)
    before = num_encoded(engine)
    for box_x in (20.0, 1100.0):
        usage = described(engine, 3, box_x=box_x)
        assert usage.cached_tokens >= GOAL * usage.prompt_tokens
    assert num_encoded(engine) == before


def test_the_same_frame_with_a_new_question(engine: Engine) -> None:
    """E3: a picture and a question, another question; and one that goes on after an answer."""
    picture = frame(4)
    first = user(picture, "What is happening here?")
    asked(engine, [first])
    before = num_encoded(engine)
    answer = {"role": "assistant", "content": "A person is walking."}
    for messages in ([user(picture, "Is anybody there?")], [first, answer, user("Where?")]):
        usage = asked(engine, messages)
        assert usage.cached_tokens >= GOAL * usage.prompt_tokens
        assert num_encoded(engine) == before


def test_a_new_instruction_before_the_same_frame_encodes_nothing(engine: Engine) -> None:
    """The keys depend on what stands before, so they are computed again; the picture is not."""
    described(engine, 5)
    before = num_encoded(engine)
    assert described(engine, 5, prompt="Is a door open?").cached_tokens < BLOCK * 2
    assert num_encoded(engine) == before
