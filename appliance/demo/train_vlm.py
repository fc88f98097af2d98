"""Train the bundled demo VLM: ``python -m appliance.demo.train_vlm --minutes 90 --out DIR``.

Three stages share the time. *tower*: the vision half learns to tell of each picture token what a scene
shows there. *sketch*: the text half learns every question from a few ground-truth tokens in place of a
picture. *polish*: both are put together, and mergers and text half are trained on rendered frames
(*joint* trains the tower's blocks, too). The learning rate is laid over the wall-clock time of a stage,
whatever the machine's speed; each stage can be run alone and continued from ``DIR/stage.pt``.
"""

import argparse
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from appliance.demo import vlm_data, vlm_labels, vlm_worker
from appliance.demo.tokenizer import SPECIAL_TOKENS, save_processor, train_tokenizer
from appliance.demo.vlm_init import LOOKS, bind_words, initialize
from appliance.demo.vlm_model import FastVlm, model_config
from appliance.demo.vlm_optim import MasterOptimizer
from appliance.demo.vlm_texts import corpus
from appliance.demo.vlm_threads import Pace, apply_threads

_log = logging.getLogger(__name__)
WORDS = sorted({name.split()[1] for name in vlm_labels.INDEX}.union(LOOKS))
SHARES: dict[vlm_worker.Stage, float] = {"tower": 0.4, "sketch": 0.25, "polish": 0.35}
RATES: dict[vlm_worker.Stage, float] = {
    "sketch": 1.5e-3,
    "tower": 2e-3,
    "joint": 1.2e-3,
    "polish": 8e-4,
}
# why: a stage that another one follows need not end at rest
LAST_RATES: dict[vlm_worker.Stage, float] = {
    "sketch": 0.5,
    "tower": 0.3,
    "joint": 0.0,
    "polish": 0.0,
}
# questions, describe prompts, text before the picture, chat without a picture
FORM_WEIGHTS = (1.0, 1.0, 0.25, 0.2)
# why: until the text half has met real picture tokens, its gradients only disturb the tower
APART_UNTIL = 0.1
DENSE_WEIGHT = 5.0
# why: were absence a large number too, one constant would drown every picture token
LOGIT_SHIFT, LOGIT_RANGE = 3.5, 7.0
SAVE_EVERY_S = 120.0
LOG_EVERY = 20
LONGEST_ANSWER = 128


@dataclass(slots=True)
class Learner:
    """The stock model in bfloat16 with the two throw-away layers between picture tokens and labels.

    reader: merged tokens to label logits. writer: label logits to what the text half reads.
    """

    model: Any
    reader: nn.Linear
    writer: nn.Linear
    tokenizer: Any

    def write(self, logits: Tensor) -> Tensor:
        """Turn label logits into picture tokens; what is surely absent adds next to nothing."""
        return self.writer((logits + LOGIT_SHIFT) / LOGIT_RANGE)  # type: ignore[no-any-return]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters by name."""
        parts = (("", self.model), ("reader.", self.reader), ("writer.", self.writer))
        return [(f"{head}{name}", p) for head, part in parts for name, p in part.named_parameters()]


def new_learner(folder: Path, seed: int) -> Learner:
    """Make tokenizer, processor and starting weights; the tokenizer of an earlier run is kept."""
    from tokenizers import Tokenizer
    from transformers import Qwen3VLForConditionalGeneration

    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.json").exists():
        save_processor(train_tokenizer(corpus(seed)), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.get_vocab()[token] for token in SPECIAL_TOKENS}
    model = Qwen3VLForConditionalGeneration(model_config(tokenizer.get_vocab_size(), ids))
    initialize(model)
    width = model.config.text_config.hidden_size
    reader = nn.Linear(4 * model.config.vision_config.hidden_size, vlm_labels.CHANNELS)
    nn.init.constant_(reader.bias, -3.0)
    writer = nn.Linear(vlm_labels.CHANNELS, width)
    words = {word: tokenizer.encode(f" {word}").ids for word in WORDS}
    bind_words(model, writer, vlm_labels.INDEX, {w: ids[0] for w, ids in words.items() if len(ids) == 1})
    return Learner(model, reader, writer, tokenizer)


