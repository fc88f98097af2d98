"""Background work takes no more of a step than it needs to be done in time."""

import math

import pytest

from tests.vlm_engine.simulator import Simulator, Truth, percentile
from vlm_engine.cost_model import CostModel, SliceWork, StepWork
from vlm_engine.pace import SPARE, Owed, needed_share, paced_ms

# Milliseconds of a 2-core machine with the CPU kernels, as `StepWork.features`.
FAST = Truth(model=CostModel((12.0, 19.0, 3.0, 1.0, 4.0), (0.1, 5.0, 4.0, 8.0, 2.5)))
ONE_MS = CostModel((0.0, 64.0, 0.0, 0.0, 0.0), (4.0, 0.0, 0.0, 0.0, 0.0))


def owed(
    arrival_s: float,
    num_tokens: int,
    num_slices: int = 0,
    expires_s: float | None = None,
    wanted_s: float | None = None,
) -> Owed:
    """Of `ONE_MS`: a millisecond a token and a slice."""
    return Owed(arrival_s, expires_s, StepWork(num_tokens), SliceWork(num_slices), wanted_s)


@pytest.mark.parametrize(
    ("work", "share"),
    [
        ([], 0.0),
        ([owed(0.0, 500)], 0.25),
        ([owed(0.0, 100, 400)], 0.25),
        ([owed(0.0, 500), owed(0.0, 500)], 0.5),
        ([owed(0.0, 350, expires_s=1.0), owed(0.0, 500)], 0.5),
        ([owed(0.0, 350), owed(0.0, 350, expires_s=1.0)], 1.0),
        ([owed(0.0, 500, expires_s=60.0)], 0.25),
        ([owed(-3.0, 1)], 1.0),
        ([owed(0.0, 500, wanted_s=1.0)], 0.5),
        ([owed(0.0, 500, wanted_s=60.0)], 0.25),
        ([owed(0.0, 1, wanted_s=0.0), owed(0.0, 1)], 1.0),
        ([owed(0.0, 5000), owed(0.0, 1)], 1.0),
    ],
)
def test_the_share_that_is_needed(work: list[Owed], share: float) -> None:
    assert needed_share(work, 0.0, 2.0, ONE_MS) == pytest.approx(min(1.0, share * SPARE))


def test_a_share_as_milliseconds_beside_chats() -> None:
    assert paced_ms(0.0, 15.0) == 15.0
    assert paced_ms(0.5, 15.0) == pytest.approx(30.0)
    assert paced_ms(0.75, 15.0) == pytest.approx(60.0)
    assert paced_ms(1.0, 15.0) == math.inf


def simulate(
    rate: float, background_ttft_ms: float, seconds: float = 60.0, *, chat_itl_ms: float = 90.0
) -> Simulator:
    """Two chats all the time and frames at a rate."""
    targets = {"chat_itl_ms": chat_itl_ms, "chat_ttft_ms": 300.0, "background_ttft_ms": background_ttft_ms}
    sim = Simulator(truth=FAST, **targets)

    def chat(_: object = None) -> None:
        sim.chat(on_end=chat)

    for number in range(2):
        sim.at(0.3 * number, chat)
    for number in range(int(rate * seconds)):
        sim.at(number / rate, lambda number=number: sim.frame(f"frame {number}"))  # type: ignore[misc]
    sim.run(seconds)
    return sim


def frames(sim: Simulator) -> list[float]:
    """Seconds to the first token of each frame."""
    ended = [s for s in sim.ended if not s.is_interactive]
    return [s.first_token_s - s.arrival_s for s in ended if s.first_token_s is not None]


def test_with_time_to_spare_chats_are_faster_than_their_target() -> None:
    paced, hasty = simulate(0.3, 4000.0), simulate(0.3, 1.0)
    assert percentile(hasty.gaps_ms, 0.99) > 70.0
    assert percentile(paced.gaps_ms, 0.99) < 40.0
    assert len(frames(paced)) >= 16
    assert percentile(frames(paced), 0.95) < 4.0


def test_under_load_background_work_gets_all_that_chats_leave() -> None:
    paced, hasty = simulate(1.5, 4000.0), simulate(1.5, 1.0)
    assert len(frames(paced)) >= 0.95 * len(frames(hasty)) > 20
    assert percentile(paced.gaps_ms, 0.99) <= 90.0 + paced.cost.residual_ms(90.0)


def test_a_chats_prompt_is_spread_over_the_time_to_its_first_token() -> None:
    """Others decode meanwhile: their gaps stay short, and the first token is in time."""
    gaps = {}
    for ttft_ms in (300.0, 30.0):
        sim = Simulator(truth=FAST, chat_itl_ms=90.0, chat_ttft_ms=ttft_ms)
        sim.at(0.0, lambda sim=sim: sim.chat(max_tokens=1500))  # type: ignore[misc]
        for number in range(40):
            sim.at(0.5 + number / 2, lambda sim=sim: sim.chat(num_prompt=150, max_tokens=8))  # type: ignore[misc]
        sim.run(20.0)
        gaps[ttft_ms] = percentile(sim.gaps_ms, 0.99)
        assert percentile(sim.ttfts_ms, 0.9) < 300.0
    assert gaps[300.0] < 0.7 * gaps[30.0]


@pytest.mark.parametrize("stall_s", [0.0, 1.0, 5.0, 60.0])
def test_what_a_stall_cost_chats_is_not_made_up_for_at_the_frames_expense(stall_s: float) -> None:
    """Chats are as fast as before at once, and frames get what that leaves, not only their floor."""
    sim = simulate(2.0, 1.0, 20.0, chat_itl_ms=40.0)
    for number in range(120):
        sim.frame(f"later {number}")
    for _ in range(2):
        sim.chat(max_tokens=1000)
    sim.run(20.5)
    sim.now += stall_s
    sim.run(sim.now + 0.5)
    started_s, busy_s, num_gaps = sim.now, sim.background_busy_s, len(sim.gaps_ms)
    sim.run(sim.now + 2.0)
    assert (sim.background_busy_s - busy_s) / (sim.now - started_s) > 0.4
    assert sum(sim.gaps_ms[num_gaps:]) / len(sim.gaps_ms[num_gaps:]) <= 40.0


def test_errors_of_long_slices_do_not_keep_frames_out_of_short_steps() -> None:
    """Between two answers slices are ten times as long as beside a chat, and err by as much more."""
    sim = Simulator(truth=FAST, chat_itl_ms=30.0, background_ttft_ms=1.0)

    def chat(_: object = None) -> None:
        sim.chat(on_end=chat)

    chat()
    for number in range(60):
        sim.at(number / 2, lambda number=number: sim.frame(f"frame {number}"))  # type: ignore[misc]
    sim.run(15.0)
    busy_s, num_gaps = sim.background_busy_s, len(sim.gaps_ms)
    sim.run(30.0)
    assert (sim.background_busy_s - busy_s) / 15.0 > 0.3
    assert percentile(sim.gaps_ms[num_gaps:], 0.99) < 30.0 + sim.cost.residual_ms(30.0)
