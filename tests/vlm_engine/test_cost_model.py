"""Predictions of step times, and the budget that is made of them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlm_engine.builders import make_sequence
from tests.vlm_engine.simulator import SLICES, STEP_TRUTH, Simulator, Truth, percentile
from vlm_engine.budget import LatencyTargets, Moment, TimeBudget
from vlm_engine.cost_model import CostModel, LinearModel, SliceWork, StepWork


def test_the_model_learns_a_device_it_never_saw() -> None:
    truth, cost, rng = LinearModel(STEP_TRUTH), CostModel(), random.Random(1)
    for _ in range(400):
        work = StepWork(rng.randint(1, 300), rng.randint(0, 8), rng.randint(0, 8000), rng.randint(0, 300_000))
        cost.learn_step(work, truth.predict(work.features()) * rng.uniform(0.95, 1.05))
    assert cost.step.relative_error < 0.05
    probe = StepWork(128, 4, 3000, 100_000)
    assert cost.step_ms(probe) == pytest.approx(truth.predict(probe.features()), rel=0.06)


def test_a_step_that_was_held_up_moves_no_prediction() -> None:
    cost, work = CostModel(), StepWork(2, 2, 600)
    for _ in range(100):
        cost.learn_step(work, 20.0)
    cost.learn_step(work, 900.0)
    assert cost.step_ms(work) == pytest.approx(20.0, rel=0.15)


def test_an_hour_of_decodes_leaves_what_is_known_of_prompts() -> None:
    """Steps of one kind, and noisy, neither blow the model up nor wash out the others."""
    truth, cost, rng = LinearModel((2.0, 6.0, 0.5, 1.0, 2.0)), CostModel(), random.Random(3)

    def measure(work: StepWork) -> None:
        cost.learn_step(work, truth.predict(work.features()) * rng.lognormvariate(0.0, 0.3))

    prompt = StepWork(200, 0, 0, 30_000)
    for _ in range(300):
        measure(StepWork(rng.randint(16, 256), 0, 0, rng.randint(1000, 60_000)))
    for step in range(20_000):
        measure(StepWork(2, 2, 60 + step % 300))
        assert cost.step_ms(prompt) < 100.0
    assert cost.step_ms(prompt) == pytest.approx(truth.predict(prompt.features()), rel=0.3)
    assert cost.step_ms(StepWork(2, 2, 200)) == pytest.approx(2.4, rel=0.2)


def test_a_weight_that_noise_would_drive_below_zero_stays_at_it() -> None:
    """More work never takes less time, and the other weights make up for it."""
    model, rng = LinearModel((10.0, 10.0)), random.Random(2)
    for _ in range(500):
        x = rng.uniform(0.5, 1.5)
        model.learn((1.0, x), 20.0 - 3.0 * x)
    assert model.weights[1] == 0.0
    assert model.weights[0] == pytest.approx(17.0, rel=0.05)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 512), st.floats(0.1, 5000.0)), min_size=1, max_size=120))
def test_predictions_stay_finite_and_never_negative(steps: list[tuple[int, float]]) -> None:
    cost = CostModel()
    for tokens, measured_ms in steps:
        cost.learn_step(StepWork(tokens, 1, 0, tokens * 100), measured_ms)
        assert 0 <= cost.step_ms(StepWork(17, 2, 500, 900)) < 1e7
    assert cost.residual_ms() >= 0


def test_what_is_told_of_errors_stays_as_it_was_while_steps_are_learned() -> None:
    """Another thread than the one that learns asks for them."""
    cost, work = CostModel(), StepWork(2, 2, 600)
    cost.learn_step(work, 20.0)
    told = cost.step.recent_errors
    before = list(told)
    cost.learn_step(work, 30.0)
    assert list(told) == before


def budget_of(**targets: float) -> TimeBudget:
    return TimeBudget(CostModel(STEP_TRUTH), LatencyTargets(**targets), 2048)


def chat_with_tokens(num_output: int, first_s: float, last_s: float) -> object:
    chat = make_sequence(20, max_tokens=100)
    chat.token_ids += [5] * num_output
    chat.num_computed_tokens = chat.num_tokens - 1
    chat.first_token_s, chat.last_token_s = first_s, last_s
    return chat


def test_the_allowance_is_what_the_target_leaves() -> None:
    budget = budget_of(chat_itl_ms=100.0)
    budget.begin(Moment([chat_with_tokens(5, 0.6, 1.0)], [], 1.01))  # type: ignore[list-item]
    assert budget.allowance_ms == pytest.approx(90.0)
    budget.begin(Moment([chat_with_tokens(5, 0.4, 1.0)], [], 1.0))  # type: ignore[list-item]
    assert budget.allowance_ms == 0.0, "a chat that is late on average gets what it needs first"


def test_without_chats_steps_are_as_long_as_a_first_token_may_wait() -> None:
    budget = budget_of(chat_ttft_ms=400.0)
    budget.begin(Moment([], [], 0.0))
    assert budget.allowance_ms == 200.0


def test_a_prompt_is_cut_to_what_fits() -> None:
    budget, frame = budget_of(chat_itl_ms=100.0), make_sequence(2000, priority="background")
    budget.begin(Moment([chat_with_tokens(1, 1.0, 1.0), frame], [], 1.0))  # type: ignore[list-item]
    fits = budget.fit_tokens(frame, 2000)
    budget.spend_tokens(frame, fits)
    assert 20 < fits < 200
    assert 90.0 < budget.predicted_ms <= 100.0


def test_background_keeps_its_share_when_nothing_fits() -> None:
    budget, frame = (
        budget_of(chat_itl_ms=5.0, background_share=0.1),
        make_sequence(2000, priority="background"),
    )
    given_at = []
    for step in range(200):
        now = step * 0.02
        budget.begin(Moment([chat_with_tokens(1, now, now), frame], [], now))  # type: ignore[list-item]
        fits = budget.fit_tokens(frame, 2000)
        if fits:
            budget.spend_tokens(frame, fits)
            given_at.append(now)
    assert len(given_at) >= 2
    assert budget.counts["floor_overruns"] == len(given_at)


def test_the_floor_is_kept_where_decodes_alone_take_long() -> None:
    """One piece a step would be less than the share: what is owed is paid in larger pieces."""
    budget, frame = (
        budget_of(chat_itl_ms=5.0, background_share=0.2),
        make_sequence(9000, priority="background"),
    )
    now, paid_ms = 0.0, 0.0
    for _ in range(50):
        budget.begin(Moment([chat_with_tokens(1, now, now), frame], [], now))  # type: ignore[list-item]
        alone_ms = budget.predicted_ms
        fits = budget.fit_tokens(frame, 9000)
        budget.spend_tokens(frame, fits)
        paid_ms += budget.predicted_ms - alone_ms
        now += (400.0 + budget.predicted_ms) / 1e3
    assert paid_ms / (1e3 * now) == pytest.approx(0.2, abs=0.02)


def test_background_leaves_time_for_a_first_token() -> None:
    budget = budget_of(chat_ttft_ms=400.0)
    chat, frame = make_sequence(20, arrival_s=1.0), make_sequence(9000, priority="background")
    budget.begin(Moment([frame], [chat], 1.25))
    assert budget.allowance_ms == 200.0
    budget.spend_tokens(frame, budget.fit_tokens(frame, 9000))
    assert 100.0 < budget.predicted_ms <= 150.0


def test_a_preempted_chat_is_computed_again_beside_chats_without_slack() -> None:
    budget, chat = budget_of(chat_itl_ms=5.0), make_sequence(200, max_tokens=100)
    chat.token_ids += [5] * 3
    chat.first_token_s = chat.last_token_s = 0.9
    running = [chat_with_tokens(1, 1.0, 1.0), chat]
    for now, fits in ((1.0, 0), (1.3, 64)):
        budget.begin(Moment(running, [], now))  # type: ignore[arg-type]
        assert budget.fit_tokens(chat, 203) == fits
    budget.spend_tokens(chat, 64)
    assert budget.counts["chat_overruns"] == 1


def simulate(
    budget: str,
    *,
    rate: float,
    seconds: float = 60.0,
    num_chats: int = 2,
    truth: Truth | None = None,
    **targets: float,
) -> Simulator:
    sim = Simulator(budget, truth=truth, **({"chat_ttft_ms": 300.0} | targets))

    def chat(_: object = None) -> None:
        sim.chat(on_end=chat)

    for number in range(num_chats):
        sim.at(0.3 * number, chat)
    for number in range(int(rate * seconds)):
        sim.at(number / rate, lambda number=number: sim.frame(f"frame {number}"))  # type: ignore[misc]
    sim.run(seconds)
    return sim


def test_chats_keep_their_target_where_a_static_budget_stalls_them() -> None:
    """The same traffic and device; only the budget differs."""
    ours, theirs = (simulate(kind, rate=0.15, chat_itl_ms=80.0) for kind in ("latency", "static"))
    settled = ours.gaps_ms[len(ours.gaps_ms) // 10 :]
    assert percentile(settled, 0.99) <= 80.0 + ours.cost.residual_ms()
    assert max(theirs.gaps_ms) > 1000.0 > 3 * max(settled)
    assert max(ours.ttfts_ms) < 300.0
    assert len([s for s in ours.ended if not s.is_interactive]) >= 7


def test_chats_share_a_machine_that_cannot_keep_the_target() -> None:
    """Decodes alone take longer than the target: a new chat still gets its first token soon."""
    sim = simulate("latency", rate=0.2, num_chats=3, chat_itl_ms=10.0, chat_ttft_ms=400.0)
    assert max(sim.ttfts_ms) < 1000.0
    assert sim.budget.counts["chat_overruns"] > 0
    assert [s for s in sim.ended if not s.is_interactive], "frames keep their share"


def test_a_machine_that_gets_three_times_slower_is_learned() -> None:
    truth = Truth()
    sim = Simulator("latency", truth=truth, chat_itl_ms=150.0)

    def chat(_: object = None) -> None:
        sim.chat(on_end=chat)

    sim.at(0.0, chat)
    sim.at(20.0, lambda: setattr(truth, "slowdown", 3.0))
    for number in range(12):
        sim.at(5.0 * number, lambda number=number: sim.frame(f"frame {number}"))  # type: ignore[misc]
    sim.run(30.0)
    before = len(sim.gaps_ms)
    sim.run(60.0)
    assert percentile(sim.gaps_ms[before:], 0.95) <= 150.0 + sim.cost.residual_ms()


def test_a_change_of_the_whole_machine_is_found_in_a_few_steps() -> None:
    """What an image costs is known at once, though none was encoded since."""
    truth, cost, rng = Truth(noise=0.05), CostModel(), random.Random(1)

    def decode() -> None:
        work = StepWork(2, 2, rng.randint(100, 4000))
        cost.learn_step(work, truth.step_ms(work))

    for number in range(200):
        decode()
        part = SLICES[number % len(SLICES)]
        cost.learn_slices(part, truth.slice_ms(part))
    before = cost.slice_ms(SLICES[5])
    for slowdown in (3.0, 1.0):
        truth.slowdown = slowdown
        for _ in range(10):
            decode()
        assert cost.slice_ms(SLICES[5]) == pytest.approx(slowdown * before, rel=0.25)


def test_a_frame_that_the_encoder_works_on_is_finished() -> None:
    """An image may take longer than it is wanted for; given up each time, none would ever be described."""
    sim = Simulator("latency", chat_itl_ms=60.0)

    def chat(_: object = None) -> None:
        sim.chat(on_end=chat)

    chat()
    begun, late = (sim.frame(name, expires_s=1.0) for name in ("begun", "late"))
    sim.run(30.0)
    assert (begun.finish_reason, late.finish_reason) == ("length", "expired")
    assert begun.last_token_s is not None
    assert begun.last_token_s > 3.0


def test_without_chats_the_device_is_kept_full() -> None:
    sim = simulate("latency", rate=2.0, seconds=30.0, num_chats=0)
    assert sim.busy_s >= 29.0


def test_slices_are_fine_enough_for_a_chat() -> None:
    cost = CostModel(encoder=(0.4, 9.0, 22.0, 30.0, 8.0))
    assert len(SLICES) > 50
    assert max(cost.slice_ms(part) for part in SLICES) < 60.0
    assert sum(part.num_rows for part in SLICES) == 8 * 4784
    assert SliceWork() + SLICES[0] == SLICES[0]