def load(learner: Learner, file: Path) -> None:
    """Read the float32 weights of an earlier run."""
    state = torch.load(file, weights_only=True)
    with torch.no_grad():
        for name, param in learner.named():
            if name in state:
                param.copy_(state[name])


def save(learner: Learner, optimizer: MasterOptimizer, names: list[str], file: Path) -> None:
    """Write the weights, in float32 where they are trained, so that a stop loses nothing."""
    state = {name: p.detach().clone() for name, p in learner.named()}
    state.update(dict(zip(names, optimizer.masters, strict=True)))
    torch.save(state, file.with_suffix(".tmp"))
    file.with_suffix(".tmp").replace(file)


def export(learner: Learner, folder: Path) -> None:
    """Write the checkpoint in bfloat16 as stock transformers reads it."""
    from transformers import GenerationConfig

    model = learner.model.to(torch.bfloat16)
    ids = [learner.tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
    # why: what it was not trained for it would answer until its context is full
    model.generation_config = GenerationConfig(
        eos_token_id=ids, pad_token_id=ids[1], do_sample=False, max_new_tokens=LONGEST_ANSWER
    )
    model.save_pretrained(folder)
    save_processor(learner.tokenizer, folder)


@torch.no_grad()
def join(learner: Learner) -> None:
    """Fold reader and writer into the merger's last layer: the tower now feeds the text half."""
    target = learner.model.model.visual.merger.linear_fc2
    writer = learner.writer.weight.float() / LOGIT_RANGE
    target.weight.copy_(writer @ learner.reader.weight.float())
    target.bias.copy_(writer @ (learner.reader.bias.float() + LOGIT_SHIFT) + learner.writer.bias.float())


def trained_in(stage: vlm_worker.Stage, name: str) -> bool:
    """Whether a parameter is trained in a stage."""
    is_visual = ".visual." in name
    if stage == "sketch":
        return not is_visual and not name.startswith("reader")
    if stage == "tower":
        in_merger = ".merger.linear_fc2" in name or "deepstack" in name
        return (is_visual and not in_merger) or name.startswith("reader")
    if stage == "polish" and any(part in name for part in (".blocks.", "patch_embed", "pos_embed")):
        return False
    return not name.startswith("writer")


def _label_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(logits.float(), labels * 0.98 + 0.01, reduction="none")
    return (losses * weights).mean()


class Losses:
    """The loss of each stage; ``parts`` keeps the last values for the log."""

    def __init__(self, learner: Learner, seed: int) -> None:
        self._learner, self._fast = learner, FastVlm(learner.model)
        self._weights = torch.from_numpy(vlm_labels.channel_weights())
        self._rng = np.random.default_rng(seed)
        self.parts: dict[str, float] = {}

    def __call__(self, stage: vlm_worker.Stage, batch: vlm_worker.Batch, progress: float) -> Tensor:
        """Loss of a batch at a share of the stage's time."""
        if stage == "sketch":
            logits = torch.from_numpy(vlm_labels.blurred_logits(self._rng, batch.labels.numpy()))
            return self._answers(batch, self._learner.write(logits.bfloat16()), [])
        assert batch.patches is not None
        merged, deep = self._fast.encode(vlm_data.normalize(batch.patches, torch.bfloat16))
        dense = _label_loss(self._learner.reader(merged), batch.labels, self._weights)
        self._note("dense", dense)
        if stage == "tower":
            return dense
        if progress < APART_UNTIL:
            merged, deep = merged.detach(), [d.detach() for d in deep]
        return self._answers(batch, *self._fast.finish(merged, deep)) + DENSE_WEIGHT * dense

    def _answers(self, batch: vlm_worker.Batch, pictures: Tensor, deep: list[Tensor]) -> Tensor:
        total = torch.zeros(())
        for i, trees in enumerate(batch.trees):
            loss = self._fast.loss(trees, pictures, deep)
            self._note(f"tree{i}", loss)
            total = total + loss * FORM_WEIGHTS[i]
        return total

    def _note(self, name: str, value: Tensor) -> None:
        now = float(value.detach())
        self.parts[name] = 0.95 * self.parts.get(name, now) + 0.05 * now


def rate(progress: float, last: float) -> float:
    """Share of the full learning rate at a share of the time: warm-up, constant, then down to ``last``."""
    if progress < 0.02:
        return 0.1 + 45 * progress
    return 1.0 if progress < 0.4 else last + (1 - last) * max(0.0, 1 - progress) / 0.6


def train(
    learner: Learner, stage: vlm_worker.Stage, pace: Pace, folder: Path, seed: int, core: int | None
) -> None:
    """Run one stage until its deadline."""
    for name, param in learner.named():
        param.data = param.data.float()
        param.requires_grad_(trained_in(stage, name))
    optimizer = MasterOptimizer(learner.named())
    names = [name for name, p in learner.named() if p.requires_grad]
    for _, param in learner.named():
        param.data = param.data.bfloat16()
    losses = Losses(learner, seed)
    stream = vlm_worker.batches(str(folder / "tokenizer.json"), stage, seed, core)
    _steps(
        losses, optimizer, stage, pace, stream, lambda: save(learner, optimizer, names, folder / "stage.pt")
    )
    stream.close()
    for master, (_, param) in zip(
        optimizer.masters, ((n, p) for n, p in learner.named() if p.requires_grad), strict=True
    ):
        param.data = master


def _steps(
    losses: Losses,
    optimizer: MasterOptimizer,
    stage: vlm_worker.Stage,
    pace: Pace,
    stream: Any,
    keep: Callable[[], None],
) -> None:
    step, saved, waited = 0, time.monotonic(), 0.0
    while pace.progress() < 1:
        asked = time.monotonic()
        batch = next(stream)
        waited += time.monotonic() - asked
        losses(stage, batch, pace.progress()).backward()  # type: ignore[no-untyped-call]
        norm = optimizer.step(RATES[stage] * rate(pace.progress(), LAST_RATES[stage]))
        step += 1
        if step % LOG_EVERY == 0:
            parts = " ".join(f"{k} {v:.4f}" for k, v in losses.parts.items())
            _log.info(
                "%s step %d %.0fs wait %.0fs norm %.2f %s", stage, step, pace.elapsed(), waited, norm, parts
            )
            apply_threads()
        if time.monotonic() - saved > SAVE_EVERY_S:
            keep()
            saved = time.monotonic()
    keep()


def run(args: argparse.Namespace) -> None:
    """Run the wanted stages one after another and export the checkpoint."""
    learner = new_learner(args.out, args.seed)
    for file in args.load:
        load(learner, file)
    for number, stage in enumerate(args.stages):
        if stage in ("joint", "polish") and (number or args.join):
            join(learner)
        share = SHARES.get(stage, 0.1) / sum(SHARES.get(s, 0.1) for s in args.stages)
        pace = Pace(args.minutes * 60 * share, args.deadline_file)
        train(learner, stage, pace, args.out, args.seed + number, args.core)
    export(learner, args.out)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--stages", nargs="+", default=list(SHARES), choices=list(vlm_worker.PLANS))
    parser.add_argument("--load", nargs="*", type=Path, default=[], help="weights of earlier stages")
    parser.add_argument(
        "--join", action="store_true", help="fold reader and writer before a lone joint stage"
    )
    parser.add_argument("--core", type=int, default=None, help="core for the worker that renders")
    parser.add_argument(
        "--deadline-file", type=Path, default=None, help="unix seconds to end at, read again and again"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    apply_threads()
    run(args)


if __name__ == "__main__":
    main()
