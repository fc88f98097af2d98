"""The cameras that are wanted now: what the settings name, then what the API and reloads make of it.

The vision worker is told each change by its pipe and touches no other camera; a worker that dies is started
again with what is wanted then.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from appliance.board import BoardReader
from appliance.camera_settings import CameraSettings, is_same_stream
from appliance.frigate import as_written, in_our_words, in_written_words, why_no_cooldown
from appliance.model_check import check_classes, known_classes, refuse_classes
from appliance.permits import Cameras, changed_permits
from appliance.processes import Child, Supervisor
from appliance.reloading import taken_back, tell_changes
from appliance.settings import Settings, SettingsError, to_json
from appliance.storage_settings import RedisSettings
from queues.errors import QueueError
from vision.errors import SourceUnsupported
from vision.urls import STREAM_SCHEMES, is_stream, parse_stream_url, redact, shown_address

logger = logging.getLogger(__name__)

OPEN_SCHEMES = (*STREAM_SCHEMES, "synthetic")
"""Schemes of sources that may be named over the API: none of them reads files of this machine."""

CHANGE_S = 15.0

_NAMED = (("zones",), ("lines",), ("objects", "filters"), ("describe", "object_prompts"))
"""Tables of a camera whose keys are names; None takes one away."""

Start = Callable[[Callable[[], bytes]], Supervisor]


class CameraRefused(SettingsError):
    """A camera cannot be as it was asked for.

    Attributes:
        field: the path of the key that is wrong, such as `detect.fps`; None for the whole.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CameraExists(CameraRefused):
    """The name of a new camera is taken."""


