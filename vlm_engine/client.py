"""The engine in another process, seen from an event loop."""

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq
import zmq.asyncio

from vlm_engine import errors, wire
from vlm_engine.config import EngineConfig, TurnConfig
from vlm_engine.errors import EngineStopped, RequestError
from vlm_engine.metrics import EngineStats
from vlm_engine.models import PromptPreparer, load_prompts
from vlm_engine.request import GenerationRequest, TokenEvent
from vlm_engine.streams import Stream, Streams
from vlm_engine.trace import StepTrace

log = logging.getLogger(__name__)

BACK_OFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)
STABLE_AFTER_S = 60.0
STOP_TIMEOUT_S = 5.0
STALLS_TO_RESTART = 4.0
TRACE_TIMEOUT_S = 10.0
PREPROCESS_NICENESS = 10
SPINS = "20000"


class EngineProcess:
    """Runs an engine in a process of its own, and starts it again when it dies.

    Conversations are tokenized and images preprocessed here, so that none of it takes the
    interpreter away from the step loop. All methods belong to one event loop; the interface is that
    of `AsyncEngine`.

    Args:
        config: Model and limits.
        stall_s: Seconds without a sign of life after which the engine is unhealthy: it takes no request, and
            those that run end with an error; after four times as long it is started again. No step takes
            so long.
        num_preprocess: Requests that are preprocessed at once.
        turns: How detectors of other processes share the device; None where none does. Linux only.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        stall_s: float = 30.0,
        num_preprocess: int = 2,
        turns: TurnConfig | None = None,
    ) -> None:
        self.config = config
        self._turns = turns
        self.num_restarts = 0
        self._stall_s = stall_s
        self._streams = Streams()
        self._workers = ThreadPoolExecutor(num_preprocess, "preprocess", initializer=_give_way)
        self._places = asyncio.Semaphore(num_preprocess)
        self._context: zmq.asyncio.Context | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._prompts: PromptPreparer | None = None
        self._ready: wire.Ready | None = None
        self._stats: EngineStats | None = None
        self._earlier: EngineStats | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._reason: str | None = "the engine is not started"
        self._trouble: str | None = None
        self._fault: str | None = None
        self._last_sign_s = time.monotonic()
        self._traces: dict[int, asyncio.Future[list[StepTrace] | None]] = {}

    async def start(self) -> None:
        """Start the process and wait until its model is loaded.

        Raises:
            ModelLoadError: The model cannot be loaded.
            EngineStopped: The process died while it loaded.
        """
        self._context = zmq.asyncio.Context()
        self._folder = Path(tempfile.mkdtemp(prefix="vlm-engine-"))
        try:
            loading = asyncio.to_thread(load_prompts, self.config)
            self._prompts, _ = await asyncio.gather(loading, self._launch())
        except BaseException:
            await self.close()
            raise
        self._supervisor = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        """End the process; requests that are running end with an error event."""
        self._end_all("the engine is closed")
        try:
            if self._supervisor is not None:
                self._supervisor.cancel()
                await asyncio.wait([self._supervisor])
            await self._end_process()
        finally:
            self._workers.shutdown(wait=False, cancel_futures=True)
            if self._context is not None:
                self._context.destroy(linger=0)
                shutil.rmtree(self._folder, ignore_errors=True)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        """Events of a request until its end; closing the iterator aborts it at the next step.

        Raises:
            RequestError: The request can never run; raised before anything was queued.
            EngineStopped: The engine is closed, or being started again.
        """
        self._check_open()
        if request.request_id in self._streams:
            raise RequestError(f"request {request.request_id} is already running", field="request_id")
        stream = self._streams.open(request.request_id, request.sampling.n)
        try:
            await self._submit(request, stream)
            async for event in self._streams.follow(request.request_id, stream):
                yield event
        finally:
            if self._streams.close(request.request_id, stream) and self._reason is None:
                await self._send([wire.encode(wire.Abort(request.request_id))])

    @property
    def model_name(self) -> str:
        """What the model was loaded from."""
        return self.config.model

    @property
    def reads_videos(self) -> bool:
        """Whether the model takes videos; False until it is loaded."""
        return self._prompts is not None and self._prompts.reads_videos

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return self._process.pid if self._process is not None else None

    @property
    def unhealthy_reason(self) -> str | None:
        """Why requests do not move, or None."""
        return self._reason or self._silence or self._trouble

    @property
    def _silence(self) -> str | None:
        """What is wrong when the process does not say anything."""
        silent_s = time.monotonic() - self._last_sign_s
        if silent_s <= self._stall_s:
            return None
        return f"no sign of life for {silent_s:.0f} s with {len(self._streams)} requests running"

    @property
    def is_healthy(self) -> bool:
        """Whether the process runs and shows signs of life."""
        return self.unhealthy_reason is None

    def stats(self) -> EngineStats:
        """The books as the engine told them last, at most half a second ago.

        Counts go on over restarts; what an engine did in its last moments may be missing.

        Raises:
            EngineStopped: The engine was not started.
        """
        if self._stats is None:
            raise EngineStopped("the engine is not started")
        return self._stats if self._earlier is None else self._stats.after(self._earlier)

    async def trace(self, first: int = 0) -> list[StepTrace] | None:
        """Some recorded steps from number `first` on, the oldest ones first; None when none are recorded.

        Raises:
            EngineStopped: The engine does not answer.
        """
        self._check_open()
        answer = self._traces.get(first)
        if answer is None:
            answer = self._traces[first] = asyncio.get_running_loop().create_future()
            await self._send([wire.encode(wire.TraceWanted(first))])
        done, _ = await asyncio.wait([answer], timeout=TRACE_TIMEOUT_S)
        if not done or answer.cancelled():
            self._traces.pop(first, None)
            raise EngineStopped(self._reason or "the engine does not tell its steps")
        return answer.result()

    async def _submit(self, request: GenerationRequest, stream: Stream) -> None:
        """Prepare a request and send it; of what was prepared nothing is kept.

        # invariant: pixels of `num_preprocess` requests are here at most, and of those that a socket takes.
        """
        async with self._places:
            loop = asyncio.get_running_loop()
            frames = await loop.run_in_executor(self._workers, self._prepare, request)
            self._check_open()
            if not stream.is_open:
                raise EngineStopped("the engine was away while the request was prepared")
            await self._send(frames)

    def _prepare(self, request: GenerationRequest) -> list[Any]:
        started = time.perf_counter()
        prompts, ready = self._prompts, self._ready
        if prompts is None or ready is None:
            raise EngineStopped("the engine is not started")
        ready.limits.check_text(request.messages)
        prompt = prompts.prepare(request.messages)
        ready.limits.check(prompt, request.sampling)
        prompt = wire.narrowed(prompt, ready.dtype)
        return wire.encode_submit(request, prompt, time.perf_counter() - started)

    def _check_open(self) -> None:
        reason = self._reason or self._silence
        if reason is not None:
            raise EngineStopped(reason)

    async def _send(self, frames: list[Any]) -> None:
        if self._socket is not None:
            await self._socket.send_multipart(frames, copy=False)

    async def _launch(self) -> None:
        """Start a process and wait for its first message."""
        assert self._context is not None, "started without a context"
        socket = self._socket = self._context.socket(zmq.PAIR)
        # why: what cleans old folders away does not know that this one is used
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        address = f"ipc://{self._folder}/engine-{self.num_restarts}.sock"
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind(address)
        start = msgspec.json.encode(wire.Start(self.config, address, self._turns))
        command = [sys.executable, "-m", "vlm_engine.process", str(os.getpid())]
        # why: a session of its own keeps the terminal's Ctrl-C with the parent
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, start_new_session=True, env=_environment()
        )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(start)
        self._ready = await self._first_message(socket, self._process)
        if self._stats is not None:
            self._earlier = self.stats()
        self._stats = self._ready.stats
        self._trouble = self._fault = None
        self._last_sign_s = time.monotonic()
        self._reason = None

    async def _first_message(
        self, socket: zmq.asyncio.Socket, process: "subprocess.Popen[bytes]"
    ) -> wire.Ready:
        while not await socket.poll(100):
            if process.poll() is not None:
                raise EngineStopped(
                    f"the engine's process ended with code {process.returncode} while it loaded"
                )
        message = wire.decode_to_client(await socket.recv())
        if isinstance(message, wire.Progress):
            log.info("%s", message.text)
            return await self._first_message(socket, process)
        if isinstance(message, wire.Failed):
            raise _error_of(message)
        assert isinstance(message, wire.Ready), "the first message says whether the model is loaded"
        return message

    async def _supervise(self) -> None:
        """Read the engine's messages; when its process dies, end its streams and start another."""
        failures = 0
        while True:
            started_s = time.monotonic()
            try:
                await self._read_until_death()
            except Exception as error:
                log.exception("the engine's messages cannot be read")
                self._fault = f"the engine's messages cannot be read: {error!r}"
            assert self._process is not None
            fault = self._fault or f"the engine's process ended with code {self._process.returncode}"
            self._end_all(f"{fault}; it is being started again")
            log.error("%s", self._reason)
            if self._stats is not None:
                self._stats = self._stats.ended()
            ended_s = time.monotonic()
            failures = 0 if ended_s - started_s > STABLE_AFTER_S else failures
            while self._reason is not None:
                await asyncio.sleep(BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)])
                failures += 1
                await self._relaunch()
            log.info("the engine is up again after %.1f s", time.monotonic() - ended_s)

    async def _relaunch(self) -> None:
        await self._end_process()
        self.num_restarts += 1
        try:
            await self._launch()
        # why: whatever it is (no memory, no file descriptor, a folder that was cleaned away), it may pass
        except Exception as error:
            self._reason = f"the engine cannot be started again: {error or type(error).__name__}"
            log.error("%s", self._reason)

    async def _read_until_death(self) -> None:
        """Take messages until the process has ended, or says that it cannot go on."""
        assert self._socket is not None
        assert self._process is not None
        while self._fault is None:
            if await self._socket.poll(200):
                self._take(wire.decode_to_client(await self._socket.recv()))
            elif self._process.poll() is not None:
                return
            elif (silence := self._silence) is not None:
                await self._end_unheard(silence)

    async def _end_unheard(self, silence: str) -> None:
        """End the streams of a silent engine, which drops them if it comes back; give it up after long."""
        for request_id in self._streams.end_all(silence):
            await self._send([wire.encode(wire.Abort(request_id))])
        if time.monotonic() - self._last_sign_s > STALLS_TO_RESTART * self._stall_s:
            self._fault = silence

    def _take(self, message: wire.ToClient) -> None:
        self._last_sign_s = time.monotonic()
        if isinstance(message, wire.Events):
            self._streams.deliver(message.events)
        elif isinstance(message, wire.Refused):
            self._streams.refuse(message.request_id, _error_of(message))
        elif isinstance(message, wire.Heartbeat):
            self._stats, self._trouble = message.stats, message.trouble
        elif isinstance(message, wire.Failed):
            self._fault = message.message
        elif isinstance(message, wire.Trace) and (answer := self._traces.pop(message.first, None)):
            answer.set_result(message.steps)

    def _end_all(self, reason: str) -> None:
        """Whoever waits for something is told why it does not come."""
        self._reason = reason
        self._streams.end_all(reason)
        while self._traces:
            self._traces.popitem()[1].cancel()

    async def _end_process(self) -> None:
        """End the process by pid, gently first; returns when it is gone."""
        process, socket = self._process, self._socket
        self._process = self._socket = None
        try:
            if process is not None:
                process.terminate()
                await _wait_for(process)
        finally:
            if process is not None and process.poll() is None:
                process.kill()
            if socket is not None:
                socket.close(linger=0)
        if process is not None and not await _wait_for(process):
            log.error("the engine's process %d was killed and is still there", process.pid)


async def _wait_for(process: "subprocess.Popen[bytes]") -> bool:
    """Whether a process has ended, waited for as long as one may take to end."""
    try:
        await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _error_of(message: wire.Failed | wire.Refused) -> errors.EngineError:
    """The exception that the engine's process tells of."""
    error: errors.EngineError = getattr(errors, message.kind, errors.EngineError)(message.message)
    if isinstance(error, RequestError) and isinstance(message, wire.Refused):
        error.field = message.field
    return error


def _give_way() -> None:
    """Let the engine's process go first where both want a core.

    why: a frame is decoded and resized in about a tenth of a second of one core; a step that waits
    for that core is late for every chat, while the frame can wait.
    """
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PREPROCESS_NICENESS)


def _environment() -> dict[str, str]:
    """This process's environment for the engine's, with short spins unless the operator chose otherwise.

    why: a thread that waits for another spins up to some milliseconds by default, on the very core that the
    other one may need; after a fifth of a millisecond it sleeps instead.
    """
    chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    return {**os.environ, **({} if chosen else {"GOMP_SPINCOUNT": SPINS})}
