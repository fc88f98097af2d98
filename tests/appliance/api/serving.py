"""Real servers for tests: uvicorn on a loopback port, the real engine, one event loop in a thread."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from pydantic import SecretStr

from appliance.api import ApiLimits, ApiServer, allow_camera_changes, create_app, show_failures
from appliance.api.connections import Patience
from appliance.api.services import CameraChanges, Services
from appliance.board import AskedTooOftenError, ShownFrame
from appliance.describe_books import DescribeStats
from appliance.events import EventStore
from appliance.jobs import CameraStatus
from appliance.settings import ServerSettings
from queues.types import QueueStatus
from tests.appliance.pictures import encoded, quadrants
from vlm_engine import AsyncEngine, EngineConfig, HistogramSnapshot

T = TypeVar("T")

MODEL = "tiny"
PATIENCE_S = 60.0
DESCRIBE_STATS = DescribeStats(
    {"described": 3, "dead": 1},
    level=2,
    max_level=6,
    rung="picture",
    wait_s=1.234,
    by_rung={"full": 2, "picture": 1},
    latency={
        "street": HistogramSnapshot((1.0, 5.0), (1, 1, 0), 2.5),
        "yard": HistogramSnapshot((1.0, 5.0), (0, 0, 1), 7.0),
    },
)


class LoopThread:
    """An event loop that runs in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="server loop", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, run in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()


@dataclass
class CamerasInMemory:
    """Cameras whose state a test sets."""

    known: list[CameraStatus] = field(default_factory=list)
    frames: dict[str, bytes] = field(default_factory=dict)
    failure: Exception | None = None
    frame_age_s: float = 0.4
    is_asked_too_often: bool = False

    async def statuses(self) -> Sequence[CameraStatus]:
        if self.failure:
            raise self.failure
        return self.known

    async def frame(self, name: str) -> ShownFrame | None:
        return ShownFrame(self.frames[name], self.frame_age_s) if name in self.frames else None

    async def ask(self, camera: str) -> str | None:
        if self.is_asked_too_often:
            raise AskedTooOftenError
        return None if self.failure else f"{camera}-asked-1"


def two_cameras() -> CamerasInMemory:
    """`street` has a frame, `yard` has none and failed with a URL in its error."""
    street = CameraStatus(name="street", state="running", fps=5.0, num_frames=10)
    yard = CameraStatus(name="yard", state="stalled", error="rtsp://john.doe:p@ss@10.0.0.1/ refused")
    return CamerasInMemory([street, yard], {"street": encoded(quadrants(96, 64), "JPEG")})


@dataclass
class Running:
    """A server that runs, and what a test wants to look at inside."""

    url: str
    services: Services
    events: EventStore
    cameras: CamerasInMemory
    engine: AsyncEngine
    server: ApiServer
    finished: "asyncio.Future[None]"

    @property
    def base_url(self) -> str:
        """What an OpenAI client wants."""
        return f"{self.url}/v1"


class Servers:
    """Starts servers over one engine, and stops them."""

    def __init__(self, engine: AsyncEngine, thread: LoopThread) -> None:
        self.engine = engine
        self.thread = thread
        self._running: list[Running] = []

    def start(
        self,
        *,
        api_key: str | None = None,
        limits: ApiLimits | None = None,
        queue_status: Callable[[], Coroutine[Any, Any, QueueStatus]] | None = None,
        metrics_per_camera: bool = False,
        camera_changes: CameraChanges | None = None,
        patience: Patience | None = None,
    ) -> Running:
        """A server that answers."""
        key = SecretStr(api_key) if api_key else None
        settings = ServerSettings(port=0, api_key=key, metrics_per_camera=metrics_per_camera)
        return self.thread.call(self._start(settings, limits, queue_status, camera_changes, patience))

    def stop(self, running: Running) -> float:
        """Shut a server down; the seconds that it took."""
        started = time.monotonic()
        running.server.should_exit = True
        self.thread.call(_awaited(running.finished))
        running.events.close()
        self._running.remove(running)
        return time.monotonic() - started

    def close(self) -> None:
        for running in list(self._running):
            self.stop(running)

    async def _start(
        self,
        settings: ServerSettings,
        limits: ApiLimits | None,
        queue_status: Any,
        camera_changes: CameraChanges | None,
        patience: Patience | None,
    ) -> Running:
        events, cameras = EventStore(), two_cameras()
        app = create_app(
            self.engine,
            events,
            cameras,
            settings,
            queue_status=queue_status,
            describe_stats=lambda: DESCRIBE_STATS,
            model_name=MODEL,
            aliases=("other-name", "organisation/model"),
            limits=limits,
        )
        show_failures(app, {"output webhook": 2})
        if camera_changes is not None:
            allow_camera_changes(app, camera_changes)
        server = ApiServer(app, settings, patience)
        finished = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        services = app.state.services
        running = Running(server.url, services, events, cameras, self.engine, server, finished)
        self._running.append(running)
        return running


async def _awaited(future: "asyncio.Future[None]") -> None:
    await future


def start_engine(thread: LoopThread, folder: str) -> AsyncEngine:
    """The real engine on a tiny checkpoint, ready."""
    config = EngineConfig(model=folder, device="cpu", num_threads=1, kv_cache_tokens=8192, max_num_seqs=8)
    engine = AsyncEngine(config)
    thread.call(engine.start())
    return engine


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Wait until `is_so()`; an assertion that names `what` when it does not come."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.02)


@contextmanager
def held_steps(engine: AsyncEngine, *, after: int = 0) -> Iterator[None]:
    """Of the engine's steps `after` are computed, and no more while the context lasts: what runs goes on."""
    runner, execute = engine.engine.runner, engine.engine.runner.execute
    numbers, may_go_on = count(), threading.Event()

    def held(plan: Any) -> Any:
        if next(numbers) >= after:
            may_go_on.wait(PATIENCE_S)
        return execute(plan)

    runner.execute = held  # type: ignore[method-assign]
    try:
        yield
    finally:
        runner.execute = execute  # type: ignore[method-assign]
        may_go_on.set()


def is_idle(engine: AsyncEngine) -> bool:
    """Whether nothing runs in the engine and all its blocks are free."""
    stats = engine.stats()
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks
