"""What a step costs besides the model: planning, building the batch, booking, learning.

    python benchmarks/scheduling.py [--model DIR] [--seconds 10]

Runs a real engine and writes one JSON object to standard output; milliseconds of one thread, a step.
Each mix keeps its number of chats and frames all the time: who ends is followed by another. The bar is
`plan` and `batch` together at 8 sequences: 1 ms.
"""

import argparse
import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from vlm_engine import EngineConfig, GenerationRequest, SamplingParams, runner
from vlm_engine.engine import Engine

MODEL = Path(__file__).parents[1] / "appliance" / "models" / "vlm"
MIXES = {
    "8 chats": (8, 0),
    "6 chats, 2 frames": (6, 2),
    "8 chats, 8 frames": (8, 8),
    "8 chats, 64 frames wait": (8, 72),
}


class Stopwatch:
    """Milliseconds of functions, summed by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed as `name`."""

        def timed(*args: Any, **more: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **more)
            finally:
                self.steps[-1][name] += 1e3 * (time.thread_time() - started)

        return timed

    def summary(self) -> dict[str, dict[str, float]]:
        """Percentiles over the steps, of each part and of the two that the bar is on."""
        names = sorted({name for step in self.steps for name in step})
        parts = {name: sorted(step[name] for step in self.steps) for name in names}
        parts["plan and batch"] = sorted(step["plan"] + step["batch"] for step in self.steps)
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        return {
            name: {label: round(values[int(share * (len(values) - 1))], 3) for label, share in shares.items()}
            for name, values in parts.items()
        }


def chat(name: str) -> GenerationRequest:
    text = f"Chat {name}: " + "what does a camera see of a street in the rain at night? " * 3
    sampling = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    return GenerationRequest(name, [{"role": "user", "content": text}], sampling)


def frame(name: str, number: int) -> GenerationRequest:
    picture = Image.new("RGB", (448, 256), (number % 256, number // 256 % 256, 90))
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "What is there?"}]
    sampling = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    return GenerationRequest(name, [{"role": "user", "content": content}], sampling, "background")


def measure(model: str, num_chats: int, num_frames: int, seconds: float) -> dict[str, Any]:
    """Steps of one mix, the first second left out."""
    engine = Engine(EngineConfig(model, device="cpu", chat_itl_ms=40.0))
    watch, numbers = Stopwatch(), count()
    scheduler, batch = engine.scheduler, runner.build_batch
    scheduler.plan = watch.wrap("plan", scheduler.plan)  # type: ignore[method-assign]
    scheduler.commit = watch.wrap("commit", scheduler.commit)  # type: ignore[method-assign]
    engine._learn = watch.wrap("learn", engine._learn)  # type: ignore[method-assign]
    runner.build_batch = watch.wrap("batch", batch)

    def add(is_chat: bool) -> None:
        number = next(numbers)
        engine.add(chat(f"chat-{number}") if is_chat else frame(f"frame-{number}", number))

    for index in range(num_chats + num_frames):
        add(index < num_chats)
    started = time.monotonic()
    while time.monotonic() < started + 1.0 + seconds:
        if time.monotonic() < started + 1.0:
            watch.steps.clear()
        watch.steps.append(defaultdict(float))
        for event in engine.step():
            if event.is_last:
                add(event.request_id.startswith("chat"))
    runner.build_batch = batch
    return {"steps": len(watch.steps), "ms": watch.summary()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=str(MODEL), help="a checkpoint; default: the bundled one")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each mix")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mixes = {name: measure(options.model, *mix, options.seconds) for name, mix in MIXES.items()}
    report = {
        "mixes": mixes,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_1m": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
