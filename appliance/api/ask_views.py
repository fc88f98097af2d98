"""`POST /v1/cameras/{name}/describe`: what a camera shows now, described like any other event."""

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from starlette.requests import Request

from appliance.api.errors import ApiError, unavailable, unknown_camera
from appliance.api.services import services_of
from appliance.board import MAX_ASKED, AskedTooOftenError

router = APIRouter()

_COMES_BACK = ("connecting", "stalled", "auth_failed", "not_found")


@router.post("/v1/cameras/{name}/describe")
async def describe_camera(request: Request, name: str) -> Response:
    """202 with the id of the event in which the camera's next frame will be described.

    It is described whatever it shows and however lately another one was. 404 names the cameras that there
    are; 503 says that the camera gives no frames just now, or that as many wait as may; 409 that it will
    give none.
    """
    cameras = services_of(request).cameras
    states = {status.name: status.state for status in await cameras.statuses()}
    _check_running(name, states)
    try:
        event_id = await cameras.ask(name)
    except AskedTooOftenError:
        message = f"{MAX_ASKED} descriptions of the camera '{name}' are asked for already: try again"
        raise unavailable(message, code="overloaded") from None
    if event_id is None:
        raise unavailable("the queue does not answer: try again", code="queue_unavailable")
    body: dict[str, Any] = {
        "id": event_id,
        "object": "event",
        "camera": name,
        "url": f"/v1/events/{event_id}",
    }
    return JSONResponse(body, HTTPStatus.ACCEPTED)


def _check_running(name: str, states: dict[str, str]) -> None:
    if name not in states:
        raise unknown_camera(name, states)
    if states[name] in _COMES_BACK:
        raise unavailable(f"the camera '{name}' is {states[name]}: try again", code="camera_not_ready")
    if states[name] != "running":
        message = f"the camera '{name}' is {states[name]}, there is nothing to describe"
        raise ApiError(HTTPStatus.CONFLICT, message, code="camera_not_running")
