"""What the handlers of one app share: its collaborators, its limits, its running chats."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import anyio
from anyio.to_thread import run_sync
from starlette.requests import Request

from appliance.api.errors import ApiError, clipped, not_found, unavailable, unknown_camera
from appliance.api.room import ByteRoom, Room
from appliance.board import ShownFrame
from appliance.clips import VideoLimits
from appliance.describe_books import DescribeStats
from appliance.events import EventStore
from appliance.images import ImageLimits
from appliance.jobs import CameraStatus
from appliance.logs import Complaints
from appliance.metrics import CameraTotals
from appliance.model_names import shown_model_name
from appliance.outputs.outbox import OutputStatus
from queues.errors import QueueError
from queues.types import QueueStatus
from vlm_engine import EngineStats, EngineStopped, GenerationRequest, StepTrace, TokenEvent

T = TypeVar("T")
QueueStatusReader = Callable[[], Awaitable[QueueStatus]]
DescribeStatsReader = Callable[[], DescribeStats]

_STATUS_TIMEOUT_S = 2.0
_COMPLAIN_EVERY_S = 10.0
_LOOK_EVERY_S = 0.05
_FAREWELL_S = 1.0
_BACK_AFTER_S = 10
# why: statuses are written about once a second, and so are frames that somebody looks at.
_MAX_BEHIND_S = 3.0
_NEW_S = 1.0
_NEWER_WITHIN_S = 1.0

logger = logging.getLogger(__name__)


class EngineClient(Protocol):
    """The engine as the API sees it: in this process or behind a socket."""

    @property
    def model_name(self) -> str:
        """What the model was loaded from: a folder or a hub name."""

    @property
    def unhealthy_reason(self) -> str | None:
        """Why requests do not move, or None."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        """An asynchronous generator of events; it refuses before the first, closing it aborts the request."""

    async def trace(self, first: int = 0) -> list[StepTrace] | None:
        """Recorded steps from number `first` on; None when the engine records none."""

    def stats(self) -> EngineStats:
        """The engine's books; raises `EngineStopped` when it was not started."""


class Cameras(Protocol):
    """The configured cameras as the API sees them."""

    async def statuses(self) -> Sequence[CameraStatus]:
        """How every camera is doing."""

    async def frame(self, name: str) -> ShownFrame | None:
        """A camera's newest frame; None when there is no such camera or no frame yet."""

    async def ask(self, camera: str) -> str | None:
        """Ask for a description of a camera's next frame; its event's id, None if nobody can be asked.

        Raises `AskedTooOftenError` when too many wait.
        """


class CameraChanges(Protocol):
    """What changes the cameras while they run; raises `CameraRefused` for what cannot be, `KeyError`."""

    @property
    def names(self) -> Sequence[str]:
        """The cameras that are wanted."""

    def settings_of(self, name: str) -> dict[str, Any]:
        """What holds for a camera, without its address."""

    def without_address(self, name: str, text: str) -> str:
        """A text about a camera that shows no more of its address than host and port."""

    async def add(self, name: str, keys: Mapping[str, Any]) -> None:
        """Take in a new camera."""

    async def change(self, name: str, keys: Mapping[str, Any]) -> None:
        """Change some keys of a camera."""

    async def remove(self, name: str) -> None:
        """End a camera."""


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """How much one client, and all of them together, may ask for.

    `max_chats` run or wait at once, beyond it they get a 503 before their body is read; one whose body is
    still on its way has no place yet, and is given up when that takes longer than `body_timeout_s`.
    `max_decodes` requests are parsed and their images decoded at once, in threads. The pictures of a request
    may have `max_pixels` together; `max_pixels_in_hand` of all requests are in memory until the engine has
    them, and `max_bytes_in_hand` of their bodies: more pixels wait, more bytes are refused (503). The
    settings of a camera may have `max_settings_bytes`.
    """

    max_chats: int = 64
    max_decodes: int = 4
    max_body_bytes: int = 32 * 2**20
    max_settings_bytes: int = 2**20
    body_timeout_s: float = 60.0
    max_bytes_in_hand: int = 256 * 2**20
    max_pixels: int = 100_000_000
    max_pixels_in_hand: int = 300_000_000
    max_images: int = 16
    max_videos: int = 4
    image: ImageLimits = field(default_factory=ImageLimits)
    video: VideoLimits = field(default_factory=VideoLimits)


