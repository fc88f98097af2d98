"""Who gets a turn, and how much of it: on a clock of our own, against a budget of a given size."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.vlm_engine.builders import make_sequence
from vlm_engine.block_pool import BlockPool
from vlm_engine.budget import LatencyTargets, TimeBudget
from vlm_engine.cost_model import CostModel
from vlm_engine.encoder_cache import EncoderCache
from vlm_engine.plan import StepPlan
from vlm_engine.scheduler import Scheduler
from vlm_engine.static_budget import StaticBudget
from vlm_engine.turn import Turn
from vlm_engine.turn_queue import FLOOR_SHARE, TurnQueue

FLOOR = 2.0


class Room(StaticBudget):
    """A budget with a number of milliseconds for turns, and nothing else."""

    def __init__(self, room_ms: float, *, has_chats: bool = False) -> None:
        super().__init__(1)
        self.room_ms = room_ms
        self._has_chats = has_chats

    @property
    def has_chats(self) -> bool:
        return self._has_chats

    def fit_turn(self, costs_ms: Sequence[float]) -> int:
        assert list(costs_ms) == sorted(costs_ms), "more pieces never cost less"
        return sum(cost <= self.room_ms for cost in costs_ms)


def make_queue(*clients: int, floor: float = FLOOR) -> TurnQueue:
    queue = TurnQueue(floor)
    for client in clients:
        queue.join(client)
    return queue


def take(queue: TurnQueue, room_ms: float, now: float, *, has_chats: bool = False) -> Turn | None:
    turn = queue.propose(Room(room_ms, has_chats=has_chats), now)
    if turn is not None:
        queue.start(turn)
    return turn


def test_nobody_waits_nobody_gets() -> None:
    queue = make_queue(1)
    assert take(queue, 1000, 0.0) is None
    assert not queue.is_waiting
    assert queue.longest_step_ms(0.0) == float("inf")


def test_what_fits_is_given_in_whole_pieces_and_the_rest_asked_again() -> None:
    queue = make_queue(1)
    queue.ask(1, [10, 10, 10], asked_s=1.0)
    turn = take(queue, 24.0, 1.25 - 0.001)
    assert turn is not None
    assert (turn.client, turn.num_pieces, turn.piece_ms, turn.ends_round) == (1, 2, 20, False)
    assert turn.waited_s == pytest.approx(0.249)
    assert not queue.is_waiting
    queue.finish(turn, 21.0, 1.28)
    queue.ask(1, [10], asked_s=1.3)
    last = take(queue, 24.0, 1.3)
    assert last is not None
    assert last.ends_round
    assert last.number != turn.number
    queue.finish(last, 11.0, 1.32)
    stats = queue.stats()
    assert (stats.num_rounds, stats.wait.num_values, stats.length.num_values) == (1, 2, 2)
    assert stats.counts["floor_overruns"] == 0


def test_the_floor_takes_its_pieces_evenly_over_the_period_and_counts_them() -> None:
    """A round of ten pieces every half second: one piece each 50 ms, though nothing fits."""
    queue = make_queue(1)
    left, given = 10, []
    for tick in range(200):
        now = tick * 0.01
        if not queue.is_waiting and left:
            queue.ask(1, [5.0] * left, asked_s=now)
        turn = take(queue, 0.0, now)
        if turn is not None:
            assert turn.is_overrun
            queue.finish(turn, 5.0 * turn.num_pieces, now)
            given.append((now, turn.num_pieces))
            left = left - turn.num_pieces or 10
    assert queue.stats().num_rounds == 4
    assert max(pieces for _, pieces in given) == 1
    assert queue.books.counts["floor_overruns"] == len(given) == 40


def test_long_steps_are_made_up_for() -> None:
    """Steps of 200 ms: two fifths of a period's pieces each, and what a round's end left over."""
    queue = make_queue(1)
    left = 10
    for tick in range(26):
        now = tick * 0.2
        queue.ask(1, [5.0] * left, asked_s=now)
        turn = take(queue, 0.0, now)
        if turn is not None:
            assert turn.num_pieces <= 8
            queue.finish(turn, 5.0 * turn.num_pieces, now)
            left = left - turn.num_pieces or 10
    assert queue.stats().num_rounds >= 2 * 5


def run_cameras(queue: TurnQueue, fps: float, *, from_s: float = 0.0) -> list[int]:
    """Frames at a rate, ten pieces of 5 ms each, steps of 20 ms beside a chat; sizes of the last turns."""
    now, free_s, left, idle_s, num_seen, sizes = from_s, from_s, 0, 0.0, int(from_s * fps), list[int]()
    while now < from_s + 20:
        if not queue.is_waiting and not left and now >= free_s:
            next_s = (num_seen + 1) / fps
            if now >= next_s:
                idle_s, left, num_seen = max(0.0, next_s - free_s), 10, int(now * fps)
        if left and not queue.is_waiting:
            queue.ask(1, [5.0] * left, now, idle_s)
        turn = take(queue, 60.0, now, has_chats=True)
        if turn is not None:
            now += turn.piece_ms / 1e3
            queue.finish(turn, turn.piece_ms, now)
            left -= turn.num_pieces
            free_s = now + 0.01
            sizes.append(turn.num_pieces)
        now += 0.02
    return sizes[-30:]


def test_beside_a_chat_a_round_is_spread_until_the_next_frames() -> None:
    """Five frames a second: not one step of 70 ms in ten, but each a little longer; and no frame is lost."""
    queue = make_queue(1)
    sizes = run_cameras(queue, 5.0)
    assert max(sizes) <= 5
    assert queue.stats().num_rounds >= 5 * 20 - 5
    assert queue.books.counts["floor_overruns"] == 0


def test_a_detector_without_pauses_is_not_slowed_down() -> None:
    """More frames than it can see: whole rounds again, as fast as there is room."""
    queue = make_queue(1)
    run_cameras(queue, 5.0)
    sizes = run_cameras(queue, 100.0, from_s=21.0)
    assert sum(sizes) / len(sizes) >= 9


def test_who_was_away_has_nothing_to_claim() -> None:
    queue = make_queue(1)
    queue.ask(1, [5.0] * 10, asked_s=0.0)
    assert take(queue, 1000.0, 0.0) is not None
    queue.ask(1, [5.0] * 10, asked_s=60.0)
    turn = take(queue, 0.0, 60.0)
    assert turn is not None
    assert turn.num_pieces == 1


def test_what_was_given_while_there_was_room_is_not_taken_back() -> None:
    """An hour of ten rounds a second, then no room at all: the floor holds from the first second on."""
    queue = make_queue(1)
    for tick in range(36_000):
        queue.ask(1, [5.0], asked_s=tick / 10)
        turn = take(queue, 1000.0, tick / 10)
        assert turn is not None
        queue.finish(turn, 5.0, tick / 10)
    num_before = queue.stats().num_rounds
    for tick in range(360_000, 361_000):
        now = tick / 100
        if not queue.is_waiting:
            queue.ask(1, [5.0], asked_s=now)
        turn = take(queue, 0.0, now + 0.005)
        if turn is not None:
            queue.finish(turn, 5.0, now)
    assert queue.stats().num_rounds - num_before >= FLOOR * 10 - 1


def test_the_round_that_must_end_first_is_first() -> None:
    queue = make_queue(1, 2, 3)
    for client, asked_s in ((3, 0.0), (1, 0.1), (2, 0.2)):
        queue.ask(client, [10, 10], asked_s=asked_s)
    order = []
    for _ in range(3):
        turn = take(queue, 100, 0.25)
        assert turn is not None
        order.append(turn.client)
    assert order == [3, 1, 2]


def test_who_leaves_is_forgotten_and_who_comes_back_is_new() -> None:
    queue = make_queue(1, 2)
    queue.ask(1, [10], asked_s=0.0)
    queue.leave(1)
    assert not queue.is_waiting
    assert queue.stats().num_clients == 1
    queue.join(3)
    queue.ask(3, [10], asked_s=1.0)
    assert take(queue, 100, 1.0) is not None


def test_what_turns_really_take_is_learned() -> None:
    """A detector that says 10 ms and takes 30 is booked with 30 soon, and its lease grows with it."""
    queue = make_queue(1)
    for tick in range(20):
        queue.ask(1, [10.0], asked_s=float(tick))
        turn = take(queue, 1000, float(tick))
        assert turn is not None
        queue.finish(turn, 30.0, tick + 0.03)
    queue.ask(1, [10.0], asked_s=30.0)
    turn = take(queue, 1000, 30.0)
    assert turn is not None
    assert turn.predicted_ms == pytest.approx(30.0, rel=0.1)
    assert turn.lease_ms > 100
    assert take(queue, 1000, 30.0) is None


def make_scheduler(queue: TurnQueue, *, itl_ms: float = 100.0, ttft_ms: float = 500.0) -> Scheduler:
    budget = TimeBudget(CostModel(), LatencyTargets(itl_ms, ttft_ms), 512)
    return Scheduler(BlockPool(64, 4), EncoderCache(64), budget, turns=queue)


def decode(scheduler: Scheduler, plan: StepPlan, now: float) -> None:
    scheduler.commit(plan)
    for chunk in plan.chunks:
        if chunk.samples:
            chunk.sequence.first_token_s = chunk.sequence.first_token_s or now
            chunk.sequence.last_token_s = now
            chunk.sequence.append(5)


def test_an_idle_engine_grants_the_whole_at_once() -> None:
    queue = make_queue(1)
    scheduler = make_scheduler(queue)
    queue.ask(1, [20.0] * 4, asked_s=1.0)
    assert scheduler.has_work
    plan = scheduler.plan(1.0)
    assert plan.is_empty
    assert plan.turn is not None
    assert plan.turn.ends_round
    assert not scheduler.has_work


def test_a_piece_longer_than_every_allowance_runs_while_no_chat_computes() -> None:
    queue = make_queue(1)
    scheduler = make_scheduler(queue)
    queue.ask(1, [3000.0], asked_s=1.0)
    assert scheduler.plan(1.0).turn is not None


def test_beside_a_chat_a_turn_is_cut_to_its_slack_and_frames_get_the_rest() -> None:
    """Decodes before the turn, the turn before the frame."""
    queue = make_queue(1)
    scheduler = make_scheduler(queue)
    chat = make_sequence(8, max_tokens=20, arrival_s=0.0)
    scheduler.add(chat)
    decode(scheduler, scheduler.plan(0.0), 0.01)
    scheduler.add(make_sequence(40, priority="background", arrival_s=0.0))
    queue.ask(1, [20.0] * 10, asked_s=0.011)
    plan = scheduler.plan(0.0109)
    assert plan.turn is not None
    assert 1 <= plan.turn.num_pieces < 10
    assert not plan.turn.is_overrun
    assert chat in [chunk.sequence for chunk in plan.chunks]
    budget = scheduler.budget
    assert isinstance(budget, TimeBudget)
    assert plan.turn.cost_ms < budget.allowance_ms < 100
    decode(scheduler, plan, 0.1)
    queue.ask(1, [20.0] * (10 - plan.turn.num_pieces), asked_s=0.1)
    late = scheduler.plan(0.19)
    assert late.turn is None or late.turn.is_overrun


def test_steps_without_chats_end_in_time_for_the_detectors_floor() -> None:
    queue = make_queue(1, floor=5.0)
    scheduler = make_scheduler(queue)
    scheduler.add(make_sequence(40, priority="background", arrival_s=0.0))
    queue.ask(1, [20.0], asked_s=1.0)
    scheduler.plan(1.0)
    budget = scheduler.budget
    assert isinstance(budget, TimeBudget)
    assert budget.allowance_ms == 100
    scheduler.plan(9.0)
    assert budget.allowance_ms == 250


asks = st.tuples(
    st.integers(0, 3), st.lists(st.floats(0, 80), min_size=1, max_size=12), st.floats(0.001, 0.3)
)


def longest_wait_s(pieces: list[float]) -> float:
    """Rounds come at the floor's rate, or as often as its share of the time allows."""
    return max(1 / FLOOR, 1.2 * (1.0 + 1.1 * sum(pieces)) / 1e3 / FLOOR_SHARE)


