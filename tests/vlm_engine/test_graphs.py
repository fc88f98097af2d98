"""Recorded decode steps give what the steps give; on a CPU a recording is the function called again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen

from tests.vlm_engine.guesses import Guesses
from tests.vlm_engine.reference import Case, Family, run
from tests.vlm_engine.test_varlen import documented_kernel
from vlm_engine.models.graphs import GraphStack

FAMILIES = ["qwen3_vl_checkpoint", "qwen2_5_vl_checkpoint", "smolvlm_checkpoint", "gemma3_checkpoint"]


class Recorder:
    """Calls the function again where a graph would be replayed, into the same output."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Any]]:
        self.num_recorded += 1
        output = function()

        def replay() -> None:
            self.num_replayed += 1
            output.copy_(function())

        return output, replay


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Family:
    monkeypatch.setattr(torch_varlen, "varlen_attn", documented_kernel)
    folder: Path = request.getfixturevalue(request.param)
    family = Family.load(folder)
    for name in ("use_varlen", "use_graphs"):
        object.__setattr__(family.model.spec, name, True)
    return family


def use_graphs(family: Family, capture: Any) -> None:
    model: Any = family.model
    model._stack = GraphStack(model._stack, 1024, capture)


def cases_of(family: Family) -> list[Case]:
    texts = [
        Case(f"text {n}", (word,), 10 + 2 * n) for n, word in enumerate(("What is this?", "Who?", "a b c"))
    ]
    return [*texts, Case("frame", (family.picture(3), "What is this?"), 9)]


def test_tokens_equal_generate(family: Family) -> None:
    """Sequences come and go, so that steps have one to four of them and graphs are filled up."""
    recorder = Recorder()
    use_graphs(family, recorder)
    cases = cases_of(family)
    engine = family.engine(block_size=256, kv_cache_tokens=8192)
    assert run(engine, cases, every=3) == {case.name: family.greedy(case) for case in cases}
    assert recorder.num_recorded == 3
    assert recorder.num_replayed > 10


def test_proposed_tokens_are_rows_of_recorded_steps(family: Family) -> None:
    """A step of a sequence and its proposed tokens is replayed as one of so many sequences."""
    recorder = Recorder()
    use_graphs(family, recorder)
    cases = cases_of(family)
    expected = {case.name: family.greedy(case) for case in cases}
    engine = family.engine(block_size=256, kv_cache_tokens=8192)
    engine.scheduler.speculator = guesses = Guesses(expected, wrong=0.2)
    assert run(engine, cases, every=3) == expected
    assert guesses.stats.num_accepted_tokens > 10
    stack: Any = family.model
    assert max(stack._stack._recorded) > len(cases), "rows of a step that has fewer sequences"
    assert recorder.num_replayed > 5


def test_what_cannot_be_recorded_runs_as_it_is(family: Family, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Any]]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    use_graphs(family, refuse)
    case = cases_of(family)[0]
    engine = family.engine(block_size=256, kv_cache_tokens=8192)
    assert run(engine, [case]) == {case.name: family.greedy(case)}
    assert caplog.text.count("without CUDA graphs: operation not permitted") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_real_graphs(qwen2_5_vl_checkpoint: Path) -> None:
    from vlm_engine import Engine, EngineConfig

    answers = []
    for graphs in (False, True):
        config = EngineConfig(
            str(qwen2_5_vl_checkpoint), dtype="bfloat16", device="cuda", block_size=256, cuda_graphs=graphs
        )
        answers.append(run(Engine(config), [Case("a", ("What is this?",), 12), Case("b", ("Who?",), 9)]))
    assert answers[0] == answers[1]
