"""The engine in a process of its own: it steps, and between two steps it reads its mail.

Started by `EngineProcess` through `vlm_engine.process`. Nothing else runs here, since a busy Python
thread beside the step loop takes the interpreter away from it.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq
from transformers.utils import logging as transformers_logging

from vlm_engine import wire
from vlm_engine.engine import Engine
from vlm_engine.errors import EngineBroken, EngineError, RequestError
from vlm_engine.gate_server import GateServer
from vlm_engine.grammar import Compiling
from vlm_engine.models import PreparedPrompt
from vlm_engine.request import GenerationRequest, TokenEvent
from vlm_engine.warm_up import keep_costs, warm_up

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
COMPILE_POLL_MS = 2

_Prepared = tuple[GenerationRequest, PreparedPrompt, float]


class EngineServer:
    """Answers one client over a socket.

    Args:
        engine: The engine to step.
        socket: Connected to the client.
        gate: Where detectors ask for the device, if they may.
    """

    def __init__(self, engine: Engine, socket: "zmq.Socket[bytes]", gate: GateServer | None = None) -> None:
        self._engine = engine
        self._socket = socket
        self._gate = gate
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        if gate is not None:
            self._poller.register(gate.fileno(), zmq.POLLIN)
            engine.share_device(gate.turns, gate.lend)
        self._compiling: dict[str, tuple[Compiling, _Prepared]] = {}
        self._parent_pid = os.getppid()
        self._heartbeat_s = 0.0

    def run(self) -> None:
        """Serve until the client ends this process or is gone itself.

        Raises:
            EngineBroken: The engine cannot go on; the client knows.
        """
        dtype = str(self._engine.model.spec.dtype).removeprefix("torch.")
        self._send(wire.Ready(self._engine.limits, self._engine.stats(), dtype))
        try:
            self._loop()
        except EngineBroken as error:
            self._send(wire.Failed(type(error).__name__, str(error)))
            raise
        finally:
            if self._gate is not None:
                self._gate.close()

    def _loop(self) -> None:
        while os.getppid() == self._parent_pid:
            idle_ms = COMPILE_POLL_MS if self._compiling else int(1e3 * HEARTBEAT_S)
            self._read_mail(wait_ms=0 if self._engine.has_work else idle_ms)
            self._submit_compiled()
            if self._engine.has_work:
                self._tell(self._engine.step())
            self._beat()

    def _read_mail(self, wait_ms: int) -> None:
        ready = dict(self._poller.poll(wait_ms))
        if self._gate is not None and self._gate.fileno() in ready:
            self._gate.read()
        while self._socket in ready and self._socket.poll(0):
            self._handle(self._socket.recv_multipart(copy=False))

    def _handle(self, frames: list[Any]) -> None:
        message = wire.decode_to_server(frames[0].buffer)
        if isinstance(message, wire.Submit):
            self._submit(message, [frame.buffer for frame in frames[1:]])
        elif isinstance(message, wire.Abort):
            self._compiling.pop(message.request_id, None)
            self._engine.abort(message.request_id)
        else:
            self._send(wire.Trace(message.first, self._engine.trace(message.first)))

    def _submit(self, header: wire.Submit, frames: wire.Frames) -> None:
        name, form = header.request_id, header.sampling.structured
        with self._refusing(name):
            prepared = (*wire.decode_submit(header, frames), header.preprocess_s)
            if form is None:
                self._engine.submit(*prepared)
            else:
                # why: a large schema takes longer to compile than a chat can wait for its next token
                self._compiling[name] = (self._engine.grammars.begin(form), prepared)

    def _submit_compiled(self) -> None:
        for name, (compiling, prepared) in list(self._compiling.items()):
            form = prepared[0].sampling.structured
            if compiling.done() and form is not None:
                del self._compiling[name]
                with self._refusing(name):
                    self._engine.submit(*prepared, self._engine.grammars.compiled(form, compiling))

    @contextmanager
    def _refusing(self, request_id: str) -> Iterator[None]:
        """Tell the client of a request that is not queued; the others go on."""
        try:
            yield
        except EngineBroken:
            raise
        except EngineError as error:
            field = error.field if isinstance(error, RequestError) else None
            self._send(wire.Refused(request_id, type(error).__name__, str(error), field))
        except Exception as error:
            log.exception("request %s cannot be taken", request_id)
            self._send(wire.Refused(request_id, "EngineError", f"it cannot be taken: {error!r}"))

    def _tell(self, events: list[TokenEvent]) -> None:
        """Hand over the news of one step in one message."""
        if events:
            self._send(wire.Events(events))

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._heartbeat_s >= HEARTBEAT_S:
            self._heartbeat_s = now
            self._send(wire.Heartbeat(self._engine.stats(), self._engine.health.reason))

    def _send(self, message: wire.ToClient) -> None:
        self._socket.send(wire.encode(message))


def main() -> None:
    """Read `wire.Start` from standard input, load the model, serve."""
    signal.signal(signal.SIGTERM, _end)
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=wire.Start)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(start.address)
    transformers_logging.disable_progress_bar()
    started_s = time.monotonic()

    def tell(text: str) -> None:
        socket.send(wire.encode(wire.Progress(text)))

    try:
        engine = Engine(start.config)
        tell(f"the model is loaded after {time.monotonic() - started_s:.1f} s")
        warm_up(engine, tell)
        engine.grammars.load()
        gate = _open_gate(start, engine)
    except EngineError as error:
        socket.send(wire.encode(wire.Failed(type(error).__name__, str(error))))
    else:
        try:
            EngineServer(engine, socket, gate).run()
        finally:
            engine.close()
            keep_costs(engine)
    finally:
        # why: what the interpreter does at its end is to be interrupted by nothing
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        context.destroy(linger=1000)


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _open_gate(start: wire.Start, engine: Engine) -> GateServer | None:
    if start.turns is None:
        return None
    if engine.runner.has_side:
        # why: the steps of chats leave cores to others, which would stand still while a turn is waited for
        return GateServer(start.turns, None)
    device = engine.model.spec.device
    return GateServer(start.turns, "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}")
