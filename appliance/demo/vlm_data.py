"""Training samples: scenes, prompts with several question branches, packed into arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from appliance.demo.questions import LABELS, UNKNOWN_THINGS, VEHICLES, make, of_label, phrase
from appliance.demo.vlm_chat import PICTURE, SYSTEMS, UNKNOWN, draw_chat, strange_question
from appliance.demo.vlm_describe import INSTRUCTIONS, describe, training_line
from appliance.demo.vlm_model import GRID, NUM_PICTURE_TOKENS, Trees
from vision.scenes import Scene, sample_scene

KIND_WEIGHTS = {
    "count": 3.5, "exists": 1.5, "anybody": 1.2, "where": 2.0, "color": 5.0, "clothes": 4.0, "action": 2.0,
    "motion": 1.0, "time": 0.6, "place": 0.6, "unknown_thing": 0.5, "describe": 0.8, "chat": 0.4,
}  # fmt: skip
_KINDS = list(KIND_WEIGHTS)
_KIND_P = np.array(list(KIND_WEIGHTS.values())) / sum(KIND_WEIGHTS.values())
_LABEL_P = np.array([0.1, 0.25, 0.2, 0.2, 0.12, 0.13])
SHORT, LONG = range(24), range(22, 38)
Ints = NDArray[np.int64]


@dataclass(slots=True)
class Span:
    """Token ids in a row; ``answers`` marks those that the model is trained to say."""

    ids: list[int] = field(default_factory=list)
    answers: list[bool] = field(default_factory=list)

    def add(self, ids: Sequence[int], *, answer: bool = False) -> "Span":
        """Append ids and return self."""
        self.ids.extend(ids)
        self.answers.extend([answer] * len(ids))
        return self


class Encoder:
    """Turns prompts into token spans exactly as the chat template and the processor do."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.image_id = tokenizer.token_to_id("<|image_pad|>")
        self.encode = lru_cache(200_000)(self._encode)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text).ids)

    def prefix(self, system: str, before: str, num_picture_tokens: int = NUM_PICTURE_TOKENS) -> Span:
        """System message (may be empty), the user's text, and a picture of so many tokens."""
        head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
        picture = "<|vision_start|>" if num_picture_tokens else ""
        span = Span().add(self.encode(f"{head}<|im_start|>user\n{before}{picture}"))
        if num_picture_tokens:
            span.add([self.image_id] * num_picture_tokens).add(self.encode("<|vision_end|>"))
        return span

    def branch(self, turns: Sequence[tuple[str, str]]) -> Span:
        """One or more turns (the user's text, the answer); the first user turn was opened by the prefix."""
        span = Span()
        for i, (question, answer) in enumerate(turns):
            opening = "<|im_start|>user\n" if i else ""
            span.add(self.encode(f"{opening}{question}<|im_end|>\n<|im_start|>assistant\n"))
            span.add(self.encode(f"{answer}<|im_end|>"), answer=True)
            if i + 1 < len(turns):
                span.add(self.encode("\n"))
        return span


def draw_scene(rng: np.random.Generator) -> Scene:
    """Draw a scene; crowds and empty ones are seldom enough that some are drawn again."""
    return sample_scene(rng)


def draw_label(rng: np.random.Generator, scene: Scene, *, absent: float, vehicles: bool = False) -> str:
    """Draw a label to ask about: with probability ``absent`` one that is not in the scene."""
    pool = VEHICLES if vehicles else LABELS
    there = [v for v in pool if of_label(scene, v)]
    missing = [v for v in pool if v not in there]
    if vehicles and len(there) == 1 and rng.random() < 0.1:
        return "vehicle" if len(of_label(scene, "vehicle")) == 1 else there[0]
    options = missing if missing and (not there or rng.random() < absent) else there
    weights = np.array([_LABEL_P[LABELS.index(v)] for v in options])
    single = np.array([1.0 if len(of_label(scene, v)) < 2 else 0.5 for v in options])
    weights = weights * single
    return str(rng.choice(options, p=weights / weights.sum()))


