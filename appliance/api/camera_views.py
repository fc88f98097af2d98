"""Cameras added, changed, paused and removed while they run; their addresses go in and never out."""

import json
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from starlette.requests import Request

from appliance.api.bodies import read_body
from appliance.api.camera_bodies import camera_body
from appliance.api.errors import ApiError, bad_request, not_found, unknown_camera
from appliance.api.services import CameraChanges, Services, services_of
from appliance.camera_control import CameraExists, CameraRefused

router = APIRouter()


@router.get("/v1/cameras/{name}")
async def get_camera(request: Request, name: str) -> dict[str, Any]:
    """How one camera is doing, and what holds for it, without its address; 404 for an unknown one."""
    return await _camera(services_of(request), name)


@router.post("/v1/cameras")
async def add_camera(request: Request) -> Response:
    """Take in a camera: `name` and the keys of `cameras.NAME` in the settings.

    400 names the key that is wrong, 409 says that the name is taken. Until the next start or SIGHUP only.
    """
    services = services_of(request)
    changes, keys = _changes(services), await _keys(request, services)
    name = keys.pop("name", None)
    if not isinstance(name, str):
        raise bad_request("name: has to be the name of the new camera", param="name")
    try:
        await changes.add(name, keys)
    except CameraExists as error:
        raise ApiError(HTTPStatus.CONFLICT, str(error), param=error.field, code="exists") from None
    except CameraRefused as error:
        raise _refused(error) from None
    return JSONResponse(await _camera(services, name), HTTPStatus.CREATED)


@router.patch("/v1/cameras/{name}")
async def change_camera(request: Request, name: str) -> dict[str, Any]:
    """Change some keys of a camera, `{"enabled": false}` to pause it; the others go on.

    What does not concern its stream (names, prompts, triggers, zones) changes while that goes on too.
    `null` takes away a zone, a line, or the filter or prompt of a class: `{"zones": {"porch": null}}`.
    """
    services = services_of(request)
    changes, keys = _changes(services), await _keys(request, services)
    try:
        await changes.change(name, keys)
    except CameraRefused as error:
        raise _refused(error) from None
    except KeyError:
        raise unknown_camera(name, changes.names) from None
    return await _camera(services, name)


@router.delete("/v1/cameras/{name}")
async def remove_camera(request: Request, name: str) -> dict[str, Any]:
    """End a camera; its events stay."""
    changes = _changes(services_of(request))
    try:
        await changes.remove(name)
    except KeyError:
        raise unknown_camera(name, changes.names) from None
    return {"name": name, "object": "camera", "deleted": True}


def _changes(services: Services) -> CameraChanges:
    if services.camera_changes is None:
        raise not_found("cameras cannot be changed here", code="cameras_fixed")
    return services.camera_changes


async def _keys(request: Request, services: Services) -> dict[str, Any]:
    with services.bodies.place() as place:
        body = await read_body(request, services.limits, place, services.limits.max_settings_bytes)
    try:
        keys = json.loads(body, object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(keys, dict):
        raise bad_request("body: has to be an object with the keys of a camera")
    return keys


async def _camera(services: Services, name: str) -> dict[str, Any]:
    statuses = {status.name: status for status in await services.cameras.statuses()}
    if name not in statuses:
        raise unknown_camera(name, statuses)
    return camera_body(statuses[name], services, has_settings=True)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return table


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _refused(error: CameraRefused) -> ApiError:
    text = str(error) if error.field is None else f"{error.field}: {error}"
    return bad_request(text, param=error.field, code="invalid_value")
