"""The app factory."""

from collections.abc import Mapping, Sequence

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from appliance import __version__
from appliance.api import ask_views, camera_views, chat, errors, event_views, health, metrics, trace, views
from appliance.api.access import AccessGuard, check_binding
from appliance.api.services import (
    ApiLimits,
    CameraChanges,
    Cameras,
    DescribeStatsReader,
    EngineClient,
    QueueStatusReader,
    Services,
)
from appliance.events import EventStore
from appliance.settings import ServerSettings


def create_app(
    engine: EngineClient,
    events: EventStore,
    cameras: Cameras,
    settings: ServerSettings,
    *,
    queue_status: QueueStatusReader | None = None,
    embedded_url: str | None = None,
    describe_stats: DescribeStatsReader | None = None,
    model_name: str | None = None,
    aliases: Sequence[str] = (),
    limits: ApiLimits | None = None,
) -> FastAPI:
    """The HTTP API over its collaborators, which stay the caller's to start and close.

    The model is served as `model_name` (None: the last part of a folder, or the hub name) and under
    `aliases`. Raises `UnsafeBindingError` when `settings` would open it to a network without a key.
    """
    check_binding(settings)
    # why: FastAPI's own documentation pages load their scripts from elsewhere
    app = FastAPI(title="Vision appliance", version=__version__, docs_url=None, redoc_url=None)
    app.state.services = Services(
        engine,
        events,
        cameras,
        queue_status=queue_status,
        embedded_url=embedded_url,
        describe_stats=describe_stats,
        metrics_per_camera=settings.metrics_per_camera,
        model_name=model_name,
        aliases=aliases,
        limits=limits or ApiLimits(),
    )
    errors.install(app)
    for part in (ask_views, camera_views, chat, event_views, health, metrics, trace, views):
        app.include_router(part.router)
    app.mount("/assets", StaticFiles(directory=views.ASSETS), name="assets")
    app.add_middleware(AccessGuard, settings=settings)
    return app


def allow_camera_changes(app: FastAPI, changes: CameraChanges) -> None:
    """Let clients of `app` add, change and remove cameras, which `changes` does."""
    services: Services = app.state.services
    services.camera_changes = changes


async def end_chats(app: FastAPI, patience_s: float) -> int:
    """Have `app` take no new chat; how many running ones had to be ended after `patience_s`."""
    services: Services = app.state.services
    return await services.end_chats(patience_s)


def show_failures(app: FastAPI, num_failures: Mapping[str, int]) -> None:
    """Let `/metrics` of `app` tell how often work beside it failed, by the name of the work."""
    services: Services = app.state.services
    services.num_failures = num_failures
