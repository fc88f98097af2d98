"""A process beside the training that samples, renders and packs the batches."""

import multiprocessing
import os
from collections.abc import Generator
from dataclasses import dataclass, fields
from queue import Full
from typing import Any, Literal

import numpy as np
import torch

from appliance.demo import vlm_data, vlm_labels
from appliance.demo.vlm_model import Trees
from vision.scenes import Scene

Stage = Literal["sketch", "tower", "joint", "polish"]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a batch holds: pictures, and trees of each form with branches each.

    kept: so many picture tokens of a tree are kept, those with an object's centre among them; 0 for all.
    """

    pictures: int
    question_trees: int = 0
    question_branches: int = 8
    describe_trees: int = 0
    describe_branches: int = 3
    text_first_trees: int = 0
    chat_trees: int = 0
    chat_branches: int = 6
    kept: int = 0


PLANS: dict[Stage, BatchPlan] = {
    "sketch": BatchPlan(8, 8, 8, 4, 3, 1, 1, 4, kept=24),
    "tower": BatchPlan(16),
    "joint": BatchPlan(16, 10, 6, 6, 3, 4, 1, 6),
    "polish": BatchPlan(8, 8, 8, 4, 3, 2, 1, 4),
}


@dataclass(slots=True)
class Batch:
    """One training batch; ``patches`` (uint8 [B, N, 768]) only where pictures were rendered."""

    patches: torch.Tensor | None
    labels: torch.Tensor
    trees: list[Trees]


def make_trees(
    rng: np.random.Generator,
    enc: vlm_data.Encoder,
    scenes: list[Scene],
    plan: BatchPlan,
    kept: list[vlm_data.Ints],
) -> list[Trees]:
    """Build the trees of a plan over the batch's scenes, one ``Trees`` per form.

    Trees of one form share their system message, so that their prefixes are equally long.
    """
    system = vlm_data.draw_system(rng)
    prompt = vlm_data.draw_system(rng), vlm_data.draw_instruction(rng)
    sizes = vlm_data.draw_sizes(rng)
    branches = plan.question_branches + (4 if sizes is vlm_data.SHORT else 0)
    form, lines = (branches, system, sizes), plan.describe_branches
    forms = [
        [vlm_data.question_tree(rng, enc, scenes[i], i, form) for i in range(plan.question_trees)],
        [vlm_data.describe_tree(rng, enc, scenes[i], i, lines, prompt) for i in range(plan.describe_trees)],
        [
            vlm_data.text_first_tree(rng, enc, scenes[-1 - i], len(scenes) - 1 - i)
            for i in range(plan.text_first_trees)
        ],
        [vlm_data.chat_tree(rng, enc, plan.chat_branches) for _ in range(plan.chat_trees)],
    ]
    for tree in [t for trees in forms for t in trees if kept and t.picture >= 0]:
        tree.kept = kept[tree.picture]
    return [vlm_data.pack(trees, enc.image_id) for trees in forms if trees]


def make_batch(rng: np.random.Generator, enc: vlm_data.Encoder, stage: Stage) -> Batch:
    """Sample one batch of a stage; the sketch renders nothing."""
    plan = PLANS[stage]
    scenes = [vlm_data.draw_scene(rng) for _ in range(plan.pictures)]
    labels = torch.from_numpy(np.stack([vlm_labels.label_tokens(s) for s in scenes]))
    pixels = None if stage == "sketch" else render_patches(rng, scenes)
    kept = [keep_tokens(rng, tokens, plan.kept) for tokens in labels] if plan.kept else []
    return Batch(pixels, labels, make_trees(rng, enc, scenes, plan, kept))


def keep_tokens(rng: np.random.Generator, labels: torch.Tensor, count: int) -> vlm_data.Ints:
    """Choose ``count`` tokens of a picture in order: every centre, others at random."""
    centres = [i for name, i in vlm_labels.INDEX.items() if name.startswith("centre")]
    score = labels[:, centres].amax(1).numpy() + rng.random(len(labels))
    return np.sort(np.argsort(-score)[:count])


def render_patches(rng: np.random.Generator, scenes: list[Scene]) -> torch.Tensor:
    """Render scenes as patches, uint8 [B, N, 768]."""
    from vision.scenes import render

    return torch.from_numpy(np.stack([vlm_data.patches_of(render(s, rng)) for s in scenes]))


def _pack_arrays(batch: Batch) -> Any:
    trees = [{f.name: getattr(t, f.name).numpy() for f in fields(Trees)} for t in batch.trees]
    return None if batch.patches is None else batch.patches.numpy(), batch.labels.numpy(), trees


def _unpack_arrays(arrays: Any) -> Batch:
    patches, labels, trees = arrays
    return Batch(
        None if patches is None else torch.from_numpy(patches),
        torch.from_numpy(labels),
        [Trees(**{name: torch.from_numpy(value) for name, value in tree.items()}) for tree in trees],
    )


def _work(queue: Any, tokenizer_file: str, stage: Stage, seed: int, core: int | None) -> None:
    torch.set_num_threads(1)
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    os.nice(10)
    from tokenizers import Tokenizer

    enc = vlm_data.Encoder(Tokenizer.from_file(tokenizer_file))
    rng = np.random.default_rng(seed)
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        arrays = _pack_arrays(make_batch(rng, enc, stage))
        while parent.is_alive():
            try:
                queue.put(arrays, timeout=5)
                break
            except Full:
                continue


def batches(
    tokenizer_file: str, stage: Stage, seed: int, core: int | None = None, ahead: int = 6
) -> Generator[Batch, None, None]:
    """Yield batches for ever from a worker process that ends with the generator or with this process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(ahead)
    worker = context.Process(target=_work, args=(queue, tokenizer_file, stage, seed, core), daemon=True)
    worker.start()
    try:
        while True:
            yield _unpack_arrays(queue.get(timeout=120))
    finally:
        worker.terminate()
