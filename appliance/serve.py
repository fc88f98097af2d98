"""`appliance serve`: the front in this process; the engine, the vision worker and Redis in their own."""

import asyncio
import logging
import signal
import socket
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any

from fastapi import FastAPI

from appliance.api import (
    ApiServer,
    UnsafeBindingError,
    allow_camera_changes,
    create_app,
    end_chats,
    show_failures,
)
from appliance.board import BoardReader
from appliance.camera_control import CameraControl, reload_from, start_worker
from appliance.camera_states import CameraStates
from appliance.describer import Describer
from appliance.device_sharing import turn_config, with_gate
from appliance.events import EventStore, EventStoreError, Retention
from appliance.file_lock import FileInUseError, sole_use
from appliance.following import (
    Follower,
    give_up_lost,
    store_answer,
    store_change,
    store_drop,
    sweep,
)
from appliance.jobs import Description
from appliance.ladder import Ladder
from appliance.logs import set_up_logging
from appliance.model_names import shown_model_name
from appliance.orphans import Orphans
from appliance.outputs.runner import Outputs
from appliance.ports import listen
from appliance.processes import EXIT_UNUSABLE, ChildError
from appliance.progress import Stopwatch, tell
from appliance.settings import Settings, SettingsError, from_json
from appliance.tasks import StoppedError, outlast, persist, run_beside
from queues import EmbeddedServer, JobConsumer, ResultReader, safe_url
from queues.errors import QueueError
from vlm_engine import EngineProcess
from vlm_engine.errors import EngineError

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 1.0
POLL_S = 0.1
LAST_WORDS_S = 12.0
CHATS_S = 5.0


def run_serve(
    settings: Settings,
    listener: socket.socket,
    announce: Callable[[str], None] | None = None,
    load: Callable[[], Settings] | None = None,
) -> None:
    """Serves on `listener` until SIGINT or SIGTERM.

    `announce` gets the URL once chat and cameras are up; by default it is printed. `load` reads the settings
    again: at SIGHUP the cameras become those that they name.

    Raises `SettingsError`, `EngineError`, `QueueError` or `ChildError` when it cannot begin.
    """
    set_up_logging(logging.WARNING)
    asyncio.run(serve(settings, listener, announce or _print_ready, load))


async def serve(
    settings: Settings,
    listener: socket.socket,
    on_ready: Callable[[str], None],
    load: Callable[[], Settings] | None = None,
) -> None:
    """Serves until a signal; everything that was started is gone when this returns or raises."""
    stop = _stop_at_signals()
    async with AsyncExitStack() as stack:
        service = _Service(settings, stack)
        if load is not None:
            _reload_at_sighup(service.cameras, load, settings)
        with suppress(StoppedError):
            await run_beside(service.run(listener, on_ready), service.end_when(stop))


def _stop_at_signals() -> asyncio.Event:
    """What the first SIGINT or SIGTERM sets; a second one ends this process at once, and so its children."""
    stop, loop, numbers = asyncio.Event(), asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

    def begin() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        tell("stopping; a second signal ends it at once")
        stop.set()

    for number in numbers:
        loop.add_signal_handler(number, begin)
    return stop


def _reload_at_sighup(cameras: CameraControl, load: Callable[[], Settings], used: Settings) -> None:
    """From now on the cameras are read again at each SIGHUP."""
    # why: asyncio alone would let go of a task that runs
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = asyncio.create_task(reload_from(cameras, load, used))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


