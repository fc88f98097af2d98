"""The demo model's data and its training forward against the stock processor and the stock model."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from appliance.demo import vlm_data, vlm_labels
from appliance.demo.questions import make
from appliance.demo.tokenizer import SPECIAL_TOKENS, build_processor, train_tokenizer
from appliance.demo.train_vlm import join, new_learner
from appliance.demo.vlm_chat import all_texts
from appliance.demo.vlm_describe import describe, noisy_detections, training_line
from appliance.demo.vlm_init import initialize
from appliance.demo.vlm_model import FastVlm, model_config
from appliance.demo.vlm_scores import Score, parse_count, parse_description, says, score_descriptions
from appliance.demo.vlm_worker import keep_tokens
from vision.scenes import Scene, SceneObject, render, sample_scene

SCENE = Scene(
    "street",
    "night",
    448,
    256,
    (
        SceneObject("person", "red", (20, 100, 50, 200), "walking"),
        SceneObject("person", "blue", (210, 100, 240, 200), "standing"),
        SceneObject("car", "white", (340, 120, 440, 190), "parked"),
    ),
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([*all_texts(), describe(SCENE)], 600)


@pytest.fixture(scope="module")
def model(tokenizer):
    from transformers import Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    config = model_config(600, {t: tokenizer.token_to_id(t) for t in SPECIAL_TOKENS})
    config.text_config.num_hidden_layers = 2
    model = Qwen3VLForConditionalGeneration(config).eval()
    initialize(model)
    for merger in model.model.visual.deepstack_merger_list:
        torch.nn.init.normal_(merger.linear_fc2.weight, std=0.05)
    return model


@pytest.mark.parametrize(
    ("kind", "label", "answer"),
    [
        ("count", "person", "There are two people: one on the left and one in the middle."),
        ("exists", "car", "Yes, there is one car, on the right."),
        ("exists", "dog", "No, there is no dog."),
        ("where", "car", "The car is on the right."),
        ("where", "bus", "There is no bus."),
        ("color", "car", "The car has the colour white."),
        ("color", "vehicle", "The vehicle has the colour white."),
        ("color", "truck", "There is no truck."),
        ("clothes", "person", "There are two people: one is in red and one is in blue."),
        ("motion", "car", "The car is parked."),
        ("time", "person", "It is night."),
        ("place", "person", "This is a street."),
        ("unknown_thing", "cat", "No, there is no cat."),
    ],
)
def test_answers_state_the_ground_truth(kind, label, answer):
    assert make(np.random.default_rng(0), SCENE, kind, label).answer == answer


def test_description_tells_every_count_and_two_details():
    assert describe(SCENE) == (
        "A street at night with two people and one car. "
        "The people are on the left and in the middle and the car on the right has the colour white."
    )
    assert describe(Scene("park", "dusk", 448, 256)) == "An empty park at dusk."


def test_detection_lines_are_true_noisy_and_missing():
    rng = np.random.default_rng(1)
    lines = {training_line(rng, SCENE) for _ in range(200)}
    assert {"", "Detected: nothing.", "Detected: 2 person (left, middle), 1 car (right)."} <= lines
    assert len(lines) > 10
    assert all(0 <= x <= 1 for _ in range(50) for x in noisy_detections(rng, SCENE)[1])


def test_labels_mark_every_centre_in_its_cell():
    labels = vlm_labels.label_tokens(SCENE)
    centres = labels[:, vlm_labels.INDEX["centre person"]].reshape(8, 14)
    assert {tuple(map(int, c)) for c in np.argwhere(centres)} == {(4, 1), (4, 7)}
    assert labels[:, vlm_labels.INDEX["time night"]].all()


@pytest.mark.parametrize(
    ("kind", "answer", "fact"),
    [
        ("count", "There are two people: one on the left and one in the middle.", "2"),
        ("count", "There is nobody.", "0"),
        ("anybody", "Yes, there is one person, on the left.", "yes"),
        ("where", "The car is on the left.", "left"),
        ("where", "There is no car.", "absent"),
        ("color", "The car is red.", "red"),
        ("time", "It is night.", "night"),
        ("time", "", "?"),
    ],
)
def test_answers_are_scored_by_the_fact_they_state(kind, answer, fact):
    assert says(kind, answer) == fact


def test_descriptions_are_scored_by_class_and_count():
    assert parse_count("I do not know.") is None
    assert parse_description("A street by day with two people and a bus. The bus is red.") == {
        "person": 2,
        "bus": 1,
    }
    empty = Scene("park", "dusk", 448, 256)
    told = score_descriptions(
        [SCENE, empty], ["A street at night with one person and one dog.", "An empty park."]
    )
    assert told["class_recall"] == 0.5
    assert told["class_precision"] == 0.5
    assert told["people_exact"] == 0.5


def test_a_score_stands_beside_the_majority_answer():
    score = Score()
    for truth, said in (("1", "1"), ("1", "2"), ("3", "3"), ("1", "1")):
        score.add("How many?", "", truth, said)
    assert score.report() == {"right": 0.75, "majority": 0.75, "asked": 4}


def _inputs(processor, scene, image, messages, answer):
    text = processor.apply_chat_template(messages, add_generation_prompt=True) + answer
    return processor(text=[text], images=[image], return_tensors="pt")


def test_ids_pixels_and_loss_equal_the_stock_model(tokenizer, model):
    """A tree's branch gives the loss that the stock model gives for the same chat alone."""
    rng = np.random.default_rng(3)
    scene = sample_scene(rng)
    pixels = render(scene, rng)
    enc = vlm_data.Encoder(tokenizer)
    questions = [("How many people are there?", "There are two people."), ("\nIs it night?", "No.")]
    branches = [enc.branch([turn]) for turn in questions]
    tree = vlm_data.Tree(enc.prefix("Be brief.", "Look.\n"), branches, 0)
    other = vlm_data.Tree(enc.prefix("", "A much longer text before the picture stands here.\n"), branches, 0)
    trees = vlm_data.pack([tree, other], enc.image_id)
    patches = vlm_data.normalize(torch.from_numpy(vlm_data.patches_of(pixels))[None], torch.float32)
    fast = FastVlm(model)
    with torch.no_grad():
        states, targets = fast.answer_states(trees, *fast.finish(*fast.encode(patches)))
        losses = functional.cross_entropy(
            functional.linear(states, model.lm_head.weight), targets, reduction="none"
        )
    image = Image.fromarray(pixels[:, :, ::-1])
    processor = build_processor(tokenizer)
    position = 0
    for system, before in (
        ("Be brief.", "Look.\n"),
        ("", "A much longer text before the picture stands here.\n"),
    ):
        for question, answer in questions:
            content = [
                {"type": "text", "text": before},
                {"type": "image"},
                {"type": "text", "text": question},
            ]
            messages = [{"role": "system", "content": system}] if system else []
            inputs = _inputs(
                processor,
                scene,
                image,
                [*messages, {"role": "user", "content": content}],
                f"{answer}<|im_end|>",
            )
            stock_pixels = inputs["pixel_values"].view(1, 448, 3, 2, 256)[:, :, :, 0].flatten(2)
            assert torch.allclose(stock_pixels, patches, atol=1e-6)
            size = len(enc.encode(f"{answer}<|im_end|>"))
            with torch.no_grad():
                logits = model(**inputs).logits[0, -size - 1 : -1]
            ids = inputs["input_ids"][0, -size:]
            assert ids.tolist() == targets[position : position + size].tolist()
            stock = functional.cross_entropy(logits, ids, reduction="none")
            assert torch.allclose(losses[position : position + size], stock, atol=1e-4)
            position += size
    assert position == len(targets)


def test_join_folds_reader_and_writer_into_the_merger(tmp_path):
    learner = new_learner(tmp_path, seed=0)
    torch.nn.init.normal_(learner.writer.bias)
    join(learner)
    merged = torch.randn(5, 768)
    with torch.no_grad():
        expected = learner.write(learner.reader(merged))
        assert torch.allclose(learner.model.model.visual.merger.linear_fc2(merged), expected, atol=1e-4)


def test_a_sketch_keeps_every_centre():
    labels = torch.from_numpy(vlm_labels.label_tokens(SCENE))
    kept = keep_tokens(np.random.default_rng(0), labels, 24)
    assert len(kept) == 24
    centres = labels[:, vlm_labels.INDEX["centre person"]] + labels[:, vlm_labels.INDEX["centre car"]]
    assert set(np.flatnonzero(centres)) <= set(kept.tolist())
