"""Detectors that wait for the device: who gets the next turn, and how much of it.

A detector's *round* is one batch through its network, in *pieces* (layers) whose length it knows. It
asks for the pieces that are left; a turn is the first few of them. Pure Python, and told the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from vlm_engine.budget import StepBudget
from vlm_engine.cost_model import LinearModel
from vlm_engine.turn import Turn, TurnBooks, TurnStats

LEASE_FACTOR = 4.0
LEASE_LEAST_MS = 100.0
LEASE_MOST_EXTRA_MS = 2000.0
ACTIVE_PERIODS = 2.0
FLOOR_SHARE = 0.3
SPREAD = 0.7
SPREAD_GAIN = 0.3
LEAST_PAUSE = 0.1


@dataclass(slots=True)
class _Client:
    """What is known of one detector.

    Args:
        piece_ms: What it asks for; empty while it does not wait.
        num_left: Pieces of its round that were not granted yet.
        done_ms: What of its round was granted.
        started_s: When it asked for its round.
        ended_s: When its last round was through.
        spread_s: How long a round may take beside chats without keeping frames waiting.
        period_s: Within what time its round is due.
        due_s: When the next piece must run if its rounds are to keep the floor.
        ends_s: When the round must be through.
    """

    number: int
    piece_ms: tuple[float, ...] = ()
    asked_s: float = float("-inf")
    num_left: int = 0
    round_ms: float = 1.0
    done_ms: float = 0.0
    started_s: float = float("-inf")
    ended_s: float = float("-inf")
    spread_s: float = 0.0
    period_s: float = 1.0
    due_s: float = float("-inf")
    ends_s: float = float("-inf")

    def ask(self, piece_ms: tuple[float, ...], asked_s: float, period_s: float, idle_s: float) -> None:
        """Wait for pieces: of the round that runs, else of a new one that is due within `period_s`."""
        if len(piece_ms) != self.num_left:
            self._spread(idle_s, period_s / 2)
            self.num_left, self.period_s = len(piece_ms), period_s
            self.round_ms, self.done_ms, self.started_s = max(sum(piece_ms), 1e-3), 0.0, asked_s
            # why: who comes back in time is owed its rate, who was away has nothing to claim, and what was
            # given while there was room is not taken back later
            self.due_s = min(self.due_s, asked_s + period_s) if asked_s - self.due_s <= period_s else asked_s
            self.ends_s = self.due_s + period_s
        self.piece_ms, self.asked_s = piece_ms, asked_s

    def _spread(self, idle_s: float, most_s: float) -> None:
        """Follow how much time there is for a round: what the last one took, and the pause after it.

        invariant: without pauses the spread goes to nothing, since then frames wait for the detector.
        """
        if self.ended_s > self.started_s:
            cycle_s = self.ended_s - self.started_s + idle_s
            wanted_s = SPREAD * cycle_s if idle_s > LEAST_PAUSE * cycle_s else 0.0
            self.spread_s += SPREAD_GAIN * (min(wanted_s, most_s) - self.spread_s)

    def num_overdue(self, now: float) -> int:
        """Pieces that must run now; a round's pieces are due evenly over a period."""
        return self._num_due(self.due_s, self.period_s, now)

    def num_paced(self, now: float) -> int:
        """Pieces that should run now, at least one, so that the round's are spread evenly."""
        next_s = self.started_s + self.spread_s * self.done_ms / self.round_ms
        return max(1, self._num_due(next_s, self.spread_s, now))

    def _num_due(self, next_s: float, period_s: float, now: float) -> int:
        count = 0
        while count < len(self.piece_ms) and next_s <= now:
            next_s += period_s * self.piece_ms[count] / self.round_ms
            count += 1
        return count

    def grant(self, num_pieces: int) -> None:
        granted_ms = sum(self.piece_ms[:num_pieces])
        self.done_ms += granted_ms
        self.due_s += self.period_s * granted_ms / self.round_ms
        self.num_left -= num_pieces
        self.piece_ms = ()


