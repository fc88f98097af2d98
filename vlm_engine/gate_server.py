"""The door to the engine's device, in the engine's process: detectors ask, the scheduler decides."""

import logging
import selectors
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from vlm_engine.config import TurnConfig
from vlm_engine.errors import GateError
from vlm_engine.gate_wire import (
    MAX_MESSAGE_BYTES,
    Ask,
    Grant,
    Hello,
    NotShared,
    Release,
    ToDetector,
    decode_to_gate,
    encode,
)
from vlm_engine.turn import Turn
from vlm_engine.turn_queue import TurnQueue

log = logging.getLogger(__name__)

BACKLOG = 64
LONGEST_WAIT_S = 60.0


@dataclass(eq=False, slots=True)
class _Peer:
    """A connected detector; `turn` is the one that it has not given back, begun at `started_s`.

    `is_sharing` is None until it has said where it computes.
    """

    number: int
    socket: socket.socket
    is_sharing: bool | None = None
    turn: Turn | None = None
    started_s: float = 0.0


class GateServer:
    """Takes detectors' wishes down for a `TurnQueue` and lends them the device.

    Linux only. Nothing here waits for a detector but `lend`, and that no longer than the lease.

    Args:
        config: Where detectors find it.
        device: Where the engine computes, as ``cpu`` or ``cuda:0``; detectors of other devices are sent away.
            None where it leaves room beside its steps: then all are but those that want turns in any case.
        clock: The machine's monotonic clock, which detectors read too.

    Raises:
        GateError: The socket cannot be made; the message names its path.
    """

    def __init__(
        self, config: TurnConfig, device: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.turns = TurnQueue(config.min_per_s)
        self._device = device
        self._clock = clock
        self._path = Path(config.address)
        self._numbers = count()
        self._peers: dict[int, _Peer] = {}
        self._lent: _Peer | None = None
        self._listener = _listen(self._path)
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def fileno(self) -> int:
        """A descriptor that can be read when a detector has come, gone or said something."""
        return self._selector.fileno()

    def close(self) -> None:
        """Let all detectors go on by themselves."""
        for peer in self._peers.values():
            peer.socket.close()
        self._listener.close()
        self._selector.close()
        self._path.unlink(missing_ok=True)

    def read(self, wait_s: float = 0.0) -> None:
        """Take what has come in, at most one message of each detector.

        Args:
            wait_s: How long to wait when there is nothing.
        """
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                self._accept()
            else:
                self._receive(key.data)

    def lend(self, turn: Turn) -> None:
        """Give a detector its turn; returns when it is over, or when its lease has ended."""
        peer = self._peers[turn.client]
        started_s = self._clock()
        ends_s = started_s + turn.lease_ms / 1e3
        peer.turn, peer.started_s, self._lent = turn, started_s, peer
        self._send(peer, Grant(turn.number, turn.num_pieces))
        while self._lent is not None and (left_s := ends_s - self._clock()) > 0:
            self.read(left_s)
        if self._lent is not None:
            self._lent = None
            self.turns.books.counts["expired"] += 1
            # why: one is no news where the machine is busy; the metrics count them
            log.info("detector %d kept the device for more than %.0f ms", peer.number, turn.lease_ms)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            number = next(self._numbers)
            peer = self._peers[number] = _Peer(number, connection)
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def _receive(self, peer: _Peer) -> None:
        try:
            message = peer.socket.recv(MAX_MESSAGE_BYTES)
            if message:
                self._take(peer, message)
            else:
                self._drop(peer)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            log.warning("detector %d is sent away: %s", peer.number, error)
            self._drop(peer)

    def _take(self, peer: _Peer, data: bytes) -> None:
        message = decode_to_gate(data)
        if isinstance(message, Hello):
            self._greet(peer, message)
        elif peer.is_sharing is None:
            raise ValueError("it did not say where it computes")
        elif not peer.is_sharing:
            # why: what it sent before it read our answer; closing now could take that answer from it
            return
        elif isinstance(message, Release):
            self._take_back(peer, message.number)
        else:
            self._ask(peer, message)

    def _greet(self, peer: _Peer, hello: Hello) -> None:
        if peer.is_sharing is not None:
            raise ValueError("it says twice where it computes")
        peer.is_sharing = hello.device is None or hello.device == self._device
        if peer.is_sharing:
            self.turns.join(peer.number)
        else:
            self._send(peer, NotShared(has_room=self._device is None))

    def _ask(self, peer: _Peer, ask: Ask) -> None:
        if peer is self._lent:
            raise ValueError("it asks for the device while it has it")
        self.turns.books.counts["ungated"] += ask.num_ungated
        # why: what another process says of the time is not trusted further than it can be true
        now = self._clock()
        asked_s = min(max(ask.asked_s, now - LONGEST_WAIT_S), now)
        self.turns.ask(peer.number, ask.piece_ms, asked_s, ask.idle_s)

    def _take_back(self, peer: _Peer, number: int) -> None:
        turn, is_late = peer.turn, peer is not self._lent
        if turn is None or turn.number != number:
            raise ValueError(f"it gives back turn {number}, which it has not")
        now = self._clock()
        measured_ms = 1e3 * (now - peer.started_s)
        peer.turn = None
        if is_late:
            self.turns.learn(turn, measured_ms)
        else:
            self._lent = None
            self.turns.finish(turn, measured_ms, now)

    def _send(self, peer: _Peer, message: ToDetector) -> None:
        try:
            peer.socket.send(encode(message))
        except OSError as error:
            log.warning("detector %d is not there any more: %s", peer.number, error)
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        """Forget a detector; what was lent to it is the engine's again."""
        if self._peers.pop(peer.number, None) is None:
            return
        self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.is_sharing:
            self.turns.leave(peer.number)
        if peer is self._lent:
            self._lent = None
            self.turns.books.counts["died"] += 1


def _listen(path: Path) -> socket.socket:
    """A socket that only this user's processes can reach; one left by a dead engine is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.setblocking(False)
    try:
        if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
            raise OSError("there is a file of that name")
        if _is_answered(path):
            raise OSError("another engine listens there")
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise GateError(f"detectors cannot ask for the device on {path}: {error}") from error
    return listener


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe, suppress(OSError):
        probe.settimeout(1.0)
        probe.connect(str(path))
        return True
    return False
