"""The engine for servers: its loop runs in a thread, callers iterate over events."""

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from vlm_engine.config import EngineConfig
from vlm_engine.engine import Engine
from vlm_engine.errors import EngineBroken, EngineError, EngineStopped, RequestError
from vlm_engine.grammar import CompiledForm
from vlm_engine.metrics import EngineStats
from vlm_engine.models import PreparedPrompt
from vlm_engine.request import GenerationRequest, TokenEvent
from vlm_engine.sampling_params import StructuredOutput
from vlm_engine.streams import Streams
from vlm_engine.trace import StepTrace

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0

Call = Callable[[Engine], object]


class AsyncEngine:
    """Runs an `Engine` in a thread of its own; all methods belong to one event loop.

    Args:
        config: Model and limits.
        stall_s: Seconds without a step, while there is work, after which the engine is unhealthy.
        load: Makes the engine; by default from `config`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        stall_s: float = 30.0,
        load: Callable[[EngineConfig], Engine] = Engine,
    ) -> None:
        self.config = config
        self._load = load
        self._stall_s = stall_s
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self._calls: deque[Call] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._death: str | None = None
        self._last_step_s = time.monotonic()
        self._streams = Streams()
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="preprocess")

    async def start(self) -> None:
        """Load the model and start the loop.

        Raises:
            ModelLoadError: The model cannot be loaded.
        """
        self._engine = await asyncio.to_thread(self._load, self.config)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(self._engine,), name="engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Stop the loop; requests that are running end with an error event."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        try:
            if self._thread is not None:
                await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
            if self._thread is not None and self._thread.is_alive():
                log.error("the engine's step does not come to an end; it is left alone")
                self._streams.end_all("the engine is closed")
            elif self._engine is not None:
                await asyncio.to_thread(self._engine.close)
        finally:
            self._workers.shutdown(wait=False, cancel_futures=True)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        """Events of a request until its end; closing the iterator aborts it at the next step.

        Raises:
            RequestError: The request can never run; raised before anything was queued.
            EngineStopped: The engine is closed or its loop died.
        """
        self._check_open()
        if request.request_id in self._streams:
            raise RequestError(f"request {request.request_id} is already running", field="request_id")
        stream = self._streams.open(request.request_id, request.sampling.n)
        try:
            # why: by no name, as this frame lasts as long as the answer, and the pixels need not
            self._call(await self._prepared(request))
            async for event in self._streams.follow(request.request_id, stream):
                yield event
        finally:
            if self._streams.close(request.request_id, stream):
                self._call(lambda engine: engine.abort(request.request_id))

    @property
    def reads_videos(self) -> bool:
        """Whether the model takes videos; False until it is loaded."""
        return self._engine is not None and self._engine.model.prompts.reads_videos

    @property
    def model_name(self) -> str:
        """What the model was loaded from."""
        return self.config.model

    @property
    def engine(self) -> Engine:
        """The engine inside, for its limits and its model's numbers; do not step it.

        Raises:
            EngineStopped: It was not started.
        """
        if self._engine is None:
            raise EngineStopped("the engine is not started")
        return self._engine

    @property
    def unhealthy_reason(self) -> str | None:
        """Why requests do not move, or None."""
        if self._death is not None:
            return self._death
        if self._thread is None or self._is_closing:
            return "the engine is not running"
        idle_s = time.monotonic() - self._last_step_s
        if self._streams and idle_s > self._stall_s:
            return f"no step for {idle_s:.0f} s with {len(self._streams)} requests running"
        return self.engine.health.reason

    @property
    def is_healthy(self) -> bool:
        """Whether the loop runs and requests move."""
        return self.unhealthy_reason is None

    def stats(self) -> EngineStats:
        """The books as they are now."""
        return self.engine.stats()

    async def trace(self, first: int = 0) -> list[StepTrace] | None:
        """Some recorded steps from number `first` on, the oldest ones first; None when none are recorded.

        Raises:
            EngineStopped: The engine is closed or its loop died.
        """
        self._check_open()
        answer: concurrent.futures.Future[list[StepTrace] | None] = concurrent.futures.Future()

        def tell(engine: Engine) -> None:
            # why: who asked may have gone
            if answer.set_running_or_notify_cancel():
                answer.set_result(engine.trace(first))

        self._call(tell)
        return await asyncio.wrap_future(answer)

    async def _prepared(self, request: GenerationRequest) -> Call:
        """What queues a request, with all that it needs."""
        loop = asyncio.get_running_loop()
        prompt, seconds = await loop.run_in_executor(self._workers, self.engine.prepare, request)
        form = await self._compiled(request.sampling.structured)
        self._check_open()
        return lambda engine: self._submit(engine, request, prompt, seconds, form)

    async def _compiled(self, form: StructuredOutput | None) -> CompiledForm | None:
        if form is None:
            return None
        grammars = self.engine.grammars
        compiling = grammars.begin(form)
        waiting = asyncio.wrap_future(compiling)
        waiting.add_done_callback(lambda future: future.cancelled() or future.exception())
        # why: others may wait for the same form, so that it goes on when this request is cancelled
        await asyncio.shield(waiting)
        return grammars.compiled(form, compiling)

    def _check_open(self) -> None:
        if self._death is not None or self._is_closing:
            raise EngineStopped(self._death or "the engine is closed")

    def _call(self, call: Call) -> None:
        """Have the engine's thread run `call` before its next step."""
        with self._wake:
            self._calls.append(call)
            self._wake.notify()

    def _run(self, engine: Engine) -> None:
        try:
            while self._wait_for_work(engine):
                self._last_step_s = time.monotonic()
                events = engine.step()
                if events:
                    self._loop.call_soon_threadsafe(self._streams.deliver, events)
            reason = "the engine is closed"
        except BaseException as error:
            log.exception("the engine's loop died")
            reason = self._death = f"the engine's loop died: {error!r}"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._streams.end_all, reason)

    def _submit(
        self,
        engine: Engine,
        request: GenerationRequest,
        prompt: PreparedPrompt,
        seconds: float,
        form: CompiledForm | None,
    ) -> None:
        try:
            engine.submit(request, prompt, seconds, form)
        except EngineBroken:
            raise
        except EngineError as error:
            refusal = error
        except Exception as error:
            log.exception("request %s cannot be taken", request.request_id)
            refusal = EngineError(f"it cannot be taken: {error!r}")
        else:
            return
        self._loop.call_soon_threadsafe(self._streams.refuse, request.request_id, refusal)

    def _wait_for_work(self, engine: Engine) -> bool:
        """Run the calls that wait, sleep while there is nothing to do; False when closing."""
        with self._wake:
            while not (self._is_closing or self._calls or engine.has_work):
                self._last_step_s = time.monotonic()
                self._wake.wait(1.0)
            calls = [self._calls.popleft() for _ in range(len(self._calls))]
        for call in calls:
            try:
                call(engine)
            except EngineBroken:
                raise
            except Exception:
                log.exception("what was asked of the engine failed")
        return not self._is_closing
