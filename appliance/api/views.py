"""What can be looked at: models, health, cameras, and the status page."""

import asyncio
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.requests import Request

from appliance.api.camera_bodies import camera_body
from appliance.api.errors import not_found
from appliance.api.services import Services, services_of
from appliance.describe_books import DescribeStats

ASSETS = Path(__file__).parent.parent / "assets"
# why: the page shows what a model wrote about what a camera saw; nothing of that may ever run
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_NO_STORE = {"Cache-Control": "no-store"}

router = APIRouter()


@router.get("/")
async def get_page() -> Response:
    """The status page; it asks for the API key by itself when there is one."""
    return FileResponse(ASSETS / "index.html", headers=_PAGE_HEADERS)


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The served model, then its other names."""
    services = services_of(request)
    return {"object": "list", "data": [_model(name, services) for name in services.model_names]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """One served model, or 404."""
    services = services_of(request)
    services.check_model(name)
    return _model(name, services)


@router.get("/health")
async def get_health(request: Request) -> Response:
    """200 when the engine answers, else 503 with the reason; queue and cameras are told, but do not decide.

    Whoever has no API key where one is needed gets the status only.
    """
    services = services_of(request)
    reason = services.engine.unhealthy_reason
    queue, cameras = await asyncio.gather(_queue_health(services), _camera_health(services))
    is_degraded = "error" in queue or "error" in cameras
    status = "unhealthy" if reason else "degraded" if is_degraded else "ok"
    health: dict[str, Any] = {"status": status}
    if request.scope["state"]["is_trusted"]:
        health |= {"engine": _engine_health(services, reason), "queue": queue, "cameras": cameras}
        if services.describe_stats is not None:
            health["describe"] = _describe_health(services.describe_stats())
    code = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
    return JSONResponse(health, code, _NO_STORE)


@router.get("/v1/cameras")
async def list_cameras(request: Request) -> dict[str, Any]:
    """How every camera is doing, in the order of the settings, without its address."""
    services = services_of(request)
    statuses = await services.cameras.statuses()
    return {"object": "list", "data": [camera_body(status, services) for status in statuses]}


@router.get("/v1/cameras/{name}/frame.jpg")
async def get_frame(request: Request, name: str) -> Response:
    """A camera's newest frame, `X-Frame-Age` seconds old; 404 for an unknown camera, 503 for none of now."""
    frame = await services_of(request).camera_frame(name)
    headers = {**_NO_STORE, "X-Frame-Age": f"{frame.age_s:.1f}"}
    return Response(frame.jpeg, media_type="image/jpeg", headers=headers)


@router.api_route("/v1/responses", methods=["POST"])
async def create_response() -> None:
    """Refused with a hint: OpenAI's newer API is not spoken here."""
    raise not_found("the Responses API is not served here: use chat completions, POST /v1/chat/completions")


def _model(name: str, services: Services) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": services.started_at,
        "owned_by": "vision-appliance",
        "root": services.model_names[0],
    }


async def _queue_health(services: Services) -> dict[str, Any]:
    if services.queue_status is None:
        return {"status": "none"}
    status = await services.queue_now()
    # why: the commands that an operator types find the embedded server by it; only our own user may connect.
    embedded = {"embedded_url": services.embedded_url} if services.embedded_url else {}
    if status is None:
        return embedded | {"error": services.problems["queue"]}
    problem = {"error": f"takes no jobs: {status.refusal}"} if status.refusal else {"status": "ok"}
    return embedded | problem | asdict(status)


async def _camera_health(services: Services) -> dict[str, Any]:
    statuses = await services.cameras_now()
    return {"error": "unknown"} if statuses is None else {status.name: status.state for status in statuses}


def _describe_health(stats: DescribeStats) -> dict[str, Any]:
    return {
        "level": stats.level,
        "max_level": stats.max_level,
        "rung": stats.rung,
        "wait_s": round(stats.wait_s, 2),
    }


def _engine_health(services: Services, reason: str | None) -> dict[str, Any]:
    health: dict[str, Any] = {"status": "unhealthy" if reason else "ok", "model": services.model_names[0]}
    if reason:
        health["reason"] = reason
    stats = services.engine_stats()
    if stats is not None:
        health |= {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "kv_cache_usage": round(stats.kv_cache_usage, 3),
        }
    return health
