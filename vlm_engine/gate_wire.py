"""What a detector and the engine say to each other about the device: msgpack over a Unix socket.

A ``SOCK_SEQPACKET`` socket keeps messages apart, never gives half of one, and tells at once, by an
empty message, that the other side's process is gone.
"""

import msgspec

MAX_MESSAGE_BYTES = 65536
MAX_PIECES = 4096


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A detector's first words: where it computes, as ``cpu`` or ``cuda:0``; None to share in any case."""

    device: str | None


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A detector waits for the device.

    Args:
        piece_ms: Milliseconds of each piece left of its batch.
        asked_s: Since when, on the machine's monotonic clock.
        num_ungated: How often it went on without an answer since it last said so.
        idle_s: How long it had no frames since it last asked.
    """

    piece_ms: list[float]
    asked_s: float
    num_ungated: int
    idle_s: float = 0.0


class Release(msgspec.Struct, frozen=True, tag=True):
    """A detector gives the device back."""

    number: int


class Grant(msgspec.Struct, frozen=True, tag=True):
    """The device is the detector's for the next `num_pieces` of what it asked for."""

    number: int
    num_pieces: int


class NotShared(msgspec.Struct, frozen=True, tag=True):
    """The engine computes elsewhere; the detector need not ask again.

    Args:
        has_room: It computes here, and leaves room beside its steps to who keeps to half of the cores.
    """

    has_room: bool = False


ToGate = Hello | Ask | Release
ToDetector = Grant | NotShared
_encoder = msgspec.msgpack.Encoder()
_to_gate = msgspec.msgpack.Decoder(ToGate)
_to_detector = msgspec.msgpack.Decoder(ToDetector)


def encode(message: ToGate | ToDetector) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode_to_gate(message: bytes) -> ToGate:
    """A detector's message.

    Raises:
        ValueError: It is none.
    """
    decoded = _to_gate.decode(message)
    if isinstance(decoded, Ask):
        _check(decoded)
    return decoded


def decode_to_detector(message: bytes) -> ToDetector:
    """The gate's message.

    Raises:
        ValueError: It is none.
    """
    return _to_detector.decode(message)


def _check(ask: Ask) -> None:
    if not 1 <= len(ask.piece_ms) <= MAX_PIECES:
        raise ValueError(f"piece_ms must have 1 to {MAX_PIECES} items, not {len(ask.piece_ms)}")
    numbers = (*ask.piece_ms, ask.asked_s, ask.num_ungated, ask.idle_s)
    if not all(0 <= number < float("inf") for number in numbers):
        raise ValueError("piece_ms, asked_s, num_ungated and idle_s must be finite numbers from 0")
