"""Reading request bodies that may be too large, or never end."""

import asyncio
from http import HTTPStatus

from starlette.requests import Request

from appliance.api.errors import ApiError
from appliance.api.services import ApiLimits


async def read_body(request: Request, limits: ApiLimits) -> bytes:
    """The whole body; raises `ApiError` (408, 413) when it takes too long or has too many bytes."""
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            body = await _read_at_most(request, limits.max_body_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_timeout_s:g} s"
        raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="body_timeout") from None
    if body is None:
        message = f"the body has more than the {limits.max_body_bytes} bytes that are accepted"
        raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")
    return body


async def _read_at_most(request: Request, max_bytes: int) -> bytes | None:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        return None
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            return None
    return bytes(body)
