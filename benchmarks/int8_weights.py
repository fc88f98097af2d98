"""Weights in eight bits beside bfloat16: how far the numbers move, and what steps cost.

    python benchmarks/int8_weights.py CHECKPOINT [--scenes 8] [--output FILE]

Error: conversations about drawn scenes, with the answers that the model gives in float32, are read by each
variant; logits are compared at every position after the picture. Then each writes its own greedy answers.
Cost: processor time of one thread, so that a busy machine counts less; medians of steps.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from appliance.bench.machine import environment
from appliance.prompts import describe_messages, detection_line
from vision.scenes import render, sample_scene
from vision.scenes.scene import center_x
from vlm_engine import Engine, EngineConfig, GenerationRequest, SamplingParams

VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16, our kernels": {},
    "bfloat16, torch": {"cpu_kernels": "torch"},
    "int8, our kernels": {"quantization": "int8"},
    "int8, torchao": {"quantization": "int8", "cpu_kernels": "torch"},
}
CHUNK = 256
DECODE_ROWS = (1, 2, 8)


def make_engine(model: str, **settings: Any) -> Engine:
    limits = {"kv_cache_tokens": 16384, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
    config = {"dtype": "bfloat16", "device": "cpu", "scheduler": "static", "num_threads": 1}
    return Engine(EngineConfig(model, **(config | limits | settings)))


def conversations(count: int) -> list[list[dict[str, Any]]]:
    found = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        scene = sample_scene(rng)
        image = Image.fromarray(render(scene, rng)[:, :, ::-1].copy())
        centers = [center_x(each.box) / scene.width for each in scene.objects]
        line = detection_line([each.label for each in scene.objects], centers)
        found.append(describe_messages("Describe this camera frame.", image, line))
    return found


def ask(engine: Engine, messages: list[dict[str, Any]], max_tokens: int) -> tuple[list[int], str]:
    """Greedy tokens and text."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    engine.add(GenerationRequest("r", messages, sampling))
    token_ids: list[int] = []
    text = ""
    while engine.has_work:
        for event in engine.step():
            token_ids += event.token_ids
            text += event.text
    return token_ids, text


def read(engine: Engine, messages: list[dict[str, Any]]) -> Tensor:
    """Logits ``[n, vocab]`` of all positions after the last picture of a conversation."""
    kept: list[Tensor] = []
    model, forward = engine.model, engine.model.forward

    def keep(*parts: Any) -> Tensor:
        kept.append(forward(*parts))
        return kept[-1]

    prompt = model.prompts.prepare(messages)
    model.forward = keep  # type: ignore[method-assign]
    ask(engine, messages, 1)
    model.forward = forward  # type: ignore[method-assign]
    last = prompt.placeholders[-1]
    return model.logits(torch.cat(kept)[last.start + last.length : len(prompt.token_ids)])


def compare(logits: Tensor, exact: Tensor) -> dict[str, float]:
    centred = exact - exact.mean(dim=-1, keepdim=True)
    given, wanted = logits.log_softmax(-1), exact.log_softmax(-1)
    return {
        "logit_error": float((logits - exact).norm() / centred.norm()),
        "kl": float((wanted.exp() * (wanted - given)).sum(-1).mean()),
        "same_best": float((logits.argmax(-1) == exact.argmax(-1)).float().mean()),
    }


def shared_start(tokens: list[int], exact: list[int]) -> float:
    """Share of an answer before its first other token."""
    same = next((i for i, pair in enumerate(zip(tokens, exact, strict=False)) if pair[0] != pair[1]), None)
    return 1.0 if same is None and len(tokens) == len(exact) else (same or 0) / max(1, len(exact))


def cpu_ms(engine: Engine) -> float:
    started = time.process_time()
    engine.step()
    return 1e3 * (time.process_time() - started)


def decode_ms(engine: Engine, rows: int, steps: int) -> float:
    sampling = SamplingParams(max_tokens=100_000, temperature=0.0, ignore_eos=True)
    for number in range(rows):
        engine.add(GenerationRequest(f"d{number}", [{"role": "user", "content": "Tell me more."}], sampling))
    for _ in range(3):
        engine.step()
    times = [cpu_ms(engine) for _ in range(steps)]
    for number in range(rows):
        engine.abort(f"d{number}")
    return median(times)


def prefill_ms(engine: Engine) -> float:
    """A chunk of `CHUNK` tokens, the best of four."""
    content = "a line of plain words " * CHUNK
    engine.add(GenerationRequest("p", [{"role": "user", "content": content}], SamplingParams(max_tokens=1)))
    times = [cpu_ms(engine) for _ in range(4)]
    engine.abort("p")
    return min(times)


def measure(
    model: str, settings: dict[str, Any], reference: Iterator[Any], num_tokens: int, steps: int
) -> dict[str, Any]:
    engine = make_engine(model, **settings)
    errors, shares = [], []
    for messages, answer, token_ids, logits in reference:
        errors.append(compare(read(engine, [*messages, *answer]), logits))
        shares.append(shared_start(ask(engine, messages, num_tokens)[0], token_ids))
    result: dict[str, Any] = {name: mean(each[name] for each in errors) for name in errors[0]}
    result["answers_alike"] = mean(shares)
    result["decode_ms"] = {str(rows): round(decode_ms(engine, rows, steps), 2) for rows in DECODE_ROWS}
    engine = make_engine(model, max_num_batched_tokens=CHUNK, **settings)
    result[f"prefill_{CHUNK}_ms"] = round(prefill_ms(engine), 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--scenes", type=int, default=8)
    parser.add_argument("--answer-tokens", type=int, default=40)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    exact = make_engine(options.model, dtype="float32")
    reference = []
    for messages in conversations(options.scenes):
        token_ids, text = ask(exact, messages, options.answer_tokens)
        answer = [{"role": "assistant", "content": text}, {"role": "user", "content": "Is that all?"}]
        reference.append((messages, answer, token_ids, read(exact, [*messages, *answer])))
    del exact
    results = {
        name: measure(options.model, settings, iter(reference), options.answer_tokens, options.steps)
        for name, settings in VARIANTS.items()
    }
    report = {
        "environment": environment(),
        "options": {
            "model": options.model,
            "scenes": options.scenes,
            "answer_tokens": options.answer_tokens,
            "steps": options.steps,
        },
    }
    text = json.dumps(report | {"results": results}, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