def draw_turn(rng: np.random.Generator, scene: Scene) -> tuple[str, str]:
    """Draw a question about a scene, or now and then something else, with its answer."""
    kind = str(rng.choice(_KINDS, p=_KIND_P))
    if kind == "describe":
        return _pick(rng, INSTRUCTIONS), describe(scene)
    if kind == "chat":
        return _chat_beside_picture(rng)
    if kind in ("clothes", "action") and len(of_label(scene, "person")) > 1 and rng.random() < 0.8:
        kind = "count"
    qa = make(rng, scene, kind, _label_for(rng, scene, kind))
    return qa.question, qa.answer


def _label_for(rng: np.random.Generator, scene: Scene, kind: str) -> str:
    if kind == "count":
        return "person" if rng.random() < 0.6 else draw_label(rng, scene, absent=0.35)
    if kind == "exists":
        return draw_label(rng, scene, absent=0.5)
    if kind == "where":
        return draw_label(rng, scene, absent=0.3)
    if kind in ("color", "motion"):
        return draw_label(rng, scene, absent=0.35, vehicles=True)
    return str(rng.choice(UNKNOWN_THINGS)) if kind == "unknown_thing" else "person"


def _chat_beside_picture(rng: np.random.Generator) -> tuple[str, str]:
    if rng.random() < 0.3:
        return strange_question(rng), UNKNOWN
    question, answer = draw_chat(rng)
    while answer == PICTURE:
        question, answer = draw_chat(rng)
    return question, answer


def _pick(rng: np.random.Generator, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]


def draw_system(rng: np.random.Generator) -> str:
    """Draw a system message; mostly none."""
    return "" if rng.random() < 0.6 else _pick(rng, SYSTEMS)


@dataclass(slots=True)
class Tree:
    """A prefix with its branches; ``picture`` is the index of its picture in the batch, -1 for none.

    ``kept``: the picture tokens that stay in the prefix, None for all of them.
    """

    prefix: Span
    branches: list[Span]
    picture: int
    kept: Ints | None = None

    def columns(self, image_id: int) -> Ints:
        """Indices of the prefix tokens that stay."""
        ids = np.array(self.prefix.ids)
        stays = ids != image_id
        places = np.flatnonzero(~stays)
        stays[places if self.kept is None else places[self.kept]] = True
        return np.flatnonzero(stays)


def question_tree(
    rng: np.random.Generator, enc: Encoder, scene: Scene, picture: int, form: tuple[int, str, range]
) -> Tree:
    """Picture first, a question in each branch; ``form``: branches, system message, tokens of a branch."""
    branches, system, sizes = form
    spans = [_sized_branch(rng, enc, scene, sizes) for _ in range(branches)]
    return Tree(enc.prefix(system, ""), spans, picture)


def draw_sizes(rng: np.random.Generator) -> range:
    """Draw how long the branches of a batch are, so that little of it is padding."""
    return SHORT if rng.random() < 0.45 else LONG


def _sized_branch(rng: np.random.Generator, enc: Encoder, scene: Scene, sizes: range) -> Span:
    for _ in range(60):
        question, answer = draw_turn(rng, scene)
        span = enc.branch([("\n" + question if rng.random() < 0.2 else question, answer)])
        if len(span.ids) in sizes:
            break
    return span


def describe_tree(
    rng: np.random.Generator, enc: Encoder, scene: Scene, picture: int, branches: int, prompt: tuple[str, str]
) -> Tree:
    """The appliance's describe prompt (system message, instruction), a detection line in each branch."""
    answer = describe(scene)
    lines = [training_line(rng, scene) for _ in range(branches)]
    spans = [enc.branch([(f"\n{line}" if line else "", answer)]) for line in lines]
    return Tree(enc.prefix(prompt[0], f"{prompt[1]}\n"), spans, picture)


def draw_instruction(rng: np.random.Generator) -> str:
    """Draw an instruction to describe."""
    return _pick(rng, INSTRUCTIONS)


def text_first_tree(rng: np.random.Generator, enc: Encoder, scene: Scene, picture: int) -> Tree:
    """The question before the picture; now and then a detection line or a second question after it."""
    question, answer = draw_turn(rng, scene)
    gap = "\n" if rng.random() < 0.5 else ""
    line = training_line(rng, scene) if rng.random() < 0.2 else ""
    turns = [(f"\n{line}" if line else "", answer)]
    if rng.random() < 0.4:
        turns.append(draw_turn(rng, scene))
    return Tree(enc.prefix(draw_system(rng), question + gap), [enc.branch(turns)], picture)


