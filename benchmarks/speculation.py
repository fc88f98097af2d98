"""What speculative decoding by prompt lookup gives and costs: the same requests with and without it.

    python benchmarks/speculation.py [--checkpoint DIR] [--items 24] [--rounds 3] [--output FILE]

Two engines share one loaded model and take turns, step by step, on one thread, so that what slows the machine
slows both. Times are of the processor, and of steps that decode only. Every answer is compared.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from appliance.bench.machine import environment
from appliance.prompts import DEFAULT_INSTRUCTION, describe_messages, detection_line
from vision.scenes import Scene, SceneStream
from vlm_engine import Engine, EngineConfig, GenerationRequest, SamplingParams
from vlm_engine.config import SpeculativeConfig
from vlm_engine.cost_model import CostModel, LinearModel
from vlm_engine.models import VisionLanguageModel
from vlm_engine.plan import StepPlan
from vlm_engine.warm_up import warm_up

BUNDLED = Path(__file__).parents[1] / "appliance" / "models" / "vlm"
PLACES = ("street", "park", "yard", "room")
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
Requests = list[list[GenerationRequest]]


@dataclass(slots=True)
class Tally:
    """What one engine spent on decoding."""

    engine: Engine
    decode_ms: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    answers: list[tuple[int, ...]] = field(default_factory=list)
    _said: dict[str, list[int]] = field(default_factory=dict)
    _plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = self.engine.scheduler.plan
        self.engine.scheduler.plan = lambda now: self._plans.append(plan(now)) or self._plans[-1]  # type: ignore[method-assign,func-returns-value]

    def add(self, requests: Iterable[GenerationRequest]) -> None:
        """Begin with some requests at once."""
        self._said.clear()
        for request in requests:
            self.engine.add(request)

    def step(self) -> None:
        """Compute one step, and book it if it only decodes."""
        started = time.process_time()
        events = self.engine.step()
        spent_ms = 1e3 * (time.process_time() - started)
        for event in events:
            self._said.setdefault(event.request_id, []).extend(event.token_ids)
        plan = self._plans[-1]
        self._plans.clear()
        if plan.chunks and not plan.encodes and all(chunk.end - chunk.start == 1 for chunk in plan.chunks):
            self.decode_ms += spent_ms
            self.num_steps += 1
            self.num_tokens += sum(len(event.token_ids) for event in events)
        if not self.engine.has_work:
            self.answers += map(tuple, self._said.values())

    @property
    def token_ms(self) -> float:
        """Milliseconds of decoding for a token."""
        return self.decode_ms / max(1, self.num_tokens)


def shown(scene: Scene) -> str:
    """The line that the pipeline would write of a scene."""
    centers = [(each.box[0] + each.box[2]) / 2 / scene.width for each in scene.objects]
    return detection_line([each.label for each in scene.objects], centers)


def frames(number: int, seed: int) -> Iterator[GenerationRequest]:
    """Pictures of four cameras in turn, seconds apart, as the describer asks for them."""
    streams = [SceneStream(place, seed=seed, fps=1.0, size=(448, 256)) for place in PLACES]
    for index in range(number):
        picture, scene = streams[index % len(streams)].frame(5 * (index // len(streams)))
        image = Image.fromarray(np.ascontiguousarray(picture[..., ::-1]))
        messages = describe_messages(DEFAULT_INSTRUCTION, image, shown(scene))
        yield GenerationRequest(f"frame {index}", messages, GREEDY, priority="background")


def drawn(number: int, seed: int) -> Iterator[GenerationRequest]:
    """Chats whose words are drawn at random, so that what stood before says nothing of what comes."""
    for index in range(number):
        sampling = SamplingParams(max_tokens=96, temperature=3.0, seed=seed + index, ignore_eos=True)
        messages = [{"role": "user", "content": "Tell me something about the street. " * (1 + index % 3)}]
        yield GenerationRequest(f"chat {index}", messages, sampling)


def grouped(requests: Iterator[GenerationRequest], size: int) -> Requests:
    """Requests that run at once."""
    everyone = list(requests)
    return [everyone[index : index + size] for index in range(0, len(everyone), size)]


@dataclass(frozen=True, slots=True)
class Setup:
    """A loaded model, the engine's settings, and what steps take, measured once for all engines."""

    model: VisionLanguageModel
    config: dict[str, Any]
    costs: CostModel

    @classmethod
    def load(cls, config: dict[str, Any]) -> "Setup":
        engine = Engine(EngineConfig(**config))
        warm_up(engine)
        return cls(engine.model, config, engine.cost_model)

    def tally(self, speculative: SpeculativeConfig | None) -> Tally:
        """A new engine."""
        engine = Engine(EngineConfig(**self.config, speculative=speculative), model=self.model)
        step, encoder = self.costs.step.state(), self.costs.encoder.state()
        engine.cost_model.reset(LinearModel.restored(**step), LinearModel.restored(**encoder))
        return Tally(engine)


def side_by_side(
    setup: Setup, speculative: SpeculativeConfig | None, work: Requests, *, plain_first: bool
) -> dict[str, Any]:
    """One round: both engines anew, step by step in turns."""
    first = setup.tally(None if plain_first else speculative)
    second = setup.tally(speculative if plain_first else None)
    plain, guessing = (first, second) if plain_first else (second, first)
    for requests in work:
        plain.add(requests)
        guessing.add(requests)
        for turn in count():
            working = [each for each in (plain, guessing) if each.engine.has_work]
            if not working:
                break
            for tally in working[:: 1 if turn % 2 else -1]:
                tally.step()
    stats = guessing.engine.stats().speculation
    return {
        "plain_token_ms": round(plain.token_ms, 4),
        "speculative_token_ms": round(guessing.token_ms, 4),
        "speed": round(plain.token_ms / guessing.token_ms, 3),
        "tokens": plain.num_tokens,
        "plain_steps": plain.num_steps,
        "speculative_steps": guessing.num_steps,
        "equal_answers": f"{sum(map(tuple.__eq__, plain.answers, guessing.answers))}/{len(plain.answers)}",
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All cases, each in some rounds; told on the way."""
    config = {
        "model": str(arguments.checkpoint),
        "device": "cpu",
        "num_threads": 1,
        "kv_cache_tokens": 16384,
        "scheduler": "static",
    }
    usual, eager = SpeculativeConfig(), SpeculativeConfig(prompt_lookup_min=1)
    own = SpeculativeConfig(max_cached_answers=0)
    cases: dict[str, tuple[SpeculativeConfig | None, Any, int]] = {
        "drawn chats, both without": (None, drawn, 1),
        "frames": (usual, frames, 1),
        "frames, four at once": (usual, frames, 4),
        "frames, own text only": (own, frames, 1),
        "drawn chats": (usual, drawn, 1),
        "drawn chats, one token looked up": (eager, drawn, 1),
    }
    setup, results = Setup.load(config), dict[str, Any]()
    for name, (speculative, make, size) in cases.items():
        rounds = [
            side_by_side(
                setup, speculative, grouped(make(arguments.items, seed), size), plain_first=bool(seed % 2)
            )
            for seed in range(arguments.rounds)
        ]
        results[name] = {"speed": statistics.median(each["speed"] for each in rounds), "rounds": rounds}
        print(f"{name}: {results[name]['speed']:.2f} times as fast {rounds[-1]}", file=sys.stderr, flush=True)
    config["model"] = arguments.checkpoint.name
    return {**environment(), "config": config, "items": arguments.items, "cases": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=BUNDLED)
    parser.add_argument("--items", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = json.dumps(measure(arguments), indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
