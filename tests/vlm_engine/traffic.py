"""People and cameras of a day, compressed: what the simulated engine has to bear."""

import random
from collections import Counter
from dataclasses import dataclass, field

from tests.vlm_engine.builders import make_sequence
from tests.vlm_engine.simulator import Simulator, Truth, picture_of
from vlm_engine.sequence import Sequence

PATCHES = (448, 1200, 4784)
MAX_AGE_S = 5.0


@dataclass
class Person:
    """Asks, reads, thinks, asks again with all that was said; sometimes shows a picture or hangs up."""

    sim: Simulator
    rng: random.Random
    think_s: float = 8.0
    history: list[int] = field(default_factory=list)
    num_asked: int = 0
    is_gone: bool = False

    def ask(self) -> None:
        if self.is_gone:
            return
        self.num_asked += 1
        question = self.rng.randint(10, 120)
        has_picture = not self.history and self.rng.random() < 0.15
        patches = self.rng.choice(PATCHES[:2])
        pictures = (picture_of(4, patches, f"{id(self)} {self.num_asked}"),) if has_picture else ()
        size = len(self.history) + question + (patches // 4 if has_picture else 0)
        sequence = make_sequence(
            size, max_tokens=self.rng.randint(8, 200), arrival_s=self.sim.now, images=pictures
        )
        sequence.token_ids[: len(self.history)] = self.history
        self.sim.add(sequence, self._answered)
        if self.rng.random() < 0.08:
            self.sim.at(self.sim.now + self.rng.uniform(0.0, 6.0), lambda: self.sim.cancel(sequence))

    def _answered(self, sequence: Sequence) -> None:
        ends = sequence.placeholders or sequence.num_tokens > 3000 or self.rng.random() < 0.2
        self.history = [] if ends else list(sequence.token_ids)
        pause_s = self.rng.expovariate(1 / self.think_s)
        if ends and self.rng.random() < 0.3:
            pause_s += self.rng.uniform(30.0, 240.0)
        self.sim.at(self.sim.now + pause_s, self.ask)


@dataclass
class Describer:
    """Sends the newest frame of each camera, least served camera first, a few at a time."""

    sim: Simulator
    concurrency: int = 4
    waiting: dict[str, tuple[float, int, str]] = field(default_factory=dict)
    served_s: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    done: list[tuple[float, str]] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    in_flight: int = 0

    def capture(self, camera: str, number: int, num_patches: int) -> None:
        self.counts["captured"] += 1
        self.counts["replaced"] += camera in self.waiting
        self.waiting[camera] = (self.sim.now, num_patches, f"{camera} {number}")
        self.dispatch()

    def dispatch(self) -> None:
        while self.waiting and self.in_flight < self.concurrency:
            camera = min(self.waiting, key=lambda name: self.served_s.get(name, -1.0))
            captured_s, num_patches, name = self.waiting.pop(camera)
            left_s = captured_s + MAX_AGE_S - self.sim.now
            if left_s <= 0:
                self.counts["stale"] += 1
                continue
            self.served_s[camera] = self.sim.now
            self.in_flight += 1

            def ended(sequence: Sequence, camera: str = camera, captured_s: float = captured_s) -> None:
                self.in_flight -= 1
                self.counts[sequence.finish_reason or "?"] += 1
                if sequence.finish_reason == "length":
                    self.done.append((self.sim.now, camera))
                    self.latencies_s.append(self.sim.now - captured_s)
                self.dispatch()

            self.sim.frame(name, ended, left_s, num_patches, camera)

    def done_between(self, start_s: float, end_s: float) -> Counter[str]:
        return Counter(camera for when, camera in self.done if start_s <= when < end_s)

    def film(self, camera: str, start_s: float, end_s: float, period_s: float, patches: int) -> None:
        """A camera that sees something every `period_s`."""
        for number in range(int((end_s - start_s) / period_s)):
            when = start_s + number * period_s
            self.sim.at(when, lambda number=number: self.capture(camera, number, patches))  # type: ignore[misc]


HOUR_S = 3600.0
QUIET = [f"camera {number}" for number in range(16) if number != 3]
FLOOD_S = (900.0, 1260.0)
SLOW_S = (1500.0, 1860.0)
API_S = (2760.0, 3060.0)
BUSY_S = (2160.0, 2520.0)


@dataclass
class Hour:
    """What came of an hour: 8 people, 16 cameras, and what goes wrong on a bad day.

    A camera floods; the machine is three times slower for six minutes; an API client sends 60 pictures
    at once; all cameras see something every second for six minutes; now and then twelve chats come at once.
    """

    sim: Simulator
    describer: Describer
    bursts_s: list[float]


def an_hour(seed: int, *, has_side: bool = False) -> Hour:
    rng, truth = random.Random(seed), Truth(seed, has_side=has_side)
    sim = Simulator("latency", truth=truth, num_blocks=1500, num_chat_blocks=300, max_num_seqs=16)
    describer = Describer(sim)
    for number, camera in enumerate([*QUIET[:3], "camera 3", *QUIET[3:]]):
        start_s = rng.uniform(0.0, 20.0)
        describer.film(camera, start_s, HOUR_S - 60, 12.0 + number, PATCHES[number % 3])
        describer.film(camera, *BUSY_S, 1.0, PATCHES[1])
    describer.film("camera 3", *FLOOD_S, 0.05, PATCHES[2])
    people = [Person(sim, random.Random(f"{seed} {number}")) for number in range(8)]
    for person in people:
        sim.at(rng.uniform(0.0, 30.0), person.ask)
    bursts_s = [rng.uniform(200.0, HOUR_S - 200) for _ in range(5)]
    for when_s in bursts_s:
        _burst(sim, rng, when_s)
    sim.at(SLOW_S[0], lambda: setattr(truth, "slowdown", 3.0))
    sim.at(SLOW_S[1], lambda: setattr(truth, "slowdown", 1.0))
    for number in range(60):
        sim.at(API_S[0], lambda number=number: sim.frame(f"api {number}"))  # type: ignore[misc]
    for person in people:
        sim.at(HOUR_S - 60, lambda person=person: setattr(person, "is_gone", True))  # type: ignore[misc]
    sim.run(HOUR_S)
    return Hour(sim, describer, bursts_s)


def _burst(sim: Simulator, rng: random.Random, when_s: float) -> None:
    for _ in range(12):
        num_prompt, num_output = rng.randint(20, 400), rng.randint(5, 60)
        sim.at(when_s, lambda size=num_prompt, output=num_output: sim.chat(size, output))  # type: ignore[misc]