def chat_tree(rng: np.random.Generator, enc: Encoder, branches: int) -> Tree:
    """Conversations without a picture, of one to three turns."""
    spans = []
    for _ in range(branches):
        turns = [draw_chat(rng) for _ in range(int(rng.choice(3, p=(0.7, 0.2, 0.1))) + 1)]
        if rng.random() < 0.1:
            turns[0] = (phrase(rng, "count", str(rng.choice(LABELS))), PICTURE)
        spans.append(enc.branch(turns))
    return Tree(enc.prefix(draw_system(rng), "", 0), spans, -1)


def _prefix_positions(span: Span, image_id: int) -> Ints:
    """m-RoPE positions [3, P] of a prefix: text counts up, the picture spans a grid."""
    ids = np.array(span.ids)
    where = np.flatnonzero(ids == image_id)
    positions = np.broadcast_to(np.arange(len(ids)), (3, len(ids))).copy()
    if where.size:
        rows, columns = GRID[0] // 2, GRID[1] // 2
        first, last = where[0], where[-1]
        positions[1, where] = first + np.arange(where.size) // columns
        positions[2, where] = first + np.arange(where.size) % columns
        positions[0, where] = first
        positions[:, last + 1 :] = first + max(rows, columns) + np.arange(len(ids) - last - 1)
    return positions


def pack(trees: Sequence[Tree], image_id: int) -> Trees:
    """Pack trees of equally many branches into one batch, padded at the ends."""
    columns = [tree.columns(image_id) for tree in trees]
    width = max(map(len, columns))
    length = max(len(b.ids) for t in trees for b in t.branches)
    count, branches = len(trees), len(trees[0].branches)
    out = Trees(
        torch.zeros(count, width, dtype=torch.int64),
        torch.zeros(3, count, width, dtype=torch.int64),
        torch.full((count, width), -1, dtype=torch.int64),
        torch.tensor([len(c) for c in columns]),
        torch.zeros(count, branches, length, dtype=torch.int64),
        torch.zeros(3, count, branches, length, dtype=torch.int64),
        torch.full((count, branches, length), -100, dtype=torch.int64),
    )
    for i, tree in enumerate(trees):
        _put_prefix(out, i, tree, columns[i], image_id)
        start = int(out.prefix_positions[:, i, len(columns[i]) - 1].max()) + 1
        for j, span in enumerate(tree.branches):
            _put_branch(out, i, j, span, start)
    return out


def _put_prefix(out: Trees, i: int, tree: Tree, columns: Ints, image_id: int) -> None:
    size = len(columns)
    ids = torch.tensor(tree.prefix.ids)
    is_picture = ids == image_id
    rows = tree.picture * NUM_PICTURE_TOKENS + is_picture.cumsum(0) - 1
    out.prefix_ids[i, :size] = ids[columns]
    out.prefix_positions[:, i, :size] = torch.from_numpy(_prefix_positions(tree.prefix, image_id)[:, columns])
    out.prefix_picture[i, :size] = torch.where(is_picture, rows, -1)[columns]


def _put_branch(out: Trees, i: int, j: int, span: Span, start: int) -> None:
    size = len(span.ids)
    ids = torch.tensor(span.ids)
    out.branch_ids[i, j, :size] = ids
    out.branch_positions[:, i, j, :size] = start + torch.arange(size)
    is_answer = torch.tensor(span.answers[1:])
    out.targets[i, j, : size - 1] = torch.where(is_answer, ids[1:], -100)


def patches_of(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Cut a BGR picture [256, 448, 3] into RGB patches in merge order: uint8 [448, 768]."""
    rows, columns = GRID[0] // 2, GRID[1] // 2
    cut = image[:, :, ::-1].reshape(rows, 2, 16, columns, 2, 16, 3)
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(rows * columns * 4, 768)


def normalize(patches: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scale uint8 patches to -1..1, as the image processor does."""
    return (patches.to(torch.float32) / 127.5 - 1).to(dtype)
