"""A thread beside the steps of chats: the same tokens, and chats that hardly feel pictures and frames."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.vlm_engine.builders import finish_step, image, make_scheduler, make_sequence
from tests.vlm_engine.reference import Case, Family, drain, images_of, run
from tests.vlm_engine.simulator import Simulator, Truth, percentile, picture_of
from vlm_engine.beside import SideThread
from vlm_engine.budget import LatencyTargets, TimeBudget
from vlm_engine.cost_model import CostModel
from vlm_engine.engine import Engine
from vlm_engine.plan import StepPlan
from vlm_engine.request import TokenEvent
from vlm_engine.scheduler import Scheduler
from vlm_engine.sequence import Sequence
from vlm_engine.side_budget import SideBudget

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
@pytest.mark.parametrize("patience_ms", [60_000.0, 1.0], ids=["aside alone", "steps help"])
def test_tokens_equal_generate_while_frames_run_aside(family: Family, patience_ms: float) -> None:
    """E9: chats decode while frames are encoded and prefilled; every image once, tokens of `generate()`."""
    text = ("What is happening here?", "Is anybody there?")
    cases = [Case(f"chat {n}", (text[n],), 40) for n in range(2)]
    cases.append(Case("shows", (family.picture(44, 5, 6), text[0]), 4))
    for n in range(3):
        picture = family.picture(40 + n, 7, 6)
        cases.append(Case(f"frame {n}", ("and", picture, text[n % 2]), 6, {"priority": "background"}))
    with aside_engine(family, background_ttft_ms=patience_ms) as (engine, plans):
        answers = run(engine, cases, every=2)
        engine.check_integrity()
    assert answers == {case.name: family.greedy(case) for case in cases}
    assert engine.stats().num_encoded_images == len(images_of(engine, *cases))
    assert patience_ms == 1.0 or any(plan.chunks for plan in plans)
    assert any(plan.encodes for plan in plans)
    assert not any(chunk.sequence.is_interactive for plan in plans for chunk in plan.chunks)


@contextmanager
def aside_engine(family: Family, **limits: float) -> Iterator[tuple[Engine, list[StepPlan]]]:
    """An engine with a side thread, and the plans that it was given."""
    engine = family.engine(scheduler="latency", encode="beside", **limits)
    plans, start = list[StepPlan](), engine.runner.start_aside

    def noted(plan: StepPlan) -> None:
        plans.append(plan)
        start(plan)

    engine.runner.start_aside = noted  # type: ignore[method-assign]
    try:
        yield engine, plans
    finally:
        engine.runner.close()


def frame_of(family: Family) -> Case:
    return Case("frame", ("and", family.picture(40, 7, 6), "what?"), 6, {"priority": "background"})


def begin(engine: Engine, family: Family) -> None:
    """A chat that decodes and a frame of which the side thread has the first piece."""
    engine.add(Case("chat", ("What is happening here?",), 60).request)
    engine.step()
    engine.add(frame_of(family).request)
    while not engine.scheduler.is_aside_busy:
        engine.step()


@pytest.mark.usefixtures("two_threads")
def test_a_frame_that_is_cancelled_while_it_is_worked_on_frees_all_later(family: Family) -> None:
    with aside_engine(family) as (engine, _):
        begin(engine, family)
        event = engine.abort("frame")
        assert event is not None
        assert event.finish_reason == "cancelled"
        engine.check_integrity()
        again = frame_of(family)
        engine.add(again.request)
        told = [event for event in drain(engine) if event.request_id == "frame"]
        assert [token for event in told for token in event.token_ids] == family.greedy(again)


@pytest.mark.usefixtures("two_threads")
def test_what_fails_aside_ends_its_own_requests_only(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    with aside_engine(family) as (engine, _):
        start = engine.model.encoder.run

        def fail(*_: object) -> None:
            raise RuntimeError("no more memory")

        monkeypatch.setattr(engine.model.encoder, "run", fail)
        begin(engine, family)
        ends: dict[str, TokenEvent] = {}
        while "frame" not in ends and engine.has_work:
            ends |= {event.request_id: event for event in engine.step() if event.finish_reason}
        assert ends["frame"].finish_reason == "error"
        assert "no more memory" in (ends["frame"].error or "")
        monkeypatch.setattr(engine.model.encoder, "run", start)
        ends |= {event.request_id: event for event in drain(engine) if event.finish_reason}
        assert ends["chat"].finish_reason == "length"
        engine.check_integrity()


def aside_scheduler(**limits: int) -> Scheduler:
    scheduler, cost = make_scheduler(**limits), CostModel(has_side=True)
    scheduler.budget = TimeBudget(cost, LatencyTargets(1000.0, 60_000.0, background_ttft_ms=60_000.0), 4096)
    scheduler.side_budget = SideBudget(cost, 60_000.0, 4096, scheduler.budget.floor)
    return scheduler


def test_nothing_runs_aside_without_chats() -> None:
    scheduler = aside_scheduler()
    scheduler.add(make_sequence(60, images=(image(3, 40, "one"),), priority="background"))
    assert scheduler.plan_aside(0.0).is_empty
    assert scheduler.plan(0.0).encodes


def test_a_chat_alone_has_its_picture_from_all_threads() -> None:
    """Nobody else's steps would run beside the side thread, and its own first tokens are no reason."""
    scheduler = aside_scheduler()
    scheduler.add(make_sequence(60, images=(image(3, 40, "one"),)))
    assert scheduler.plan_aside(0.0).is_empty
    assert scheduler.plan(0.0).encodes


