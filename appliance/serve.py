"""`appliance serve`: the front with the engine in this process, the vision worker and Redis beside it."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from appliance.api import ApiServer, UnsafeBindingError, create_app
from appliance.board import BoardReader
from appliance.describer import Describer
from appliance.events import EventStore
from appliance.jobs import decode_description
from appliance.processes import Child, Supervisor
from appliance.settings import ServerSettings, Settings, SettingsError
from appliance.tasks import StoppedError, run_beside, run_until
from queues import EmbeddedServer, JobConsumer, ResultReader
from vlm_engine import AsyncEngine

logger = logging.getLogger(__name__)

READ_BLOCK_MS = 1000
WATCH_EVERY_S = 1.0
POLL_S = 0.1


def run_serve(settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM, and prints one line with the addresses once chat and cameras are up.

    Raises `SettingsError`, `EngineError`, `QueueError` or `ChildError` when it cannot begin.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with listen(settings.server) as listener:
        asyncio.run(serve(settings, listener, _print_ready))


def listen(server: ServerSettings) -> socket.socket:
    """The bound socket, so that a port in use is known before a model is loaded; raises `SettingsError`."""
    listener = socket.socket(socket.AF_INET6 if ":" in server.host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((server.host.strip("[]"), server.port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"cannot listen on {server.host}:{server.port}: {error.strerror}: choose another --port or --host"
        ) from None
    return listener


async def serve(settings: Settings, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
    """Serves until a signal; everything that was started is gone when this returns or raises."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        try:
            parts = await run_until(stop, _start(settings, stack))
        except StoppedError:
            return
        await _run(settings, parts, listener, stop, on_ready)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What runs, each started and registered to be ended in the reverse order."""

    app: FastAPI
    engine: AsyncEngine
    events: EventStore
    board: BoardReader
    consumer: JobConsumer
    results: ResultReader
    worker: Supervisor | None
    redis: EmbeddedServer | None


async def _start(settings: Settings, stack: AsyncExitStack) -> _Parts:
    redis = None if settings.redis.url else stack.enter_context(EmbeddedServer())
    url = redis.url if redis else str(settings.redis.url)
    board, events = BoardReader(url, tuple(settings.cameras)), EventStore()
    stack.callback(events.close)
    stack.push_async_callback(board.close)
    engine, consumer = AsyncEngine(settings.engine), JobConsumer(url, settings.queue)
    app = _app(settings, engine, events, board, consumer)
    # why: the worker loads its detector while the engine loads here.
    worker = start_worker(settings, url) if settings.cameras else None
    if worker:
        stack.push_async_callback(worker.stop)
    stack.push_async_callback(engine.close)
    await run_beside(engine.start(), *_watched(worker))
    await stack.enter_async_context(consumer)
    results = await stack.enter_async_context(ResultReader(url, settings.queue))
    return _Parts(app, engine, events, board, consumer, results, worker, redis)


async def _run(
    settings: Settings,
    parts: _Parts,
    listener: socket.socket,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
) -> None:
    server = ApiServer(parts.app, settings.server)
    describer = Describer(
        parts.consumer,
        parts.engine,
        concurrency=settings.describe.concurrency,
        max_tokens=settings.describe.max_tokens,
        on_settled=parts.events.add,
    )
    await run_beside(
        server.serve(sockets=[listener]),
        describer.run(),
        _follow_results(parts.results, parts.events),
        _exit_on(stop, server),
        _announce(server, parts.board, on_ready),
        *_watched(parts.worker),
        *([_keep_running(parts.redis)] if parts.redis else []),
    )


def _app(
    settings: Settings,
    engine: AsyncEngine,
    events: EventStore,
    board: BoardReader,
    consumer: JobConsumer,
) -> FastAPI:
    try:
        return create_app(engine, events, board, settings.server, queue_status=consumer.status)
    except UnsafeBindingError as error:
        raise SettingsError(str(error)) from None


def start_worker(settings: Settings, redis_url: str) -> Supervisor:
    """The vision worker in a process of its own; its settings travel by a pipe, as they hold passwords."""
    redis = settings.redis.model_copy(update={"url": redis_url})
    payload = settings.model_copy(update={"redis": redis}).model_dump_json().encode()
    return Supervisor("vision worker", lambda: Child("appliance.ingest:child_main", payload))


def _watched(worker: Supervisor | None) -> list[Coroutine[Any, Any, None]]:
    return [worker.run()] if worker else []


async def _follow_results(results: ResultReader, events: EventStore) -> None:
    """Stores what was described, also by other appliances and before this one started."""
    last_id = "0-0"
    while True:
        for result in await results.read(last_id, READ_BLOCK_MS):
            last_id = result.entry_id
            try:
                events.add(decode_description(result.body))
            except ValueError as error:
                logger.warning("job=%s has a result that is no description: %s", result.job_id, error)


async def _exit_on(stop: asyncio.Event, server: ApiServer) -> None:
    await stop.wait()
    server.should_exit = True


async def _announce(server: ApiServer, board: BoardReader, on_ready: Callable[[str], None]) -> None:
    """Tells the address once the server listens and the vision worker has reported every camera."""
    while not server.started or not all(status.updated_at for status in await board.statuses()):
        await asyncio.sleep(POLL_S)
    on_ready(server.url)


async def _keep_running(redis: EmbeddedServer) -> None:
    while True:
        if redis.ensure_running():
            logger.error("the embedded Valkey had ended and was started again")
        await asyncio.sleep(WATCH_EVERY_S)


def _print_ready(url: str) -> None:
    print(
        f"appliance ready: page {url}/  chat {url}/v1/chat/completions  events {url}/v1/events",
        flush=True,
    )
