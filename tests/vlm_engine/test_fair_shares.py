"""Background work stands in one line, each tenant behind itself."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlm_engine.builders import finish_step, make_scheduler, make_sequence, run
from vlm_engine.fair_shares import FairShares
from vlm_engine.scheduler import Scheduler
from vlm_engine.sequence import Sequence


def frame(tenant: str, num_prompt: int = 20, **more: float) -> Sequence:
    return make_sequence(num_prompt, max_tokens=1, priority="background", tenant=tenant, **more)


def first_steps(scheduler: Scheduler) -> list[Sequence]:
    plans = run(scheduler)
    order = [chunk.sequence for plan in plans for chunk in plan.chunks]
    return list(dict.fromkeys(order))


def test_a_flood_waits_behind_itself() -> None:
    scheduler = make_scheduler(budget=20, max_num_seqs=1)
    flood = [frame("api") for _ in range(10)]
    for sequence in flood:
        scheduler.add(sequence)
    finish_step(scheduler, scheduler.plan(0.0))
    quiet = frame("yard")
    scheduler.add(quiet)
    assert first_steps(scheduler)[:2] == [quiet, flood[1]]


def test_a_tenant_is_served_in_order_and_saves_nothing_up() -> None:
    scheduler = make_scheduler(budget=20, max_num_seqs=1)
    for sequence in [frame("yard") for _ in range(6)]:
        scheduler.add(sequence)
    run(scheduler)
    ours, others = ([frame(tenant) for _ in range(3)] for tenant in ("yard", "gate"))
    for sequence in (*others, *ours):
        scheduler.add(sequence)
    order = first_steps(scheduler)
    assert [s for s in order if s in ours] == ours
    assert order[:2] == [others[0], ours[0]], "who was idle has no claim to the time before"


def test_what_ended_without_having_run_costs_nothing() -> None:
    scheduler = make_scheduler(budget=20, max_num_seqs=1)
    scheduler.add(frame("gate"))
    for sequence in [frame("yard", expires_at=1.0) for _ in range(9)]:
        scheduler.add(sequence)
    finish_step(scheduler, scheduler.plan(0.0))
    assert len(scheduler.plan(1.0).expired) == 9
    gate, yard = frame("gate"), frame("yard")
    scheduler.add(gate)
    scheduler.add(yard)
    assert first_steps(scheduler) == [yard, gate]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(10, 300)),
        min_size=30,
        max_size=60,
    )
)
def test_tenants_that_always_wait_get_equal_shares(requests: list[tuple[str, int]]) -> None:
    shares = FairShares()
    line = [frame(tenant, size) for tenant, size in requests]
    for sequence in line:
        shares.enter(sequence)
    line.sort(key=lambda s: (s.place, s.arrival_s))
    served = dict.fromkeys("abc", 0)
    left = {tenant: sum(name == tenant for name, _ in requests) for tenant in served}
    for sequence in line:
        if not all(left.values()):
            break
        shares.start(sequence)
        served[sequence.request.tenant] += sequence.num_prompt_tokens + 1
        left[sequence.request.tenant] -= 1
        if all(left.values()):
            assert max(served.values()) - min(served.values()) <= 2 * 301
