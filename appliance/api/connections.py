"""HTTP connections whose peers are not waited for without end, and of which there are so many at most."""

import asyncio
import resource
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from appliance.api.errors import unavailable

_LOOK_EVERY_S = 1.0
_WANTED_FILES = 65536
# why: what the front opens beside connections: sockets to Redis and engine, events, outputs, children.
_OTHER_FILES = 128


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a peer is waited for, in seconds, and how many connections there may be.

    `head_s` for the whole head of a request; between two requests `idle_s`. `body_s` for the whole body, also
    of one that nobody reads; whoever does read it gives up before and says so. `reader_s` for a peer to take
    something of what is sent.
    """

    head_s: float = 20.0
    idle_s: float = 15.0
    body_s: float = 75.0
    reader_s: float = 60.0
    max_connections: int = 1024


class PatientProtocol(H11Protocol):
    """Uvicorn's, with an end to every wait for the peer.

    One connection more than there may be takes the place of the one that has asked nothing for longest; a 503
    tells when all are being answered.
    """

    def __init__(self, *args: Any, patience: Patience, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patience = patience
        self._num_drained = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        super().connection_made(transport)
        self._waits_for, self._since_s = self._wait(), self.loop.time()
        self._look = self.loop.call_later(_LOOK_EVERY_S, self._end_if_late)
        if len(self.connections) > self._patience.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._look.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """Called by the event loop: the peer has taken something."""
        self._num_drained += 1
        super().resume_writing()

    @property
    def quiet_since_s(self) -> float | None:
        """Since when nothing was asked, by the loop's clock; None while something is."""
        return self._since_s if self._waits_for[0] == "head" and self._wait()[0] == "head" else None

    def _wait(self) -> tuple[str, object]:
        """What is waited for (`head`, `body`, `reader` or nothing), and which one of its kind."""
        if self.flow.write_paused:
            return "reader", self._num_drained
        if self.conn.their_state is h11.SEND_BODY:
            return "body", self.cycle
        is_idle = self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete)
        return ("head" if is_idle else "", self.cycle)

    def _end_if_late(self) -> None:
        now_s, waits_for = self.loop.time(), self._wait()
        if waits_for != self._waits_for:
            self._waits_for, self._since_s = waits_for, now_s
        limits = {
            "head": self._patience.head_s,
            "body": self._patience.body_s,
            "reader": self._patience.reader_s,
        }
        if now_s - self._since_s > limits.get(waits_for[0], float("inf")):
            # why: what is still to be sent is for somebody who does not take it
            self.transport.abort()
            return
        self._look = self.loop.call_later(_LOOK_EVERY_S, self._end_if_late)

    def _make_room(self) -> None:
        others = (one for one in self.connections if isinstance(one, PatientProtocol) and one is not self)
        quiet = [(since_s, one) for one in others if (since_s := one.quiet_since_s) is not None]
        if quiet:
            longest = min(quiet, key=lambda pair: pair[0])[1]
            self.connections.discard(longest)
            longest.transport.abort()
            return
        most = self._patience.max_connections
        error = unavailable(f"all {most} connections are taken: try again", code="overloaded")
        self.transport.write(_raw_response(error.response().body))
        self.transport.close()


def allow_files() -> int:
    """Have as many files open at once as the system lets this process; how many connections that allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(1, (wanted if soft == resource.RLIM_INFINITY else soft) - _OTHER_FILES)


def _raw_response(body: bytes | memoryview) -> bytes:
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + bytes(body)
