"""The child of `own_engine`: the appliance's engine in its process, behind the appliance's own API."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace

from appliance.api import ApiServer, create_app
from appliance.events import EventStore
from appliance.jobs import CameraStatus
from appliance.ports import listen
from appliance.processes import EXIT_UNUSABLE
from appliance.settings import Settings, SettingsError, from_json
from appliance.tasks import StoppedError, run_beside, run_until
from vlm_engine import EngineProcess, GenerationRequest, TokenEvent
from vlm_engine.errors import EngineError


def child_main() -> None:
    """The child: settings as JSON on standard input, mistakes in one line."""
    settings = from_json(sys.stdin.read())
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        with listen(settings.server) as listener:
            asyncio.run(_serve(settings, listener))
    except (SettingsError, EngineError) as error:
        print(f"appliance: {error}", file=sys.stderr)
        sys.exit(EXIT_UNUSABLE)


async def _serve(settings: Settings, listener: socket.socket) -> None:
    """Serves until SIGTERM; the engine's process is gone when this returns."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    engine = _FramesBehindChats(settings.engine)
    try:
        with suppress(StoppedError):
            await run_until(stop, engine.start())
            app = create_app(engine, EventStore(), _NoCameras(), settings.server)
            server = ApiServer(app, settings.server)
            await run_beside(server.serve(sockets=[listener]), _end(server, stop))
    finally:
        await engine.close()


async def _end(server: ApiServer, stop: asyncio.Event) -> None:
    await stop.wait()
    server.should_exit = True


class _NoCameras:
    """The cameras of a server that has none."""

    async def statuses(self) -> Sequence[CameraStatus]:
        return ()

    async def ask(self, camera: str) -> str | None:
        return None

    async def frame(self, name: str) -> None:
        return None


class _FramesBehindChats(EngineProcess):
    """The engine with pictures as background work, which is what the appliance makes of camera frames."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        """As of every engine."""
        return super().generate(replace(request, priority="background") if _has_picture(request) else request)


def _has_picture(request: GenerationRequest) -> bool:
    contents = [message["content"] for message in request.messages]
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    return any(part["type"] == "image" for part in parts)
