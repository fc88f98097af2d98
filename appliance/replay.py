"""`appliance replay`: the whole job on recorded video, in one process, and every detection through Redis."""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.describer import Describer
from appliance.display import Display
from appliance.jobs import Description, decode_description
from appliance.loading import load_engine
from appliance.output import DescriptionWriter, counted
from appliance.player import Player
from appliance.read_files import ReadFiles
from appliance.recordings import Recording
from appliance.saving import Saver
from appliance.settings import BUNDLED_VLM, Settings, SettingsError
from appliance.tasks import outlast, run_beside, run_until_signal
from appliance.viewing import check_labels, recording_options
from queues import (
    CURABLE,
    EmbeddedServer,
    JobConsumer,
    JobProducer,
    QueueConfig,
    QueueError,
    QueueUnavailable,
    ResultReader,
    forget_queue,
)
from vision.detector import Detector
from vlm_engine import AsyncEngine, EngineStopped

logger = logging.getLogger(__name__)

READ_BLOCK_MS = 200
POLL_S = 0.1
MISSING_AFTER_S = 3.0
STALL_S = 600.0
MOST_FILES = 10
WATCH_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What the command line said: how fast, as which camera, and where descriptions and pictures go.

    `config` is the file that the settings are from.
    """

    realtime: bool = False
    camera: str | None = None
    output: Path | None = None
    save: Path | None = None
    config: Path | None = None


def run_replay(settings: Settings, recordings: Sequence[Recording], options: ReplayOptions) -> int:
    """Plays the recordings and describes what is worth it; the number of failures of both kinds.

    Raises `VisionError`, `EngineError`, `QueueError` or `SettingsError` when it cannot begin, `SettingsError`
    when what it writes finds no room, and `SignalError` when it was told to stop.
    """
    if options.camera is not None and options.camera not in settings.cameras:
        known = ", ".join(settings.cameras) or "none"
        raise SettingsError(f"--camera {options.camera}: the settings have no such camera; there is {known}")
    recordings = [_as_seen(recording, settings, options.camera) for recording in recordings]
    logging.basicConfig(level=logging.WARNING, format="appliance: %(message)s")
    read = _read_files(settings, recordings, options)
    with ExitStack() as stack:
        display = stack.enter_context(Display())
        folder = _folder(options.save) if options.save else None
        saver = stack.enter_context(Saver(folder, read, display.say)) if folder else None
        writer = stack.enter_context(DescriptionWriter(options.output, read))
        if settings.engine.model == BUNDLED_VLM and not all("synthetic:" in r.uri for r in recordings):
            display.say("note: the bundled demo model knows drawn scenes only; --vlm takes a real one")
        display.hint("loading the detector")
        detector = Detector(settings.detector)
        check_labels(settings, detector, [options.camera or recording.name for recording in recordings])
        own = None if settings.redis.address else stack.enter_context(EmbeddedServer())
        url = own.url if own else str(settings.redis.address)
        run = Replay(settings, recordings, detector, url, writer=writer, display=display, saver=saver)
        work = run.run(realtime=options.realtime, camera=options.camera)
        num_failed = asyncio.run(run_until_signal(run_beside(work, *([_watch_own(own)] if own else []))))
    return num_failed + (saver.num_failed if saver else 0)


def _read_files(settings: Settings, recordings: Sequence[Recording], options: ReplayOptions) -> ReadFiles:
    models = (settings.detector.model, settings.engine.model)
    return ReadFiles([*models, *(r.uri for r in recordings), *([options.config] if options.config else [])])


def _as_seen(recording: Recording, settings: Settings, camera: str | None) -> Recording:
    """The recording, to be read as the camera is that it stands for."""
    return replace(recording, options=recording_options(settings.view_of(camera or recording.name)))


class Replay:
    """One run: a player in a thread, the engine and the dispatcher in this loop, Redis between them."""

    def __init__(
        self,
        settings: Settings,
        recordings: Sequence[Recording],
        detector: Detector,
        redis_url: str,
        *,
        writer: DescriptionWriter,
        display: Display,
        saver: Saver | None,
    ) -> None:
        self._settings = settings
        self._recordings = recordings
        self._detector = detector
        self._url = redis_url
        self._writer = writer
        self._display = display
        self._saver = saver
        self._run_id = uuid.uuid4().hex[:8]
        self._settled: dict[str, Description] = {}

    async def run(self, *, realtime: bool, camera: str | None = None) -> int:
        """Plays, describes and waits for the last description; the number of failures.

        When cancelled it says what was not described.
        """
        queue = self._queue()
        with JobProducer(self._url, queue) as producer:
            player = self._player(producer, realtime=realtime, camera=camera)
            try:
                await self._run(player, queue)
            except asyncio.CancelledError:
                self._summarize(player, is_stopped=True)
                raise
        return self._summarize(player)

    async def _run(self, player: Player, queue: QueueConfig) -> None:
        async with AsyncExitStack() as stack:
            self._display.hint("loading the vision-language model")
            engine = AsyncEngine(self._settings.engine, stall_s=STALL_S, load=load_engine)
            stack.push_async_callback(engine.close)
            await engine.start()
            stack.push_async_callback(self._forget, queue)
            consumer = await stack.enter_async_context(JobConsumer(self._url, queue))
            reader = await stack.enter_async_context(ResultReader(self._url, queue))
            describer = Describer(
                consumer,
                engine,
                concurrency=self._settings.describe.concurrency,
                max_tokens=self._settings.describe.max_tokens,
                has_context=not self._settings.is_bundled_vlm,
                on_settled=self._settle_dead,
            )
            await run_beside(
                self._play(player, consumer),
                describer.run(),
                self._collect(reader),
                _watch(engine),
                self._display.follow(player.counts, describer, consumer),
                *([self._saver.watch()] if self._saver else []),
            )

    def _queue(self) -> QueueConfig:
        """A queue of this run's own, in which nothing is ever dropped."""
        return replace(
            self._settings.queue,
            stream=f"{self._settings.queue.stream}:replay-{self._run_id}",
            when_full="wait",
        )

    def _player(self, producer: JobProducer, *, realtime: bool, camera: str | None) -> Player:
        return Player(
            self._settings,
            self._detector,
            producer,
            run_id=self._run_id,
            realtime=realtime,
            camera=camera,
            on_result=self._saver.keep if self._saver else lambda recording, result: None,
            on_end=self._saver.end if self._saver else lambda recording, num_jobs: None,
        )

    async def _play(self, player: Player, consumer: JobConsumer) -> None:
        playing = asyncio.ensure_future(asyncio.to_thread(player.play, self._recordings))
        try:
            await asyncio.wait([playing])
        finally:
            player.stop()
            await outlast(playing)
        playing.result()
        await self._drain(player, consumer)
        if self._saver is not None:
            await self._saver.wait()

    async def _drain(self, player: Player, consumer: JobConsumer) -> None:
        """Waits for the last description; what the queue has lost sight of is not waited for."""
        idle_since: float | None = None
        while len(self._settled) < player.counts.num_jobs:
            is_idle = await _is_idle(consumer)
            idle_since = (idle_since or time.monotonic()) if is_idle else None
            if idle_since is not None and time.monotonic() - idle_since > MISSING_AFTER_S:
                return
            await asyncio.sleep(POLL_S)

    async def _collect(self, reader: ResultReader) -> None:
        last_id = "0-0"
        while True:
            for result in await reader.read(last_id, READ_BLOCK_MS):
                last_id = result.entry_id
                self._settle(decode_description(result.body))

    async def _settle_dead(self, description: Description, jpeg: bytes) -> None:
        # why: dead letters never reach the stream of results; everything else is read from there.
        if description.error is not None:
            self._settle(description)

    def _settle(self, description: Description) -> None:
        if description.job_id in self._settled:
            return
        self._settled[description.job_id] = description
        self._writer.write(description, self._display)
        if self._saver is not None:
            self._saver.describe(description)

    async def _forget(self, queue: QueueConfig) -> None:
        """Removes this run's keys from a Redis that others use too."""
        try:
            await forget_queue(self._url, queue)
        except QueueError as error:
            logger.warning("the keys of %s stay in Redis: %s", queue.stream, error)

    def _summarize(self, player: Player, *, is_stopped: bool = False) -> int:
        counts = player.counts
        num_described = sum(description.error is None for description in self._settled.values())
        num_failed = counts.num_jobs - num_described
        where = f"stopped in {counts.recording.name}: " if is_stopped and counts.recording else ""
        self._display.say(
            f"{where}{counted(counts.num_frames, 'frame')}, {counted(counts.num_detections, 'detection')}, "
            f"{counted(num_described, 'description')}"
            + (f", {num_failed} {'not described' if is_stopped else 'failed'}" if num_failed else "")
            + _lost(counts.damaged, "damaged frame", "left out")
            + _lost(counts.missing, "frame", "missing: their source was cut off or is damaged")
        )
        return num_failed + len(counts.failures)


