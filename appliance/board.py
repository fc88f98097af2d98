"""The notice board in Redis: each camera's newest frame and status, from the vision worker to the front.

Nothing on it is owed to anybody: values expire by themselves, and nothing is written during an outage.
"""

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import redis

from appliance.jobs import CameraStatus, asked_key, frame_key, status_key, watched_key
from appliance.logs import Complaints
from appliance.rivals import Rivals
from queues import QueueConfig, connect, connect_async

logger = logging.getLogger(__name__)

FRAME_TTL_S = 30
STATUS_TTL_S = 15
ASKED_TTL_S = 30
MAX_ASKED = 5
WATCHED_TTL_S = 5
OUTAGE_PAUSE_S = 1.0
COMPLAIN_EVERY_S = 10.0
COMMANDS = ("set", "get", "del", "mget", "exists", "expire", "pttl", "lpop", "rpush", "lrem", "multi", "exec")
"""What a user of the server needs for the board, besides its keys, which all begin with `KEYS`."""
KEYS = "appliance:"
_TIMES = QueueConfig(command_timeout_s=2.0)

_status_decoder = msgspec.json.Decoder(CameraStatus)


class ShownFrame(NamedTuple):
    """A camera's newest frame: a JPEG, and seconds since it was written, by the clock of Redis."""

    jpeg: bytes
    age_s: float


class Told(NamedTuple):
    """What a worker said of a camera last, and when, by the monotonic clock of this process."""

    status: CameraStatus
    at_s: float


class AskedTooOftenError(Exception):
    """As many descriptions of a camera's frames are asked for as may wait."""