class CameraControl:
    """Changes cameras while the vision worker runs; `start` makes the worker, once there is a camera.

    `permit` tells the queue what a camera's jobs have to have, before the worker is told; it may fail with a
    `QueueError`, for the worker tells it too. `on_change` gets the names that there are after a change.
    """

    def __init__(self, settings: Settings, redis_url: str, board: BoardReader, start: Start) -> None:
        self._settings = settings.model_copy(update={"redis": RedisSettings(url=redis_url)})
        self._board = board
        self._start = start
        self._classes = known_classes(settings)
        self._read: Cameras = settings.cameras
        self.permit: Callable[[str, str], Awaitable[object]] | None = None
        self.on_change: Callable[[Sequence[str]], object] = lambda names: None
        self._worker = self._started() if settings.cameras else None
        self._is_wanted = asyncio.Event()
        self._changed_at: dict[str, float] = {}
        # invariant: what was checked against the cameras that there are is what they are changed into
        self.changing = asyncio.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """The cameras' names."""
        return tuple(self._settings.cameras)

    @property
    def worker(self) -> Supervisor | None:
        """Who keeps the vision worker running; None while there was no camera yet."""
        return self._worker

    def is_enabled(self, name: str) -> bool:
        """Whether a camera is wanted and not paused."""
        return name in self._settings.cameras and self._settings.cameras[name].enabled

    def is_before_change(self, name: str, begun_at: float) -> bool:
        """Whether the worker, that began with it then (unix s), has yet to hear of its newest settings."""
        changed_at = self._changed_at.get(name, 0.0)
        # why: whatever comes of a change, it is to be told after that long, or when the clock was set back
        return begun_at < changed_at and 0 <= time.time() - changed_at < CHANGE_S

    async def run(self) -> None:
        """Keeps the worker running until cancelled; raises `ChildError` when it cannot use its settings."""
        if self._worker is None:
            await self._is_wanted.wait()
        assert self._worker is not None
        await self._worker.run()

    def ask_to_stop(self) -> None:
        """Tells the worker to end, and starts no other."""
        if self._worker is not None:
            self._worker.ask_to_stop()

    async def stop(self) -> None:
        """Ends the worker; returns when it is gone."""
        if self._worker is not None:
            await self._worker.stop()

    def settings_of(self, name: str) -> dict[str, Any]:
        """What holds for a camera, as it is written, without its address; raises `KeyError`."""
        camera = self._settings.cameras[name]
        return in_written_words(camera.model_dump(mode="json", exclude={"source", "ffmpeg"}))

    def without_address(self, name: str, text: str) -> str:
        """A text about a camera that shows no more of its address than host and port; raises `KeyError`."""
        source = self._settings.cameras[name].source
        # why: an address without a path is the beginning of what is shown of it
        for form in (shown_address(source), source):
            text = text.replace(form, "its source")
        return redact(text)

    async def add(self, name: str, keys: Mapping[str, Any]) -> None:
        """Takes in a new camera; `keys` as under `cameras.NAME` in the settings. Raises `CameraRefused`."""
        async with self.changing:
            if name in self._settings.cameras:
                message = f"there is a camera {name!r} already: change it, or take another name"
                raise CameraExists(message, "name")
            await self._set({**self._dumped(), name: dict(keys)}, name)

    async def change(self, name: str, keys: Mapping[str, Any]) -> None:
        """Changes some keys of a camera, nested ones by themselves; a zone or line that is None goes away.

        Raises `CameraRefused`, `KeyError`.
        """
        async with self.changing:
            await self._change(name, keys)

    async def _change(self, name: str, keys: Mapping[str, Any]) -> None:
        cameras = self._dumped()
        known = cameras[name]
        if keys.keys() & {"source", "ffmpeg"}:
            # why: both say where the frames come from; the newer word holds.
            known = {key: value for key, value in known.items() if key not in {"source", "ffmpeg"}}
        detect = keys.get("detect")
        if isinstance(detect, Mapping) and "fps" in detect:
            # why: likewise; what a camera says itself would hold before it.
            known = {**known, "fps": None}
        await self._set({**cameras, name: _merged(known, keys)}, name)

    async def remove(self, name: str) -> None:
        """Ends a camera; raises `KeyError` when there is none of that name."""
        async with self.changing:
            cameras = dict(self._settings.cameras)
            del cameras[name]
            await self._tell(self._settings.model_copy(update={"cameras": cameras}))

    async def reload(self, settings: Settings) -> None:
        """Makes the cameras those of `settings`; what else is in them waits for the next start.

        The log names the cameras that were otherwise over the API.
        Raises `SettingsError` for a class that the detector does not give; nothing changes then.
        """
        refuse_classes(settings, self._settings, self._classes)
        lost = taken_back(self._read, self._settings.cameras, settings.cameras)
        await self._tell(self._settings.model_copy(update={"cameras": settings.cameras}))
        self._read = settings.cameras
        if lost:
            logger.warning("the settings hold again, not what the API was asked for: %s", ", ".join(lost))

    def _dumped(self) -> dict[str, Any]:
        return {name: camera.model_dump() for name, camera in self._settings.cameras.items()}

    async def _set(self, wanted: Mapping[str, Any], name: str) -> None:
        try:
            words, renamed = in_our_words({"cameras": wanted})
            whole = {**self._settings.model_dump(), **words}
            # why: a form for answers is tried out, which takes some seconds at worst
            checked = await asyncio.to_thread(Settings.model_validate, whole)
        except ValidationError as error:
            raise _refused(error, name, renamed) from None
        known = self._settings.cameras.get(name)
        if known is None or known.source != checked.cameras[name].source:
            _check_source(checked.cameras[name])
        cameras = {**self._settings.cameras, name: checked.cameras[name]}
        settings = self._settings.model_copy(update={"cameras": cameras})
        self._check_classes(settings, f"cameras.{name}.")
        await self._tell(settings)

    def _check_classes(self, settings: Settings, prefix: str) -> None:
        for finding in check_classes(settings, self._classes) if self._classes else ():
            if finding.path.startswith(prefix):
                raise CameraRefused(finding.text, finding.path.removeprefix(prefix))

    async def permit_all(self) -> None:
        """Tell the queue of the cameras that there are."""
        await self._permit({}, self._settings.cameras)

    async def _permit(self, old: Cameras, new: Cameras) -> None:
        if self.permit is None:
            return
        for name, permit in changed_permits(old, new):
            try:
                await self.permit(name, permit)
            except QueueError as error:
                logger.warning("camera=%s its jobs are withdrawn later: %s", name, error)

    async def _tell(self, settings: Settings) -> None:
        _check_readable(to_json(settings))
        old, new = self._settings.cameras, settings.cameras
        await self._permit(old, new)
        self._settings = settings
        known, now = self._changed_at, time.time()
        self._changed_at = {
            name: known.get(name, 0.0) if name in old and is_same_stream(old[name], camera) else now
            for name, camera in new.items()
        }
        self._board.names = self.names
        self.on_change(self.names)
        if self._worker is not None:
            self._worker.send(self._payload())
        elif settings.cameras:
            self._worker = self._started()
            self._is_wanted.set()

    def _started(self) -> Supervisor:
        return self._start(self._payload)

    def _payload(self) -> bytes:
        return to_json(self._settings) + b"\n"


