"""The bundled checkpoint in stock transformers: it loads, sees and says what it does not know."""

import numpy as np
import pytest

from appliance.demo.evaluate_vlm import MODEL, Answerer, Prompt, build, score
from appliance.demo.vlm_chat import UNKNOWN, WHO
from vision.scenes import sample_scene

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def answerer():
    return Answerer(MODEL, batch=16)


def _chat(text: str) -> Prompt:
    return Prompt("chat", [{"role": "user", "content": text}], None, "", "chat", text)


def test_weights_are_small_enough_to_ship():
    assert (MODEL / "model.safetensors").stat().st_size <= 17_000_000


def test_chat_without_a_picture(answerer):
    prompts = [_chat("Who are you?"), _chat("What is the capital of France?")]
    answerer.answer(prompts)
    assert [p.answer for p in prompts] == [WHO, UNKNOWN]


def test_answers_about_unseen_scenes(answerer):
    rng = np.random.default_rng(777)
    scenes = [sample_scene(rng) for _ in range(4)]
    wanted = ("day or night", "count people", "describe, true detections")
    prompts = [p for p in build(scenes, rng) if p.score in wanted or p.kind == "describe"]
    answerer.answer(prompts, max_new_tokens=64)
    questions = [p for p in prompts if p.kind != "describe"]
    assert all(p.answer == f"It is {p.truth}." for p in questions if p.kind == "time")
    described = [p.answer for p in prompts if p.score == "describe, true detections"]
    assert len(described) == len(scenes)
    assert (
        sum(a.startswith(f"A {s.place}") or "empty" in a for a, s in zip(described, scenes, strict=True)) >= 3
    )
    assert score(scenes, [p for p in prompts if p.kind == "count"])[1]["count people"].share >= 0.5
