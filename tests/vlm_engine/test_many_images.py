"""E26: images without end leave nothing behind.

``ENGINE_IMAGES=1000 python -m pytest tests/vlm_engine/test_many_images.py`` runs the long one.
"""

import os
from pathlib import Path

import psutil
import pytest

from tests.vlm_engine.test_engine import ask, drain, picture
from vlm_engine import Engine, EngineConfig

NUM_IMAGES = int(os.environ.get("ENGINE_IMAGES", "150"))
IMAGES_AT_ONCE = 5
SIZE = (160, 128)
CACHED = 100


@pytest.mark.timeout(900 + NUM_IMAGES)
@pytest.mark.parametrize("checkpoint", ["qwen3_vl_checkpoint", "smolvlm_checkpoint", "gemma3_checkpoint"])
def test_images_leave_no_memory_block_or_entry_behind(
    request: pytest.FixtureRequest, checkpoint: str
) -> None:
    """E26: in their size, as tiles, as squares; pixels are 0.5 MB (Qwen), not five of the last half stay."""
    folder: Path = request.getfixturevalue(checkpoint)
    engine = Engine(
        EngineConfig(str(folder), device="cpu", kv_cache_tokens=1024, encoder_cache_tokens=CACHED)
    )
    prompt, _ = engine.prepare(ask("x", picture(0, SIZE), "?"))
    process, rss_mb = psutil.Process(), []
    for first in range(0, NUM_IMAGES, IMAGES_AT_ONCE):
        for number in range(first, first + IMAGES_AT_ONCE):
            engine.add(ask(f"r{number}", picture(number, SIZE), "?", max_tokens=2))
        assert [reason for _, reason in drain(engine).values()] == ["length"] * IMAGES_AT_ONCE
        rss_mb.append(process.memory_info().rss / 2**20)
    stats, runner = engine.stats(), engine.runner
    assert stats.num_encoded_images == NUM_IMAGES * len(prompt.images)
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert len(runner._features) <= CACHED // prompt.placeholders[0].length
    assert [len(held) for held in (runner._prompts, runner._choosers, runner._encoding)] == [0, 0, 0]
    assert rss_mb[-1] - rss_mb[len(rss_mb) // 2] < 2.5, [round(each) for each in rss_mb]