class TurnQueue:
    """Gives the device to one detector after the other, as much at a time as the step's budget allows.

    Whose round must end first is first. A detector that asks without delay gets `min_per_s` rounds a
    second under any load, as long as these take no more than `FLOOR_SHARE` of the time; what of that does
    not fit is counted as an overrun. Beside chats a round is spread over the time until the detector's next
    frames, so that each step is a little longer instead of one of them much.

    Args:
        min_per_s: That floor, above 0.
    """

    def __init__(self, min_per_s: float) -> None:
        self.cost = LinearModel((1.0, 11.0), trust=0.001)
        self.books = TurnBooks()
        self._period_s = 1.0 / min_per_s
        self._clients: dict[int, _Client] = {}
        self._waiting: dict[int, _Client] = {}
        self._num_started = 0

    @property
    def is_waiting(self) -> bool:
        """Whether any detector waits for a turn."""
        return bool(self._waiting)

    def join(self, client: int) -> None:
        """A detector came; its number is not that of another one."""
        self._clients[client] = _Client(client)

    def leave(self, client: int) -> None:
        """A detector went, whatever it was doing."""
        del self._clients[client]
        self._waiting.pop(client, None)

    def ask(self, client: int, piece_ms: Sequence[float], asked_s: float, idle_s: float = 0.0) -> None:
        """A detector waits for the device.

        Args:
            client: Its number.
            piece_ms: Milliseconds that each piece left of its round will probably take; at least one, none
                below 0.
            asked_s: Since when it waits.
            idle_s: How long it had no frames before.
        """
        state = self._clients[client]
        # why: a network that is slow on this device must not take all of it by its floor
        round_s = self.cost.predict(_features(sum(piece_ms))) / 1e3
        state.ask(tuple(piece_ms), asked_s, max(self._period_s, round_s / FLOOR_SHARE), idle_s)
        self._waiting[client] = state

    def longest_step_ms(self, now: float) -> float:
        """How long a step may be that no chat waits for: so that it is a detector's turn often enough."""
        newest_s = max((client.asked_s for client in self._clients.values()), default=float("-inf"))
        is_active = now - newest_s <= ACTIVE_PERIODS * self._period_s
        return 1e3 * self._period_s / 2 if is_active else float("inf")

    def propose(self, budget: StepBudget, now: float) -> Turn | None:
        """The turn that the step has room for, or that the floor asks for; nothing is booked yet."""
        if not self._waiting:
            return None
        client = min(self._waiting.values(), key=lambda waiting: (waiting.due_s > now, waiting.ends_s))
        piece_ms, margin_ms = list(accumulate(client.piece_ms)), self.cost.residual_ms
        predicted_ms = [self.cost.predict(_features(ms)) for ms in piece_ms]
        num_fitting = budget.fit_turn([ms + margin_ms for ms in predicted_ms])
        num_wanted = client.num_paced(now) if budget.has_chats else len(piece_ms)
        num_pieces = max(min(num_fitting, num_wanted), client.num_overdue(now))
        if not num_pieces:
            return None
        last = num_pieces - 1
        return Turn(
            number=self._num_started,
            client=client.number,
            num_pieces=num_pieces,
            piece_ms=piece_ms[last],
            predicted_ms=predicted_ms[last],
            cost_ms=predicted_ms[last] + margin_ms,
            lease_ms=_lease_ms(predicted_ms[last] + margin_ms),
            waited_s=max(0.0, now - client.asked_s),
            ends_round=num_pieces == len(piece_ms),
            is_overrun=num_pieces > num_fitting,
        )

    def start(self, turn: Turn) -> None:
        """Book a proposed turn: it begins."""
        self._num_started += 1
        self._waiting.pop(turn.client).grant(turn.num_pieces)
        self.books.add_start(turn)

    def finish(self, turn: Turn, measured_ms: float, now: float) -> None:
        """The detector gave the device back in time."""
        if turn.ends_round:
            self._clients[turn.client].ended_s = now
        self.books.add_end(turn, measured_ms)
        self.learn(turn, measured_ms)

    def learn(self, turn: Turn, measured_ms: float) -> None:
        """Learn how long a turn took, also one whose lease had ended."""
        # why: of a detector that was stopped for an hour no more is known than that it was late
        self.cost.learn(_features(turn.piece_ms), min(measured_ms, 2 * turn.lease_ms))

    def stats(self) -> TurnStats:
        """The books as they are now."""
        return self.books.snapshot(len(self._clients), self.cost.relative_error, self.cost.residual_ms)


def _features(piece_ms: float) -> tuple[float, float]:
    """A turn costs something by itself (two messages, cold caches), and what its pieces take."""
    return 1.0, piece_ms / 10.0


def _lease_ms(cost_ms: float) -> float:
    return max(LEASE_LEAST_MS, min(LEASE_FACTOR * cost_ms, cost_ms + LEASE_MOST_EXTRA_MS))
