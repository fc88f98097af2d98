"""Measure the demo VLM on unseen scenes: ``python -m appliance.demo.evaluate_vlm --scenes 500 --json FILE``.

Greedy answers of the exported checkpoint, loaded and run by stock transformers, each kind beside the
majority answer. Half of the questions carry a system message or stand before the picture.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from appliance.demo.questions import LABELS, VEHICLES, Qa, make, of_label
from appliance.demo.vlm_chat import SYSTEMS
from appliance.demo.vlm_describe import describe, noisy_detections, true_detections
from appliance.demo.vlm_scores import Score, says, score_descriptions
from appliance.prompts import DEFAULT_INSTRUCTION, describe_messages, detection_line
from vision.scenes import Scene, render, sample_scene

MODEL = Path(__file__).resolve().parents[1] / "models" / "vlm"
SEED = 20_000_003
THRESHOLDS = {
    "count people": 0.80,
    "color of the vehicle": 0.93,
    "day or night": 0.99,
    "anybody": 0.97,
    "absent denied": 0.85,
    "where": 0.75,
}


@dataclass(slots=True)
class Prompt:
    """One chat to answer; ``score`` names the kind that it counts for."""

    score: str
    messages: list[dict[str, Any]]
    image: Image.Image | None
    truth: str
    kind: str
    question: str
    answer: str = field(default="")


class Answerer:
    """The checkpoint in stock transformers, greedy, in batches."""

    def __init__(self, folder: Path, batch: int = 96) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.processor = AutoProcessor.from_pretrained(folder)
        self.processor.tokenizer.padding_side = "left"
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self._batch = batch
        self._encoded: dict[int, tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}
        self._kind: Any = None

    def _encode(self, images: Sequence[Image.Image]) -> Any:
        """Features of pictures by the stock model, each picture encoded once for all its questions."""
        new = list({id(i): i for i in images if id(i) not in self._encoded}.values())
        if new:
            inputs = self.processor.image_processor(images=new, return_tensors="pt")
            pixels, sizes = inputs["pixel_values"].bfloat16(), inputs["image_grid_thw"]
            out = self.model.model.get_image_features(pixels, sizes, return_dict=True)
            self._kind = type(out)
            layers = zip(*out.deepstack_features, strict=True)
            for image, pooled, layer in zip(new, out.pooler_output, layers, strict=True):
                self._encoded[id(image)] = pooled, layer
        known = [self._encoded[id(i)] for i in images]
        deepstack = [list(layer) for layer in zip(*(d for _, d in known), strict=True)]
        return self._kind(pooler_output=tuple(p for p, _ in known), deepstack_features=deepstack)

    def answer(self, prompts: Sequence[Prompt], max_new_tokens: int = 96) -> None:
        """Fill in the answers, prompts of about one length together."""
        ordered = sorted(prompts, key=lambda p: (p.score, len(str(p.messages))))
        for start in range(0, len(ordered), self._batch):
            self._answer_batch(ordered[start : start + self._batch], max_new_tokens)

    @torch.inference_mode()
    def _answer_batch(self, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        texts = [self.processor.apply_chat_template(p.messages, add_generation_prompt=True) for p in prompts]
        images = [p.image for p in prompts if p.image is not None]
        inputs = self.processor(text=texts, images=images or None, padding=True, return_tensors="pt")
        if images:
            del inputs["pixel_values"]
            inputs["mm_encoder_outputs"] = {"image": self._encode(images)}
        ids = self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        said = self.processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for prompt, text in zip(prompts, said, strict=True):
            prompt.answer = text


def ask(rng: np.random.Generator, image: Image.Image, question: str) -> list[dict[str, Any]]:
    """Put a question as people do: before or after the picture, with or without a system message."""
    text = {"type": "text", "text": question}
    picture = {"type": "image", "image": image}
    content = [picture, text] if rng.random() < 0.65 else [text, picture]
    system = [{"role": "system", "content": str(rng.choice(SYSTEMS))}] if rng.random() < 0.3 else []
    return [*system, {"role": "user", "content": content}]


def questions_for(rng: np.random.Generator, scene: Scene) -> list[tuple[str, Qa]]:
    """Questions of each measured kind that this scene can answer, with the name they are scored under."""
    asked = [
        ("count people", make(rng, scene, "count", "person")),
        ("day or night", make(rng, scene, "time", "person")),
        ("anybody", make(rng, scene, "anybody", "person")),
    ]
    singles = [v for v in LABELS if len(of_label(scene, v)) == 1]
    missing = [v for v in LABELS if not of_label(scene, v)]
    no_vehicle = [v for v in VEHICLES if v in missing]
    if singles:
        asked.append(("where", make(rng, scene, "where", str(rng.choice(singles)))))
    if missing:
        kind = ("where", "exists", "color")[int(rng.integers(3 if no_vehicle else 2))]
        asked.append(
            (
                "absent denied",
                make(rng, scene, kind, str(rng.choice(no_vehicle if kind == "color" else missing))),
            )
        )
    if len(of_label(scene, "vehicle")) == 1:
        label = of_label(scene, "vehicle")[0].label
        asked += [
            ("color of the vehicle", make(rng, scene, "color", label)),
            ("motion", make(rng, scene, "motion", label)),
        ]
    if "person" in singles:
        asked += [
            ("clothes", make(rng, scene, "clothes", "person")),
            ("action", make(rng, scene, "action", "person")),
        ]
    there = [v for v in LABELS[1:] if v not in missing]
    if there:
        asked.append(("present thing confirmed", make(rng, scene, "exists", str(rng.choice(there)))))
        label = str(rng.choice(there))
        asked.append(("count things", make(rng, scene, "count", label)))
    asked.append(("place", make(rng, scene, "place", "person")))
    return asked


def build(scenes: Sequence[Scene], rng: np.random.Generator) -> list[Prompt]:
    """Render the scenes and build every prompt."""
    prompts = []
    for scene in scenes:
        image = Image.fromarray(np.ascontiguousarray(render(scene, rng)[:, :, ::-1]))
        for name, qa in questions_for(rng, scene):
            prompts.append(Prompt(name, ask(rng, image, qa.question), image, qa.truth, qa.kind, qa.question))
        lines = {
            "describe, true detections": detection_line(*true_detections(scene)),
            "describe, poor detections": detection_line(*noisy_detections(rng, scene)),
            "describe, no detections": "",
        }
        for name, line in lines.items():
            messages = describe_messages(DEFAULT_INSTRUCTION, image, line)
            prompts.append(Prompt(name, messages, image, describe(scene), "describe", line))
    return prompts


def score(scenes: Sequence[Scene], prompts: Sequence[Prompt]) -> tuple[dict[str, Any], dict[str, Score]]:
    """Score answered prompts; returns the report and the scores of the questions."""
    scores: dict[str, Score] = {}
    for prompt in prompts:
        if prompt.kind != "describe":
            truth, said = facts(prompt)
            scores.setdefault(prompt.score, Score()).add(prompt.question, prompt.answer, truth, said)
    report: dict[str, Any] = {name: s.report() for name, s in sorted(scores.items())}
    for name in THRESHOLDS.keys() & report.keys():
        report[name]["threshold"] = THRESHOLDS[name]
    for name in sorted({p.score for p in prompts if p.kind == "describe"}):
        report[name] = score_descriptions(scenes, [p.answer for p in prompts if p.score == name])
    return report, scores


def facts(prompt: Prompt) -> tuple[str, str]:
    """The true and the said fact of a question in the same words."""
    said = says(prompt.kind, prompt.answer)
    if prompt.score == "absent denied":
        return "absent", says("where", prompt.answer)
    if prompt.score == "anybody":
        return "no" if prompt.truth == "0" else "yes", said
    if prompt.score == "present thing confirmed":
        return "yes", "yes" if prompt.answer.startswith("Yes") else "no"
    return prompt.truth, said


def evaluate(
    folder: Path, num_scenes: int, seed: int = SEED
) -> tuple[dict[str, Any], dict[str, Score], list[Prompt]]:
    """Evaluate a checkpoint on fresh scenes."""
    rng = np.random.default_rng(seed)
    scenes = [sample_scene(rng) for _ in range(num_scenes)]
    prompts = build(scenes, rng)
    Answerer(folder).answer(prompts)
    return *score(scenes, prompts), prompts


def main() -> None:
    """Read the command line, measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--scenes", type=int, default=500)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--show", type=int, default=0, help="wrong answers of each kind to print")
    args = parser.parse_args()
    started = time.monotonic()
    report, scores, prompts = evaluate(args.model, args.scenes, args.seed)
    report = {
        "scenes": args.scenes,
        "seed": args.seed,
        "seconds": round(time.monotonic() - started),
        **report,
    }
    print(json.dumps(report, indent=1))
    for name, kind in scores.items():
        for wrong in kind.wrong[: args.show]:
            print(name, *wrong, sep=" | ")
    for prompt in [p for p in prompts if p.kind == "describe" and p.answer != p.truth][: args.show * 3]:
        print(prompt.score, prompt.question, prompt.answer, prompt.truth, sep=" | ")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