def _lost(by_file: Counter[str], noun: str, what: str) -> str:
    """How many frames were lost, and of which files."""
    if not (total := by_file.total()):
        return ""
    files = [f"{file}: {number}" for file, number in by_file.most_common(MOST_FILES) if number]
    more = ["…"] if len(+by_file) > len(files) else []
    return f", {counted(total, noun)} {what} ({', '.join([*files, *more])})"


async def _is_idle(consumer: JobConsumer) -> bool:
    """Whether the queue has nothing left; not while nobody can tell."""
    try:
        return (await consumer.status()).is_idle
    except CURABLE:
        return False


async def _watch_own(server: EmbeddedServer) -> None:
    """Raises `QueueUnavailable` when the embedded server has ended, and all that waited in it is lost."""
    while server.is_running:
        await asyncio.sleep(WATCH_EVERY_S)
    raise QueueUnavailable("the embedded Valkey ended, and with it the jobs that waited in it")


async def _watch(engine: AsyncEngine) -> None:
    """Raises `EngineStopped` when the engine has died or stalled: nothing would be described any more."""
    while engine.unhealthy_reason is None:
        await asyncio.sleep(WATCH_EVERY_S)
    raise EngineStopped(engine.unhealthy_reason)


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be made a folder: {error.strerror}: choose another --save"
        ) from None
    return path