def test_a_frame_that_is_worked_on_makes_room_for_a_chat() -> None:
    """Memory for one of both: the chat has it when the piece that runs is done, not when the frame is."""
    scheduler = aside_scheduler(num_blocks=20, num_chat_blocks=0)
    scheduler.add(make_sequence(4, max_tokens=50))
    finish_step(scheduler, scheduler.plan(0.0))
    frame = make_sequence(44, priority="background")
    scheduler.add(frame)
    scheduler.side_budget = OneByOne(scheduler.side_budget, 32)
    assert frame in scheduler.plan_aside(0.0).sequences
    chat = make_sequence(60, max_tokens=50, text=9)
    scheduler.add(chat)
    num_stalled = 0
    for _ in range(8):
        plan = scheduler.plan(0.0)
        num_stalled += "memory" in dict(plan.stalled)
        finish_step(scheduler, plan)
        scheduler.commit_aside()
        scheduler.plan_aside(0.0)
    assert num_stalled == 1
    assert chat.num_computed_tokens >= 60
    assert frame.num_preemptions == 1
    scheduler.check_integrity()


def test_a_step_that_is_planned_twice_counts_its_stalls_once() -> None:
    """A chat without a slot has tokens, so that the other's picture is left aside, and then it is not."""
    scheduler = aside_scheduler(num_blocks=200, encoder_tokens=600, max_num_seqs=1)
    scheduler.budget = TimeBudget(CostModel(has_side=True), LatencyTargets(1000.0, 600.0), 4096)
    scheduler.add(make_sequence(505, images=(picture_of(0, 2000, "large"),)))
    finish_step(scheduler, scheduler.plan(0.0))
    scheduler.add(make_sequence(20))
    assert scheduler.has_chat_tokens
    plan = scheduler.plan(0.0)
    assert plan.encodes
    assert plan.stalled == (("slots", 1),)
    assert scheduler.counts == {"slots": 1}


class OneByOne:
    """A budget for the side thread: most of a prompt in its first piece, then one token a piece."""

    def __init__(self, budget: Any, first: int) -> None:
        self._budget, self._left = budget, [first]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._budget, name)

    def fit_tokens(self, sequence: Sequence, num_wanted: int) -> int:
        return min(self._left.pop() if self._left else 1, num_wanted)


def test_descriptions_end_while_new_frames_keep_the_side_thread_busy() -> None:
    """What runs aside is no reason to give nothing to those that decode beside chats without slack."""
    scheduler = aside_scheduler()
    budget = scheduler.budget
    assert isinstance(budget, TimeBudget)
    scheduler.add(make_sequence(4, max_tokens=50, priority="background"))
    finish_step(scheduler, scheduler.plan(0.0))
    budget.floor.begin(0.0, is_wanted=True)
    scheduler.add(make_sequence(8, max_tokens=50))
    scheduler.add(make_sequence(60, priority="background"))
    assert not scheduler.plan_aside(1.0).is_empty
    assert budget.floor.owed_ms(1.0) > 0


@pytest.mark.usefixtures("two_threads")
def test_what_was_dropped_is_forgotten_though_nothing_runs_aside(family: Family) -> None:
    with aside_engine(family) as (engine, _):
        frame = frame_of(family)
        engine.add(frame.request)
        drain(engine)
        assert engine.runner._features
        engine.scheduler.encoder_cache.drop_idle(list(engine.runner._features))
        engine.add(Case("chat", ("What is happening here?",), 3).request)
        drain(engine)
        assert not engine.runner._features