@settings(max_examples=100, deadline=None)
@example(
    steps=[((0, [ms], pause_s), 2.0 * ms, False) for ms, pause_s in ((1, 0.25), (1, 0.25), (0, 0.125))]
    + [((0, [0.0], 0.25), 0.0, False)] * 2,
    has_chats=False,
    idle_s=0.0,
)
@given(
    steps=st.lists(st.tuples(asks, st.floats(0, 200), st.booleans()), max_size=60),
    has_chats=st.booleans(),
    idle_s=st.floats(0, 100),
)
def test_for_any_wishes_and_any_room(
    steps: list[tuple[tuple[int, list[float], float], float, bool]], has_chats: bool, idle_s: float
) -> None:
    """Only who waits gets a turn; what is more than fits is an overrun; nobody is passed for ever."""
    queue, now, waiting = make_queue(0, 1, 2, 3), 0.0, dict[int, tuple[list[float], float]]()
    for (client, pieces, pause_s), room_ms, leaves in steps:
        now += pause_s
        if leaves:
            queue.leave(client)
            queue.join(client)
            waiting.pop(client, None)
        elif client not in waiting:
            queue.ask(client, pieces, now, idle_s)
            waiting[client] = (pieces, now)
        turn = take(queue, room_ms, now, has_chats=has_chats)
        assert queue.is_waiting == (len(waiting) > (turn is not None))
        if turn is None:
            assert all(now - asked_s < longest_wait_s(pieces) for pieces, asked_s in waiting.values())
            continue
        wished, asked_s = waiting.pop(turn.client)
        assert 1 <= turn.num_pieces <= len(wished)
        assert turn.is_overrun == (turn.cost_ms > room_ms)
        assert turn.waited_s == pytest.approx(now - asked_s)
        assert turn.ends_round == (turn.num_pieces == len(wished))
        assert max(100, turn.cost_ms) <= turn.lease_ms <= turn.cost_ms + 2000
        queue.finish(turn, turn.piece_ms, now)
    assert queue.books.counts["floor_overruns"] <= queue.stats().wait.num_values


@settings(max_examples=50, deadline=None)
@given(
    floor=st.floats(0.5, 10),
    step_s=st.floats(0.005, 0.04),
    pieces=st.lists(st.floats(0.5, 10), min_size=1, max_size=24),
)
def test_the_floor_holds_under_any_load(floor: float, step_s: float, pieces: list[float]) -> None:
    """Nothing ever fits; a detector that asks again at once gets its rate, or its share, and not more."""
    queue, now, left = make_queue(1, floor=floor), 0.0, list(pieces)
    # 1 ms and a tenth more than it says is what a turn costs as long as nothing is learned
    period_s = max(1 / floor, (1.0 + 1.1 * sum(pieces)) / 1e3 / FLOOR_SHARE)
    end_s, num_rounds = 12 * period_s, 0
    while now < end_s:
        if not queue.is_waiting:
            queue.ask(1, left, now)
        turn = take(queue, 0.0, now)
        if turn is not None:
            left = left[turn.num_pieces :] or list(pieces)
            num_rounds += turn.ends_round
        now += step_s
    assert 12 - 1 - 12 * step_s / period_s <= num_rounds <= 12 + 1
