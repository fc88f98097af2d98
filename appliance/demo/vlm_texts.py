"""The texts that the demo model's tokenizer is trained on."""

import numpy as np

from appliance.demo.vlm_chat import all_texts
from appliance.demo.vlm_data import draw_scene, draw_turn
from appliance.demo.vlm_describe import INSTRUCTIONS, describe, training_line

NUM_SCENES = 3000


def corpus(seed: int) -> list[str]:
    """Questions, answers, descriptions and detection lines of sampled scenes, and every chat text."""
    rng = np.random.default_rng(seed)
    texts: list[str] = []
    for _ in range(NUM_SCENES):
        scene = draw_scene(rng)
        turns = [draw_turn(rng, scene) for _ in range(6)]
        texts += [describe(scene), training_line(rng, scene), *(part for turn in turns for part in turn)]
    fixed = [*all_texts(), *INSTRUCTIONS, "user", "assistant", "system"]
    return texts + [variant for text in fixed for variant in (text, text.lower())] * 20