def test_steps_leave_alone_what_runs_aside() -> None:
    """Neither its sequences nor pictures that it encodes for others as well; a chat's picture goes first."""
    scheduler = aside_scheduler(encoder_tokens=400)
    shared = image(3, 40, "same")
    scheduler.add(make_sequence(8, max_tokens=50))
    finish_step(scheduler, scheduler.plan(0.0))
    for _ in range(2):
        scheduler.add(make_sequence(60, images=(shared,), text=7, priority="background"))
    scheduler.add(make_sequence(60, images=(image(3, 40, "asked"),)))
    seen = []
    while any(not s.is_decoding for s in (*scheduler.running, *scheduler.waiting)):
        aside = scheduler.plan_aside(0.0)
        for _ in range(3):
            plan = scheduler.plan(0.0)
            assert not plan.encodes
            assert not set(plan.sequences) & set(aside.sequences)
            for chunk in plan.chunks:
                read = chunk.sequence.images_between(chunk.start, chunk.end)
                assert not {each.digest for each in read} & {item.image.digest for item in aside.encodes}
            finish_step(scheduler, plan)
        seen += [item.image.digest for item in aside.encodes]
        scheduler.commit_aside()
        for chunk in aside.chunks:
            assert not chunk.sequence.is_interactive
            if chunk.samples:
                chunk.sequence.append(5)
        scheduler.check_integrity()
    assert seen == [image(3, 40, "asked").digest, shared.digest]


def simulate(*, has_side: bool, rate: float = 0.3) -> Simulator:
    """Two chats and some frames a second on a machine with the CPU kernels."""
    model = CostModel((12.0, 19.0, 3.0, 1.0, 4.0), (0.2, 8.0, 6.0, 13.0, 4.0))
    truth = Truth(model=model, has_side=has_side)
    sim = Simulator(truth=truth, chat_itl_ms=90.0, chat_ttft_ms=300.0)

    def chat(_: object = None) -> None:
        sim.chat(on_end=chat)

    for number in range(2):
        sim.at(0.3 * number, chat)
    for number in range(int(60 * rate)):
        sim.at(number / rate, lambda number=number: sim.frame(f"frame {number}"))  # type: ignore[misc]
    sim.run(60.0)
    return sim


def test_chats_feel_less_of_frames_beside_them() -> None:
    ours, turns = simulate(has_side=True), simulate(has_side=False)
    for sim in (ours, turns):
        assert sum(not s.is_interactive for s in sim.ended) >= 16
    assert percentile(ours.gaps_ms, 0.5) < 0.85 * percentile(turns.gaps_ms, 0.5)
    assert percentile(ours.gaps_ms, 0.99) < 0.8 * percentile(turns.gaps_ms, 0.99)
    assert sum(ours.errors[-500:]) / 500 < 0.12


def test_steps_help_where_the_side_thread_alone_would_be_late() -> None:
    sim = simulate(has_side=True, rate=0.5)
    ended = [s for s in sim.ended if not s.is_interactive]
    assert len(ended) >= 26
    assert max(s.first_token_s - s.arrival_s for s in ended if s.first_token_s) < 8.0
    assert percentile(sim.gaps_ms, 0.99) < 90.0


def test_the_side_thread_works_beside_and_tells_what_it_raised() -> None:
    side, before = SideThread[str](2, use_kernels=False), torch.get_num_threads()
    go_on = threading.Event()

    def work() -> str:
        go_on.wait(120)
        return threading.current_thread().name

    try:
        side.start(lambda: str(torch.get_num_threads()))
        assert side.take() == "1"
        side.start(work)
        assert side.is_busy
        assert not side.is_done()
        assert side.narrow(torch.get_num_threads) == 1
        go_on.set()
        assert side.is_done(120)
        assert side.take() != threading.current_thread().name
        assert not side.is_busy
        side.start(lambda: str(1 // 0))
        with pytest.raises(ZeroDivisionError):
            side.take()
        assert not side.is_done()
    finally:
        side.close()
        torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="affinity and priorities of threads are Linux's")
@pytest.mark.parametrize("is_leader", [True, False], ids=["own session", "in ours"])
def test_who_stands_aside_leaves_cores_and_goes_last(is_leader: bool) -> None:
    code = """
import json, os, pathlib, threading
from vlm_engine.beside import stand_all_aside

def group_niceness():
    group = pathlib.Path("/proc/self/autogroup")
    return (group.read_text().split() if group.exists() else [])[-1:]

other = threading.Thread(target=threading.Event().wait, daemon=True)
other.start()
before = os.sched_getaffinity(0), os.nice(0), group_niceness()
stand_all_aside(3)
cores = {len(os.sched_getaffinity(n)) for n in (0, other.native_id)}
niceness = {os.getpriority(os.PRIO_PROCESS, n) - before[1] for n in (0, other.native_id)}
print(json.dumps([len(before[0]), [*cores], [*niceness], before[2], group_niceness()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], start_new_session=is_leader, capture_output=True, text=True, check=True
    )
    all_cores, cores, niceness, group_before, group = json.loads(done.stdout)
    assert cores == [all_cores - all_cores // 2]
    assert niceness == [3]
    # why: a kernel without autogroups has no such file, and a session as old as the machine is in no group
    assert group == (["3"] if is_leader and group_before else group_before)
