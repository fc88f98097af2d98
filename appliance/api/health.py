"""`/health`: how each part is doing and, where it is not well, why and what to do."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from starlette.requests import Request

from appliance.api.camera_bodies import reason_of
from appliance.api.services import Services, services_of
from appliance.describe_books import DescribeStats
from appliance.jobs import CameraStatus
from appliance.outputs.outbox import OutputStatus

router = APIRouter()

_LATE_S = 60.0


@router.get("/health")
async def get_health(request: Request) -> Response:
    """200 when the engine answers, else 503; the other parts are told, but do not decide.

    `reasons` has a sentence for each part that is not well. Whoever has no API key where one is needed gets
    the status only.
    """
    services = services_of(request)
    reason = "the server is shutting down" if services.is_closing else services.engine.unhealthy_reason
    queue, cameras, outputs = await asyncio.gather(
        _queue_health(services), services.cameras_now(), services.outputs_now()
    )
    is_unheard = cameras is None or any(status.is_unheard for status in cameras)
    is_degraded = "error" in queue or is_unheard or outputs is None or services.events.problem is not None
    status = "unhealthy" if reason else "degraded" if is_degraded else "ok"
    health: dict[str, Any] = {"status": status}
    if request.scope["state"]["is_trusted"]:
        health["reasons"] = [
            *([f"engine: {reason}"] if reason else []),
            *_queue_reasons(queue),
            *_camera_reasons(services, cameras),
            *([f"events: {problem}"] if (problem := services.events.problem) else []),
            *_output_reasons(outputs),
        ]
        health |= {"engine": _engine_health(services, reason), "queue": queue}
        health["cameras"] = {"error": "unknown"} if cameras is None else {s.name: s.state for s in cameras}
        health["outputs"] = {"error": "unknown"} if outputs is None else _each(outputs)
        if services.describe_stats is not None:
            health["describe"] = _describe_health(services.describe_stats())
    code = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
    return JSONResponse(health, code, {"Cache-Control": "no-store"})


def _each(outputs: Mapping[str, OutputStatus]) -> dict[str, Any]:
    return {name: asdict(status) for name, status in outputs.items()}


def _queue_reasons(queue: Mapping[str, Any]) -> Iterator[str]:
    if "error" in queue:
        yield f"queue: {queue['error']}: see that its Redis runs (redis.url)"
    if dead := queue.get("dead"):
        yield f"queue: {dead} jobs were given up: see 'appliance queue dead'"


def _camera_reasons(services: Services, cameras: Sequence[CameraStatus] | None) -> Iterator[str]:
    if cameras is None:
        yield "cameras: nothing is known of them: see that the queue's Redis runs (redis.url)"
    for status in cameras or ():
        reason = reason_of(status, services.camera_changes)
        if reason and status.state != "stopped":
            yield f"camera {status.name} is {status.state}: {reason}"


def _output_reasons(outputs: Mapping[str, OutputStatus] | None) -> Iterator[str]:
    if outputs is None:
        yield "events: their file does not answer: see the disk that it is on (events.path)"
    for name, status in (outputs or {}).items():
        if status.num_waiting and status.oldest_age_s > _LATE_S:
            waits = f"{status.num_waiting} messages wait, the oldest for {status.oldest_age_s:.0f} s"
            yield f"output {name}: {waits}: see that its receiver answers (appliance outputs status)"
        if status.num_dead:
            yield f"output {name}: {status.num_dead} messages were given up: see 'appliance outputs dead'"


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
