"""What is known of families without torch is what the loaded parts say."""

from pathlib import Path

import pytest

from vlm_engine import EngineConfig
from vlm_engine.checkpoint_peek import KNOWN_FAMILIES, TEXT_FAMILIES, peek
from vlm_engine.errors import ModelLoadError
from vlm_engine.models import FAMILIES, load_prompts
from vlm_engine.models.text import TextPrompts


def test_the_families_are_those_that_load() -> None:
    assert set(FAMILIES) == KNOWN_FAMILIES
    assert {name for name, family in FAMILIES.items() if family.prompts is TextPrompts} == TEXT_FAMILIES


@pytest.mark.parametrize(
    "checkpoint",
    [
        "gemma3_checkpoint",
        "idefics3_checkpoint",
        "internvl_checkpoint",
        "llama_checkpoint",
        "qwen2_5_vl_checkpoint",
        "qwen3_vl_checkpoint",
        "smolvlm_checkpoint",
    ],
)
def test_whether_it_reads_videos(checkpoint: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(checkpoint)
    seen = peek(str(folder))

    assert seen
    assert seen.reads_videos == load_prompts(EngineConfig(str(folder))).reads_videos


def test_a_name_that_the_cache_does_not_have() -> None:
    assert peek("Nobody/Has-This-1B") is None
    with pytest.raises(ModelLoadError, match="no hub name can be so"):
        peek("a/b/c")
