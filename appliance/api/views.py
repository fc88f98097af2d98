"""What can be looked at: models, cameras, and the status page."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response
from starlette.requests import Request

from appliance.api.camera_bodies import camera_body
from appliance.api.errors import not_found
from appliance.api.services import Services, services_of

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
