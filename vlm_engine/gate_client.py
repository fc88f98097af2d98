"""A detector's side of the door: asks the engine's process for the device, and never waits for ever."""

import logging
import socket
import time
from collections.abc import Callable, Sequence

from vlm_engine.gate_wire import (
    MAX_MESSAGE_BYTES,
    Ask,
    Grant,
    Hello,
    NotShared,
    Release,
    ToGate,
    decode_to_detector,
    encode,
)

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
RETRY_AFTER_S = 1.0


class GateClient:
    """The engine's device as a detector in another process borrows it; for one thread.

    While the engine is away, or has not answered for `patience_s`, the detector goes on without it and
    asks again after a while. Where the engine computes on another device, nobody is asked any more.

    Args:
        address: Path of the engine's socket.
        device: Where the detector computes, as ``cpu`` or ``cuda:0``; None to share in any case.
        patience_s: Longest wait for an answer.
        retry_after_s: How long nobody is asked after a silence of the engine.
        on_room: Called when the engine says that it leaves room beside its steps instead.
        clock: The machine's monotonic clock.

    Attributes:
        num_ungated: How often the detector went on without an answer.
        is_shared: False once the engine has said that it computes elsewhere.
    """

    def __init__(
        self,
        address: str,
        device: str | None,
        *,
        patience_s: float = PATIENCE_S,
        retry_after_s: float = RETRY_AFTER_S,
        on_room: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_ungated = 0
        self.is_shared = True
        self._address, self._device = address, device
        self._patience_s, self._retry_after_s = patience_s, retry_after_s
        self._on_room, self._clock = on_room, clock
        self._socket: socket.socket | None = None
        self._turn: int | None = None
        self._num_untold = 0
        self._idle_s = 0.0
        self._retry_at_s = float("-inf")
        self._silence_level: int | None = None

    def acquire(self, piece_ms: Sequence[float]) -> int:
        """Wait for the device, `patience_s` at most.

        Args:
            piece_ms: Milliseconds that each piece of the work that is left will probably take; at least one.

        Returns:
            How many of the pieces may run now, at least one.
        """
        if not self.is_shared:
            return len(piece_ms)
        if self._clock() >= self._retry_at_s:
            try:
                return self._ask(piece_ms)
            except (OSError, ValueError) as error:
                self._give_up(error)
        self.num_ungated += 1
        self._num_untold += 1
        return len(piece_ms)

    def release(self) -> None:
        """Give the device back; without a turn, nothing happens."""
        turn, self._turn = self._turn, None
        if turn is not None and self._socket is not None:
            try:
                self._send(Release(turn))
            except OSError as error:
                self._give_up(error)

    def add_idle(self, seconds: float) -> None:
        """Say that there were no frames to look at for a while; what then is not urgent can be spread."""
        self._idle_s += seconds

    def close(self) -> None:
        """End the connection; a turn that is held goes back with it."""
        if self._socket is not None:
            self._socket.close()
        self._socket = self._turn = None

    def _ask(self, piece_ms: Sequence[float]) -> int:
        asked_s = self._clock()
        if self._socket is None:
            self._connect()
        self._send(Ask(list(piece_ms), asked_s, self._num_untold, self._idle_s))
        self._num_untold, self._idle_s = 0, 0.0
        answer = self._receive(asked_s + self._patience_s)
        if not isinstance(answer, Grant):
            self.is_shared = False
            self.close()
            if isinstance(answer, NotShared) and answer.has_room:
                self._on_room()
            return len(piece_ms)
        self._say_back()
        self._turn = answer.number
        return min(max(answer.num_pieces, 1), len(piece_ms))

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(self._patience_s)
        self._socket.connect(self._address)
        self._send(Hello(self._device))

    def _send(self, message: ToGate) -> None:
        assert self._socket is not None, "nobody to send to"
        self._socket.send(encode(message))

    def _receive(self, until_s: float) -> object:
        assert self._socket is not None, "nobody to hear"
        self._socket.settimeout(max(1e-3, until_s - self._clock()))
        message = self._socket.recv(MAX_MESSAGE_BYTES)
        if not message:
            raise ConnectionError("the engine is gone")
        return decode_to_detector(message)

    def _give_up(self, error: Exception) -> None:
        """Forget the engine for a while; it takes back by itself what it lent."""
        self.close()
        self._retry_at_s = self._clock() + self._retry_after_s
        if self._silence_level is None:
            # why: an engine that is not there yet, or not any more, is told of by who started it
            self._silence_level = logging.WARNING if isinstance(error, TimeoutError) else logging.INFO
            log.log(self._silence_level, "the detector goes on without asking for the device: %s", error)

    def _say_back(self) -> None:
        if self._silence_level is not None:
            log.log(self._silence_level, "the engine lends the device again")
        self._silence_level = None
