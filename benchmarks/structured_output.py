"""What it costs to keep answers to a form: compile time, and mask time a token, at a real vocabulary.

    python benchmarks/structured_output.py CHECKPOINT_DIR [--output FILE]

The answers are given, so that no model runs. Times are of the processor, so that a busy machine does not
count. `xgrammar` is measured beside it where it is installed.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer

from vlm_engine import StructuredOutput
from vlm_engine.grammar import Grammars

VEHICLE = {
    "type": "object",
    "properties": {"kind": {"enum": ["car", "bus", "truck"]}, "color": {"type": "string"}},
    "required": ["kind", "color"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "people": {"type": "integer"},
        "vehicles": {"type": "array", "items": VEHICLE},
        "summary": {"type": "string", "maxLength": 200},
        "weather": {"enum": ["dry", "rain"]},
    },
    "required": ["people", "vehicles", "summary", "weather"],
    "additionalProperties": False,
}
ANSWER = json.dumps(
    {
        "people": 3,
        "vehicles": [{"kind": "car", "color": "red"}, {"kind": "bus", "color": "dark blue"}],
        "summary": "Three people are waiting at the stop while a red car passes on the wet street.",
        "weather": "rain",
    }
)
REGEX = r"(red|blue|green) (car|bus)( and (red|blue|green) (car|bus))*"
CASES = {
    "json_schema": (StructuredOutput.of_json(SCHEMA), ANSWER),
    "json_object": (StructuredOutput.of_json(), ANSWER),
    "regex": (StructuredOutput("regex", REGEX), "red car and blue bus and green car and red bus"),
    "choice": (StructuredOutput.of_choice(["a red car", "a red bus", "nothing"]), "a red bus"),
}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = call()
    return 1e3 * (time.process_time() - started), result


def summary(compile_ms: float, masks_ms: list[float]) -> dict[str, float]:
    values = {
        "compile_ms": compile_ms,
        "mask_mean_ms": float(np.mean(masks_ms)),
        "mask_p99_ms": float(np.percentile(masks_ms, 99)),
        "mask_max_ms": max(masks_ms),
    }
    return {name: round(value, 4) for name, value in values.items()} | {"num_tokens": len(masks_ms)}


def ours(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """With the mask on the logits, which is most of the time."""
    grammars = Grammars(tokenizer, vocab_size, frozenset({tokenizer.eos_token_id}))
    load_ms, _ = timed(grammars.load)
    logits, cases = torch.randn(vocab_size), {}
    for name, (form, answer) in CASES.items():
        compile_ms, matcher = timed(lambda form=form: grammars.compile(form).start())
        masks_ms = []
        for token_id in tokenizer(answer)["input_ids"]:
            row = logits.clone()
            spent_ms, _ = timed(lambda row=row, matcher=matcher: matcher.edit(row))
            masks_ms.append(spent_ms)
            assert row[token_id].isfinite(), f"{name}: {token_id} must be allowed"
            matcher.accept(token_id)
        cases[name] = summary(compile_ms, masks_ms)
    return {"load_ms": round(load_ms), "cases": cases}


def xgrammar(tokenizer: Any, vocab_size: int) -> dict[str, Any] | None:
    """Without the mask on the logits."""
    try:
        import xgrammar
    except ImportError:
        return None
    load_ms, info = timed(lambda: xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size))
    compiler, cases = xgrammar.GrammarCompiler(info, max_threads=1), {}
    compilers = {"json": compiler.compile_json_schema, "regex": compiler.compile_regex}
    for name, (form, answer) in CASES.items():
        if form.kind not in compilers:
            continue
        compile_ms, grammar = timed(lambda form=form: compilers[form.kind](form.value))
        matcher, mask = xgrammar.GrammarMatcher(grammar), xgrammar.allocate_token_bitmask(1, vocab_size)
        masks_ms = []
        for token_id in tokenizer(answer)["input_ids"]:
            masks_ms.append(timed(partial(matcher.fill_next_token_bitmask, mask))[0])
            assert matcher.accept_token(token_id)
        cases[name] = summary(compile_ms, masks_ms)
    return {"load_ms": round(load_ms), "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    vocab_size = AutoConfig.from_pretrained(arguments.checkpoint).get_text_config().vocab_size
    # why: the first use pays for what is shared by all
    ours(tokenizer, vocab_size)
    report = {
        "vocab_size": vocab_size,
        "llguidance": ours(tokenizer, vocab_size),
        "xgrammar": xgrammar(tokenizer, vocab_size),
    }
    text = json.dumps(report, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
