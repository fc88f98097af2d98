"""What the caches spare: tokens, encodes and time to the first token of prompts that share a part.

    python benchmarks/prefix_cache.py CHECKPOINT_DIR [--output FILE]

Frames of 1280x720 are drawn, and put to the model in the prompts of the describer or as chats are. Each case
is measured once in an engine that has seen only what the case names, one request at a time.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from appliance.bench.machine import environment
from appliance.prompts import DEFAULT_INSTRUCTION, describe_messages, detection_line
from vision.scenes import SceneStream
from vlm_engine import Engine, EngineConfig, GenerationRequest, SamplingParams

SIZE = (1280, 720)
ANSWER = "A red car is driving on the right, and two people are walking on the left."
Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """What the engine has read before, and what is measured then."""

    name: str
    before: tuple[Messages, ...]
    after: Messages


def frames(count: int) -> list[Image.Image]:
    """Pictures of a drawn street, 0.5 s apart."""
    stream = SceneStream("street", 7, 2.0, SIZE)
    return [Image.fromarray(np.ascontiguousarray(stream.frame(20 + i)[0][..., ::-1])) for i in range(count)]


def described(
    picture: Image.Image, labels: Sequence[str] = ("car",), question: str = DEFAULT_INSTRUCTION
) -> Messages:
    """As the describer asks."""
    return describe_messages(question, picture, detection_line(labels, [0.5] * len(labels)))


def user(*parts: dict[str, Any] | str) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts],
    }


def cases() -> list[Case]:
    """Pairs of prompts that share something, the one with nothing shared first."""
    pictures = frames(6)
    one, other = pictures[0], pictures[1]
    shown = {"type": "image", "image": one}
    small = [picture.resize((640, 360)) for picture in pictures]
    clip, later = ({"type": "video", "frames": part, "fps": 2.0} for part in (small[:4], small[2:]))
    first = user(shown, "What is happening here?")
    return [
        Case("nothing shared", (), described(one)),
        Case("same instruction, new frame", (described(other),), described(one)),
        Case("same frame, the job again", (described(one),), described(one)),
        Case("same frame, other detections", (described(one),), described(one, ("car", "person"))),
        Case("same frame, new question after it", ([first],), [user(shown, "Is anybody at the door?")]),
        Case(
            "same frame, a question more",
            ([first],),
            [first, {"role": "assistant", "content": ANSWER}, user("Is anybody at the door?")],
        ),
        Case(
            "same frame, new question before it",
            (described(one),),
            described(one, question="Is a door open?"),
        ),
        Case("clip of 4 frames, nothing shared", (), [user(clip, "What happens?")]),
        Case("same clip, new question", ([user(clip, "What happens?")],), [user(clip, "Is anybody there?")]),
        Case("clip 1 s later", ([user(clip, "What happens?")],), [user(later, "What happens?")]),
    ]


def measured(make_engine: Callable[[], Engine], case: Case) -> dict[str, Any]:
    """Counts and milliseconds of the case's last prompt."""
    engine = make_engine()
    for messages in case.before:
        answered(engine, messages)
    num_before = engine.stats().num_encoded_images
    usage, timings = answered(engine, case.after)
    return {
        "case": case.name,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "hit": round(usage.cached_tokens / usage.prompt_tokens, 4),
        "num_encoded": engine.stats().num_encoded_images - num_before,
        "preprocess_ms": round(timings.preprocess_ms, 1),
        "encode_ms": round(timings.encode_ms, 1),
        "prefill_ms": round(timings.prefill_ms, 1),
    }


def answered(engine: Engine, messages: Messages) -> tuple[Any, Any]:
    """Usage and timings of one short answer."""
    engine.add(
        GenerationRequest("x", messages, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    )
    events = []
    while engine.has_work:
        events += engine.step()
    return events[-1].usage, events[-1].timings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    config = EngineConfig(
        arguments.checkpoint,
        device="cpu",
        scheduler="static",
        kv_cache_tokens=16384,
        num_threads=arguments.threads,
    )
    torch.set_num_threads(arguments.threads)
    first = Engine(config)
    # why: the first steps of a process pay for kernels and memory
    answered(first, described(frames(1)[0]))
    rows = []
    for case in cases():
        rows.append(measured(lambda: Engine(config, model=first.model), case))
        sys.stderr.write(f"{rows[-1]}\n")
    report = environment() | {
        "config": {"model": Path(arguments.checkpoint).name, "threads": arguments.threads},
        "cases": rows,
    }
    text = json.dumps(report, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