class _Service:
    """What one `serve` runs, started in order; `stack` ends it in the reverse order."""

    def __init__(self, settings: Settings, stack: AsyncExitStack) -> None:
        settings = with_gate(settings, stack)
        self._settings, self._stack, self._watch = settings, stack, Stopwatch()
        self._redis = None if settings.redis.url else stack.enter_context(EmbeddedServer())
        url = self._redis.url if self._redis else str(settings.redis.address)
        self._watch.tell("the embedded Valkey is up" if self._redis else f"the queue is {safe_url(url)}")
        self._events = stack.enter_context(sole_events(settings))
        self._num_failures: Counter[str] = Counter()
        self._outputs = _open_outputs(settings, self._events, self._num_failures)
        self._board = BoardReader(url, tuple(settings.cameras))
        stack.push_async_callback(self._board.close)
        # why: the worker loads its detector while the engine loads here.
        self.cameras = CameraControl(settings, url, self._board, start_worker)
        self.cameras.on_change = self._outputs.change_cameras
        stack.push_async_callback(self.cameras.stop)
        self._engine = EngineProcess(settings.engine, turns=turn_config(settings))
        self._consumer = JobConsumer(url, settings.queue)
        self._states = CameraStates(self._board, self.cameras)
        self.cameras.permit = self._consumer.permit
        self._readers = {
            store: ResultReader(url, settings.queue, stream=stream)
            for stream, store in (
                (settings.queue.results, store_answer),
                (settings.queue.told, store_change),
                (settings.queue.dropped, store_drop),
            )
        }
        self._followers: dict[str, Follower] = {}
        self._describer = self._create_describer()
        self._app = self._create_app()

    async def run(self, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
        """Loads, then serves until cancelled or until something that must live has died."""
        await run_beside(
            self._load_and_serve(listener, on_ready),
            self.cameras.run(),
            self._states.watch(),
            *([_keep_running(self._redis)] if self._redis else []),
        )

    async def end_when(self, stop: asyncio.Event) -> None:
        """Raises `StoppedError` once `stop` is set, chats have ended, and cameras' last words are told.

        Nobody waits long for that: what is owed to outputs waits in the file, if there is one.
        """
        await stop.wait()
        watch = Stopwatch()
        self.cameras.ask_to_stop()
        num_left, _ = await asyncio.gather(end_chats(self._app, CHATS_S), self._hear_last_words())
        if num_left:
            watch.tell(f"{num_left} chats were told that the server is shutting down")
        raise StoppedError

    async def _hear_last_words(self) -> None:
        with suppress(TimeoutError, QueueError, EventStoreError, sqlite3.Error):
            async with asyncio.timeout(LAST_WORDS_S):
                while not await self._is_all_told():
                    await asyncio.sleep(POLL_S)

    async def _is_all_told(self) -> bool:
        for follower in self._followers.values():
            if not await follower.is_through():
                return False
        return await asyncio.to_thread(self._is_all_tried)

    def _is_all_tried(self) -> bool:
        """Whether no event of the cameras goes on, and outputs were shown all that they are owed."""
        if not set(self.cameras.names).isdisjoint(self._events.open_events().values()):
            return False
        due = [self._events.outbox.next_due(output) for output in self._settings.outputs.by_name]
        # why: whoever has not taken that one will not take it now
        return all(message is None or message.num_tries for message in due)

    async def _load_and_serve(self, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
        await self._begin_to_follow()
        self._stack.push_async_callback(self._engine.close)
        tell(f"loading the model {shown_model_name(self._settings.engine.model)}")
        await self._engine.start()
        self._watch.tell("the engine is ready")
        await self._stack.enter_async_context(self._consumer)
        await self.cameras.permit_all()
        server, events = ApiServer(self._app, self._settings.server), self._events
        await run_beside(
            _serve_http(server, listener),
            self._describer.run(),
            self._outputs.run(),
            self._announce(server, on_ready),
            *(self._persist(f"following {stream}", one.run) for stream, one in self._followers.items()),
            self._persist("lost events", partial(give_up_lost, events, self._settings.describe.max_age_s)),
            self._persist("old events", partial(sweep, events)),
            self._persist("orphans", Orphans(events, self._board).run),
        )

    async def _begin_to_follow(self) -> None:
        """Redis' streams: what comes from now on is news."""
        for store, reader in self._readers.items():
            await self._stack.enter_async_context(reader)
            follower = Follower(
                reader,
                store,
                self._events,
                has_history=self._redis is None,
                num_failures=self._num_failures,
            )
            await follower.begin()
            self._followers[reader.stream] = follower

    def _persist(
        self, name: str, work: Callable[[], Coroutine[Any, Any, object]]
    ) -> Coroutine[Any, Any, None]:
        return persist(name, work, self._num_failures)

    async def _announce(self, server: ApiServer, on_ready: Callable[[str], None]) -> None:
        """Tells the address once the server listens and the vision worker has reported every camera."""
        while not (server.started and await self._states.is_all_told()):
            await asyncio.sleep(POLL_S)
        self._watch.tell("all is up")
        on_ready(server.url)

    def _create_app(self) -> FastAPI:
        try:
            app = create_app(
                self._engine,
                self._events,
                self._states,
                self._settings.server,
                queue_status=self._consumer.status,
                embedded_url=self._redis.url if self._redis else None,
                describe_stats=self._describer.stats,
            )
        except UnsafeBindingError as error:
            raise SettingsError(str(error)) from None
        allow_camera_changes(app, self.cameras)
        show_failures(app, self._num_failures)
        return app

    def _create_describer(self) -> Describer:
        describe = self._settings.describe
        return Describer(
            self._consumer,
            self._engine,
            concurrency=describe.concurrency,
            max_tokens=describe.max_tokens,
            ladder=Ladder(describe.degrade, max_tokens=describe.max_tokens, max_age_s=describe.max_age_s),
            has_context=not self._settings.is_bundled_vlm,
            on_settled=partial(_keep, self._events, self._num_failures),
        )


@contextmanager
def sole_events(settings: Settings) -> Iterator[EventStore]:
    """The event store, whose file no other appliance has; raises `SettingsError` when it cannot be used."""
    path = settings.events.path
    with ExitStack() as stack:
        if path is not None:
            try:
                stack.enter_context(sole_use(path))
            except FileInUseError as error:
                raise SettingsError(f"events.path: {error}") from None
        yield stack.enter_context(closing(open_events(settings)))


def open_events(settings: Settings) -> EventStore:
    """The event store that the settings ask for; raises `SettingsError` when its file cannot be used."""
    wanted = settings.events
    retention = Retention(wanted.retain_days, wanted.max_events, wanted.max_bytes)
    try:
        return EventStore(wanted.path, retention)
    except EventStoreError as error:
        raise SettingsError(f"events.path: {error}") from None


def _open_outputs(settings: Settings, events: EventStore, num_failures: Counter[str]) -> Outputs:
    if settings.outputs.by_name and settings.events.path is None:
        logger.warning("events.path is not set: what outputs have not taken yet is lost when this ends")
    try:
        return Outputs(settings.outputs, events, tuple(settings.cameras), num_failures)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    except sqlite3.Error as error:
        raise SettingsError(f"events.path: {settings.events.path}: cannot be used now: {error}") from None


async def _keep(
    events: EventStore, num_failures: Counter[str], description: Description, jpeg: bytes
) -> None:
    try:
        await asyncio.to_thread(events.add, description, jpeg)
    except EventStoreError as error:
        # why: the answer goes on to the results, from where it is stored as soon as that is possible.
        num_failures["pictures that were not stored"] += bool(jpeg)
        logger.debug("camera=%s job=%s lost its picture: %s", description.camera, description.job_id, error)


async def _serve_http(server: ApiServer, listener: socket.socket) -> None:
    """Serves; when cancelled, what is being answered may come to its end first."""
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        await asyncio.wait([serving])
    finally:
        server.should_exit = True
        await outlast(serving)
    serving.result()


async def _keep_running(redis: EmbeddedServer) -> None:
    while True:
        try:
            # why: a start takes as long as the machine wants, and chats go on meanwhile.
            if await asyncio.to_thread(redis.ensure_running):
                logger.error("the embedded Valkey had ended and was started again")
        except (QueueError, OSError) as error:
            logger.error("the embedded Valkey had ended and cannot be started: %s", error)
        await asyncio.sleep(WATCH_EVERY_S)


def child_main() -> None:
    """`serve` as a child of the demo: settings as JSON on standard input, mistakes in one line."""
    settings = from_json(sys.stdin.read())
    try:
        with listen(settings.server) as listener:
            run_serve(settings, listener, announce=lambda url: None)
    except (SettingsError, ChildError, QueueError, EngineError) as error:
        print(f"appliance: {error}", file=sys.stderr)
        sys.exit(EXIT_UNUSABLE)


def _print_ready(url: str) -> None:
    print(
        f"appliance ready: page {url}/  chat {url}/v1/chat/completions  events {url}/v1/events",
        flush=True,
    )