class Services:
    """One app's collaborators; `request.app.state.services` for the handlers."""

    def __init__(
        self,
        engine: EngineClient,
        events: EventStore,
        cameras: Cameras,
        *,
        queue_status: QueueStatusReader | None,
        embedded_url: str | None,
        describe_stats: DescribeStatsReader | None,
        metrics_per_camera: bool,
        model_name: str | None,
        aliases: Sequence[str],
        limits: ApiLimits,
    ) -> None:
        self.engine = engine
        self.events = events
        self.cameras = cameras
        self.queue_status = queue_status
        self.embedded_url = embedded_url
        self.describe_stats = describe_stats
        self.camera_changes: CameraChanges | None = None
        self.num_failures: Mapping[str, int] = {}
        self.metrics_per_camera = metrics_per_camera
        self.camera_totals = CameraTotals()
        self.limits = limits
        self.model_names = (model_name or shown_model_name(engine.model_name), *aliases)
        self.started_at = int(time.time())
        self.num_chats = 0
        self.pixels = Room(limits.max_pixels_in_hand)
        self.bodies = ByteRoom(limits.max_bytes_in_hand)
        self.is_stopping = False
        self.is_closing = False
        self._end_of_chats: asyncio.Future[Exception] | None = None
        self.problems: dict[str, str] = {}
        self._complaints = Complaints(logger, _COMPLAIN_EVERY_S)
        self._decode_slots = anyio.CapacityLimiter(limits.max_decodes)

    def check_model(self, name: str) -> None:
        """Raises `ApiError` (404) when no model is served under `name`."""
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            raise not_found(
                f"the model '{clipped(name)}' is not served here; there is {served}", code="model_not_found"
            )

    def check_places(self) -> None:
        """Raises `ApiError` (503) when all places for chats are taken, or the server is about to end."""
        if self.is_closing:
            raise _shutting_down()
        if self.num_chats >= self.limits.max_chats:
            raise unavailable(f"all {self.limits.max_chats} places for chats are taken", code="overloaded")

    @contextmanager
    def chat_slot(self) -> Iterator[None]:
        """A place among the running chats; raises `ApiError` (503) at once when all are taken."""
        self.check_places()
        self.num_chats += 1
        try:
            yield
        finally:
            self.num_chats -= 1

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Run what would hold up the event loop; at most `max_decodes` at once."""
        return await run_sync(function, limiter=self._decode_slots)

    async def camera_frame(self, name: str) -> ShownFrame:
        """What a camera shows now; raises `ApiError`: 404 for an unknown one, 503 without a frame of now."""
        until = time.monotonic() + _NEWER_WITHIN_S
        status, frame = await self._shown_by(name)
        # why: nobody looked until now; the camera's worker hears that somebody does, and shows a newer one
        while _is_behind(status, frame, _NEW_S) and time.monotonic() < until:
            await asyncio.sleep(_LOOK_EVERY_S)
            status, frame = await self._shown_by(name)
        reason = _why_not_now(status, frame)
        if frame is None or reason:
            raise unavailable(f"the camera '{name}' {reason}", code="camera_not_ready")
        return frame

    async def _shown_by(self, name: str) -> tuple[CameraStatus, ShownFrame | None]:
        frame = await self.cameras.frame(name)
        statuses = {status.name: status for status in await self.cameras.statuses()}
        if name not in statuses:
            raise unknown_camera(name, statuses)
        return statuses[name], frame

    def engine_stats(self) -> EngineStats | None:
        """The engine's books, None before its start."""
        try:
            return self.engine.stats()
        except EngineStopped:
            return None

    async def queue_now(self) -> QueueStatus | None:
        """The queue's state; None when there is no queue or it does not answer within 2 s."""
        return await self._within_time(self.queue_status(), "queue") if self.queue_status else None

    async def cameras_now(self) -> Sequence[CameraStatus] | None:
        """The cameras' states; None when they are not known within 2 s."""
        return await self._within_time(self.cameras.statuses(), "cameras")

    async def outputs_now(self) -> Mapping[str, OutputStatus] | None:
        """How outputs stand, by name; None when the events' file does not tell within 2 s."""
        return await self._within_time(asyncio.to_thread(self.events.outbox.statuses), "outputs")

    async def _within_time(self, answer: Awaitable[T], what: str) -> T | None:
        """The answer, or None: who asks for the state must be told, not break with what is broken."""
        try:
            return await asyncio.wait_for(answer, _STATUS_TIMEOUT_S)
        except Exception as error:
            self.problems[what] = str(error) if isinstance(error, QueueError) else "does not answer"
            # why: whoever watches asks again and again, and the log has other things to tell.
            self._complaints.tell(what, "the state of the %s is unknown: %r", what, error)
            return None

    @property
    def end_of_chats(self) -> asyncio.Future[Exception]:
        """What running chats end with, once it is there."""
        if self._end_of_chats is None:
            self._end_of_chats = asyncio.get_running_loop().create_future()
        return self._end_of_chats

    async def end_chats(self, patience_s: float) -> int:
        """Take no new chat, let those that run come to their end, and end the others; how many these were."""
        self.is_closing = True
        await self._wait_for_chats(patience_s)
        num_left = self.num_chats
        self.end_of_chats.set_result(_shutting_down())
        await self._wait_for_chats(_FAREWELL_S)
        return num_left

    async def _wait_for_chats(self, patience_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self.num_chats:
                    await asyncio.sleep(_LOOK_EVERY_S)

    def stop(self) -> None:
        """End all event streams, so that the server can shut down; chats run to their end."""
        self.is_stopping = True
        self.events.wake_followers()


def _shutting_down() -> ApiError:
    return unavailable("the server is shutting down", code="shutting_down", retry_after_s=_BACK_AFTER_S)


def _why_not_now(status: CameraStatus, frame: ShownFrame | None) -> str | None:
    """Why a frame is not what the camera sees now; one that gives few frames may show an older one."""
    if frame is None:
        return "has no frame yet"
    if status.state != "running":
        return f"is {status.state}, its last frame is {frame.age_s:.0f} s old"
    if _is_behind(status, frame, _MAX_BEHIND_S):
        return f"was not heard of for {frame.age_s:.0f} s: its worker shows no newer frame"
    return None


def _is_behind(status: CameraStatus, frame: ShownFrame | None, seconds: float) -> bool:
    """Whether a camera that runs has seen more since the frame was shown, by so many seconds."""
    if status.state != "running":
        return False
    return frame is None or frame.age_s > seconds + (status.frame_age_s or 0.0)


def services_of(request: Request) -> Services:
    """The services of the app that answers `request`."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services
