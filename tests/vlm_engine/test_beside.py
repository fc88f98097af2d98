"""An encoder on a thread of its own: the same tokens, and chats that hardly feel it."""

import threading
from collections.abc import Iterator

import pytest
import torch

from tests.vlm_engine.builders import finish_step, image, make_scheduler, make_sequence
from tests.vlm_engine.reference import Case, Family, images_of, run
from tests.vlm_engine.simulator import Simulator, Truth, percentile
from vlm_engine.beside import SideThread
from vlm_engine.cost_model import CostModel
from vlm_engine.scheduler import Scheduler

FAMILIES = ["qwen2_5_vl_checkpoint", "smolvlm_checkpoint"]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return Family.load(request.getfixturevalue(request.param))


@pytest.mark.usefixtures("two_threads")
def test_tokens_equal_generate_while_the_encoder_runs_beside(family: Family) -> None:
    """E9: chats decode while frames are encoded; every image once, all tokens those of `generate()`."""
    text = ("What is happening here?", "Is anybody there?")
    cases = [Case(f"chat {n}", (text[n],), 40) for n in range(2)]
    for n in range(3):
        picture = family.picture(40 + n, 7, 6)
        cases.append(Case(f"frame {n}", ("and", picture, text[n % 2]), 6, {"priority": "background"}))
    engine = family.engine(scheduler="latency", encode="beside", chat_itl_ms=5.0)
    plans, execute = [], engine.runner.execute
    engine.runner.execute = lambda plan: plans.append(plan) or execute(plan)  # type: ignore[method-assign,func-returns-value,assignment]
    try:
        answers = run(engine, cases, every=2)
    finally:
        engine.runner.close()
    assert engine.runner.encodes_beside
    assert answers == {case.name: family.greedy(case) for case in cases}
    assert engine.stats().num_encoded_images == len(images_of(engine, *cases))
    assert sum(bool(plan.chunks and plan.encodes) for plan in plans) > 3


def test_a_chunk_never_reads_what_its_own_step_encodes() -> None:
    scheduler = make_scheduler(budget=4096, encoder_tokens=400)
    scheduler.encodes_beside = True
    shared = image(3, 40, "same")
    for _ in range(2):
        scheduler.add(make_sequence(60, images=(shared, image(45, 10, "other")), text=7))
    seen = 0
    while scheduler.has_work:
        seen += _check(scheduler)
    assert seen == 2


def _check(scheduler: Scheduler) -> int:
    """One step; returns how many images it encoded."""
    plan = scheduler.plan(0.0)
    fresh = {item.image.digest for item in plan.encodes}
    for chunk in plan.chunks:
        read = chunk.sequence.images_between(chunk.start, chunk.end)
        assert not fresh & {each.digest for each in read}
    assert plan.chunks or plan.encodes
    finish_step(scheduler, plan)
    return len(fresh)


def simulate(*, beside: bool) -> Simulator:
    """Two chats and 0.3 frames/s on a machine with the CPU kernels."""
    model = CostModel((12.0, 19.0, 3.0, 1.0, 4.0), (0.2, 8.0, 6.0, 13.0, 4.0))
    truth = Truth(model=model, runs_beside=beside)
    sim = Simulator(truth=truth, chat_itl_ms=90.0, chat_ttft_ms=300.0)

    def chat(_: object = None) -> None:
        sim.chat(on_end=chat)

    for number in range(2):
        sim.at(0.3 * number, chat)
    for number in range(18):
        sim.at(number / 0.3, lambda number=number: sim.frame(f"frame {number}"))  # type: ignore[misc]
    sim.run(60.0)
    return sim


def test_chats_feel_less_of_an_encoder_beside_them() -> None:
    ours, turns = simulate(beside=True), simulate(beside=False)
    for sim in (ours, turns):
        assert sum(not s.is_interactive for s in sim.ended) >= 16
    assert percentile(ours.gaps_ms, 0.5) < 0.9 * percentile(turns.gaps_ms, 0.5)
    assert percentile(ours.gaps_ms, 0.99) <= 1.1 * percentile(turns.gaps_ms, 0.99)
    assert sum(ours.errors[-500:]) / 500 < 0.12


def test_both_run_and_either_may_fail() -> None:
    side = SideThread(2, use_kernels=False)
    before = torch.get_num_threads()
    try:
        names = side.run(lambda: threading.current_thread().name, lambda: threading.current_thread().name)
        assert names[0] != names[1]
        ended: list[str] = []
        with pytest.raises(ZeroDivisionError):
            side.run(lambda: 1 // 0, lambda: ended.append("side"))
        with pytest.raises(KeyError):
            side.run(lambda: ended.append("main"), lambda: {}["nothing"])
        assert ended == ["side", "main"]
    finally:
        side.close()
        torch.set_num_threads(before)
