"""Chats, frames and a detector on one simulated device: everybody gets what was promised."""

import random

import pytest

from tests.vlm_engine.simulator import Simulator, Truth, percentile
from vlm_engine.turn import Turn
from vlm_engine.turn_queue import TurnQueue

LAYERS = (1.5, 2.5, 3.0, 4.0) * 6  # a batch of two frames through a small YOLO: 66 ms
THINK_S = 0.012


class SimulatedDetector:
    """Frames at a rate; the newest goes through the network in turns, what it replaces is lost."""

    def __init__(self, sim: Simulator, turns: TurnQueue, fps: float, *, layers: tuple[float, ...] = LAYERS):
        self.num_seen = 0
        self.delays_s: list[float] = []
        self._sim, self._turns, self._period_s, self._layers = sim, turns, 1.0 / fps, layers
        self._left: tuple[float, ...] = ()
        self._frame_s, self._free_s = 0.0, 0.0
        self._random = random.Random(3)
        sim.on_turn = self._compute
        turns.join(0)
        sim.at(0.0, self._look)

    def _look(self) -> None:
        """Begin with the newest frame; comes back when there is one."""
        newest_s = int(self._sim.now / self._period_s) * self._period_s
        if newest_s <= self._frame_s:
            self._sim.at(self._frame_s + self._period_s + 1e-6, self._look)
            return
        idle_s = max(0.0, newest_s - self._free_s)
        self._frame_s, self._left = newest_s, self._layers
        self._turns.ask(0, self._left, self._sim.now, idle_s)

    def _compute(self, turn: Turn) -> None:
        spread = self._sim.truth.slowdown * self._random.lognormvariate(0.0, 0.05)
        measured_ms = 0.8 + spread * turn.piece_ms
        self._sim.now += measured_ms / 1e3
        self._turns.finish(turn, measured_ms, self._sim.now)
        self._left = self._left[turn.num_pieces :]
        if self._left:
            asked_s = self._sim.now + 1e-4
            self._sim.at(asked_s, lambda left=self._left: self._turns.ask(0, left, asked_s))
            return
        self.num_seen += 1
        self.delays_s.append(self._sim.now - self._frame_s)
        self._free_s = self._sim.now + THINK_S
        self._sim.at(self._free_s, self._look)


def share(floor: float = 2.0, *, fps: float = 5.0, slowdown: float = 1.0, **targets: float):
    turns = TurnQueue(floor)
    sim = Simulator(truth=Truth(slowdown=slowdown), turns=turns, **targets)
    return sim, turns, SimulatedDetector(sim, turns, fps)


def keep_chatting(sim: Simulator, num_chats: int) -> None:
    def again(_: object = None) -> None:
        sim.chat(max_tokens=150, on_end=again)

    for index in range(num_chats):
        sim.at(0.05 * index, again)


def keep_sending(sim: Simulator, every_s: float, until_s: float) -> None:
    for index in range(int(until_s / every_s)):
        sim.at(index * every_s, lambda name=f"frame {index}": sim.frame(name))


def test_alone_every_frame_is_seen_at_once() -> None:
    sim, turns, detector = share()
    sim.run(30.0)
    assert detector.num_seen >= 148
    assert percentile(detector.delays_s, 0.99) < 0.1
    assert turns.stats().wait.num_values == detector.num_seen


def test_beside_descriptions_without_chats_both_are_served() -> None:
    """Throughput: the detector gets its rate, the device is never idle, all frames are described."""
    sim, _, detector = share()
    keep_sending(sim, 4.0, 60.0)
    sim.run(70.0)
    assert detector.num_seen >= 0.75 * 5 * 70
    assert sum(s.finish_reason == "length" for s in sim.ended) == 15


def test_chats_hardly_feel_a_detector() -> None:
    """A round of 66 ms at five a second: spread, so that no step has all of it; and every frame is seen."""
    alone = Simulator(truth=Truth(), chat_itl_ms=90.0)
    keep_chatting(alone, 2)
    alone.run(20.0)
    idle_ms = percentile(alone.gaps_ms, 0.5)

    sim, turns, detector = share(chat_itl_ms=90.0)
    keep_chatting(sim, 2)
    sim.run(60.0)
    assert percentile(sim.gaps_ms, 0.9) <= 2.5 * idle_ms
    assert percentile(sim.gaps_ms, 0.99) <= 3.5 * idle_ms
    assert detector.num_seen >= 295
    assert turns.books.counts["floor_overruns"] == 0
    assert percentile(detector.delays_s, 0.99) < 0.3


def test_two_chats_frames_and_a_detector() -> None:
    """Together they want all of the device: chats keep their target, the rest is shared."""
    sim, turns, detector = share(chat_itl_ms=90.0)
    keep_chatting(sim, 2)
    keep_sending(sim, 5.0, 60.0)
    sim.run(60.0)
    assert percentile(sim.gaps_ms, 0.99) <= 95.0
    assert percentile(sim.gaps_ms, 0.999) <= 105.0
    assert detector.num_seen >= 0.85 * 5 * 60
    assert turns.books.counts["floor_overruns"] <= 0.05 * turns.stats().wait.num_values
    assert sum(s.request.priority == "background" for s in sim.ended) >= 7


@pytest.mark.parametrize(("num_chats", "slowdown"), [(12, 1.0), (8, 3.0)])
def test_the_floor_holds_where_the_target_cannot_be_kept(num_chats: int, slowdown: float) -> None:
    """Everything is late by its own decodes; the detector keeps its floor, or its share, and says so."""
    sim, turns, detector = share(2.0, slowdown=slowdown, chat_itl_ms=20.0)
    keep_chatting(sim, num_chats)
    sim.run(60.0)
    round_s = slowdown * sum(LAYERS) / 1e3
    floor = min(2.0, 0.3 / round_s)
    assert detector.num_seen >= 0.8 * floor * 60
    assert turns.books.counts["floor_overruns"] > 50
    assert len(sim.gaps_ms) > 500


def test_a_detector_that_went_away_takes_nothing() -> None:
    sim, turns, detector = share(chat_itl_ms=90.0)
    keep_chatting(sim, 2)
    sim.run(10.0)
    turns.leave(0)
    seen, gaps = detector.num_seen, len(sim.gaps_ms)
    sim.at(sim.now, lambda: None)
    sim.on_turn = None
    sim._events.clear()
    sim.run(20.0)
    assert detector.num_seen == seen
    assert percentile(sim.gaps_ms[gaps:], 0.99) < 30.0