def start_worker(payload: Callable[[], bytes]) -> Supervisor:
    """The vision worker in a process of its own; its settings travel by a pipe, as they hold passwords."""
    targets = chain(["appliance.ingest:child_main"], repeat("appliance.ingest:restarted_main"))
    return Supervisor("vision worker", lambda: Child(next(targets), payload(), is_told_more=True))


async def reload_from(control: CameraControl, load: Callable[[], Settings], used: Settings) -> None:
    """Reads the settings again; with a mistake in them everything stays, and the log says why.

    It also says what else than cameras differs from the settings that are `used`.
    """
    try:
        async with control.changing:
            wanted = await asyncio.to_thread(load)
            await control.reload(wanted)
    except SettingsError as error:
        logger.error("the settings were not read again: %s", error)
    else:
        tell_changes(used, wanted)


def _check_source(camera: CameraSettings) -> None:
    # why: who may talk to the API may not read every file and device of this machine.
    scheme, has_scheme, _ = camera.source.partition("://")
    if not has_scheme or scheme.lower() not in OPEN_SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in OPEN_SCHEMES)
        raise CameraRefused(f"over the API a source has to be one of {known}", "source")
    try:
        if is_stream(camera.source):
            parse_stream_url(camera.source)
        else:
            # why: late, since few draw their cameras
            from vision.synthetic import SyntheticSource

            SyntheticSource.from_uri(camera.source, "new")
    except SourceUnsupported as error:
        raise CameraRefused(str(error), "source") from None


def _check_readable(payload: bytes) -> None:
    # invariant: the worker is told nothing that it cannot read, for it could not read what follows either
    try:
        from_json(payload)
    except ValueError as error:
        raise CameraRefused(f"a text that cannot be handed on: {error}") from None


def _merged(known: Any, keys: Any, path: tuple[str, ...] = ()) -> Any:
    if not (isinstance(known, Mapping) and isinstance(keys, Mapping)):
        return keys
    joined = {**known, **{key: _merged(known.get(key), value, (*path, key)) for key, value in keys.items()}}
    return {key: value for key, value in joined.items() if value is not None} if path in _NAMED else joined


def _refused(error: ValidationError, name: str, renamed: Mapping[str, str]) -> CameraRefused:
    problem = error.errors(include_url=False, include_input=False)[0]
    written = as_written(problem["loc"], renamed)
    message = problem["msg"].removeprefix("Value error, ")
    field = written.removeprefix("cameras").removeprefix(f".{name}").removeprefix(".") or None
    if problem["type"] == "extra_forbidden":
        message = why_no_cooldown(problem["loc"]) or "is not a key of a camera"
    # why: what does not fit together is told for all cameras, one line each, with its path.
    line = message.splitlines()[0]
    if line.startswith(f".{name}."):
        field, _, message = line.removeprefix(f".{name}.").partition(": ")
    return CameraRefused(message, field)