class BoardWriter:
    """Writes frames and statuses; a server that is away is left alone for a while, nothing is raised.

    A status tells of another worker that writes one of the same camera (`Rivals`).
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = connect(url, _TIMES)
        self._clock = clock
        self._quiet_until = 0.0
        self._rivals = Rivals(clock)
        self._complaints = Complaints(logger, COMPLAIN_EVERY_S, clock)

    def write_frame(self, camera: str, jpeg: bytes) -> None:
        """Shows `jpeg` as the camera's newest frame for 30 s."""
        self._set(frame_key(camera), jpeg, FRAME_TTL_S)

    def forget_frame(self, camera: str) -> None:
        """Shows no frame of the camera until the next one is written."""
        self._ask(lambda: self._redis.delete(frame_key(camera)))

    def write_status(self, status: CameraStatus) -> None:
        """Shows the camera's status for 15 s."""
        value = msgspec.json.encode(self._rivals.signed(status))
        before = self._set(status_key(status.name), value, STATUS_TTL_S, get=True)
        self._rivals.look(status.name, _status_decoder.decode(before) if before else None)

    def take_asked(self, cameras: Sequence[str]) -> dict[str, str]:
        """The oldest event id of each camera that a description was asked for of; nothing in an outage."""
        # why: it is asked all the time, and there is nearly never one
        if not cameras or not self._ask(lambda: self._redis.exists(*map(asked_key, cameras))):
            return {}
        ids = self._ask(lambda: self._pop_each([asked_key(camera) for camera in cameras]))
        return {camera: found.decode() for camera, found in zip(cameras, ids or (), strict=False) if found}

    def watched(self, cameras: Sequence[str]) -> frozenset[str]:
        """The cameras whose frames somebody asked for within the last 5 s; none in an outage."""
        keys = [watched_key(camera) for camera in cameras]
        found = keys and self._ask(lambda: self._redis.mget(keys))
        return frozenset(camera for camera, is_set in zip(cameras, found or (), strict=False) if is_set)

    def close(self) -> None:
        """Closes the connection; what was written expires by itself."""
        self._redis.close()

    def _pop_each(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.lpop(key)
            return pipeline.execute()

    def _ask(self, question: Callable[[], Any]) -> Any:
        """What Redis says; None in an outage, which begins if it says nothing."""
        if self._clock() < self._quiet_until:
            return None
        try:
            return question()
        except (redis.RedisError, OSError) as error:
            self._pause(error)
            return None

    def _pause(self, error: Exception) -> None:
        self._quiet_until = self._clock() + OUTAGE_PAUSE_S
        self._complaints.tell("outage", "camera frames and status are not shown: %s", type(error).__name__)

    def _set(self, key: str, value: bytes, ttl_s: int, *, get: bool = False) -> Any:
        """With `get`, what was there before."""
        return self._ask(lambda: self._redis.set(key, value, ex=ttl_s, get=get))


class BoardReader:
    """Reads the board for the cameras of one configuration."""

    def __init__(self, url: str, cameras: Sequence[str]) -> None:
        self.names = tuple(cameras)
        self._redis = connect_async(url, _TIMES)
        self._told: dict[str, Told] = {}

    async def told(self) -> dict[str, Told]:
        """What was said last of each camera, however long ago; nothing of one that was never heard of."""
        names = self.names
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.get(status_key(name))
                    pipeline.pttl(status_key(name))
                answers = await pipeline.execute() if names else []
        except (redis.RedisError, OSError):
            answers = [None] * (2 * len(names))
        now_s = time.monotonic()
        for name, value, left_ms in zip(names, answers[::2], answers[1::2], strict=True):
            if value and left_ms > 0:
                age_s = max(0.0, STATUS_TTL_S - left_ms / 1e3)
                self._told[name] = Told(_status_decoder.decode(value), now_s - age_s)
        self._told = {name: told for name, told in self._told.items() if name in self.names}
        return dict(self._told)

    async def statuses(self) -> list[CameraStatus]:
        """One status a camera, as it was told last; `connecting` while the worker has said nothing."""
        names, told = self.names, await self.told()
        return [
            told[name].status if name in told else CameraStatus(name=name, state="connecting")
            for name in names
        ]

    async def going_on(self, events: Mapping[str, str]) -> set[str] | None:
        """Which of these events (camera by id) their workers say go on; None in an outage, when nobody knows.

        The cameras may be any; of a worker that does not name its events, all go on.
        """
        cameras = sorted(set(events.values()))
        try:
            values = await self._redis.mget([status_key(name) for name in cameras]) if cameras else []
        except (redis.RedisError, OSError):
            return None
        named = {
            camera: _status_decoder.decode(value).open_events if value else ()
            for camera, value in zip(cameras, values, strict=True)
        }
        return {one for one, camera in events.items() if (ids := named[camera]) is None or one in ids}

    async def frame(self, camera: str) -> ShownFrame | None:
        """The camera's newest frame; None when there is none yet, or no such camera.

        Who asks again within 5 s gets frames that are newer: the worker is told that somebody is looking.
        """
        if camera not in self.names:
            return None
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.set(watched_key(camera), 1, ex=WATCHED_TTL_S)
                pipeline.get(frame_key(camera))
                pipeline.pttl(frame_key(camera))
                # why: a Redis that takes no more writes still has the frame
                _, value, left_ms = await pipeline.execute(raise_on_error=False)
        except (redis.RedisError, OSError):
            return None
        if not isinstance(value, bytes) or not isinstance(left_ms, int):
            return None
        return ShownFrame(value, max(0.0, FRAME_TTL_S - left_ms / 1e3))

    async def ask(self, camera: str) -> str | None:
        """Asks for a description of the camera's next frame; its event's id, None in an outage.

        One that nobody takes up within 30 s is forgotten. Raises `AskedTooOftenError` when `MAX_ASKED` wait.
        """
        key, event_id = asked_key(camera), f"{camera}-asked-{uuid.uuid4().hex[:12]}"
        try:
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.rpush(key, event_id)
                pipeline.expire(key, ASKED_TTL_S)
                num_waiting, _ = await pipeline.execute()
            # why: one that the worker has taken meanwhile is answered
            if num_waiting > MAX_ASKED and await self._redis.lrem(key, -1, event_id):
                raise AskedTooOftenError(camera)
        except (redis.RedisError, OSError):
            return None
        return event_id

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.aclose()
