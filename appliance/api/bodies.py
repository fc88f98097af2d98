"""Reading request bodies that may be too large, or never end."""

import asyncio
from http import HTTPStatus

from starlette.requests import Request

from appliance.api.errors import ApiError, clipped
from appliance.api.room import BytePlace
from appliance.api.services import ApiLimits


async def read_body(request: Request, limits: ApiLimits, place: BytePlace, max_bytes: int) -> bytes:
    """The whole body of at most `max_bytes`, in its `place`.

    Raises `ApiError`: 415 for one that is compressed, 408 and 413 when it takes too long or has too many
    bytes, 503 when there is no room.
    """
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        message = f"a body with Content-Encoding {clipped(encoding)!r} is not read: send it as it is"
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="unsupported_encoding")
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            body = await _read_at_most(request, max_bytes, place)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_timeout_s:g} s"
        raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="body_timeout") from None
    if body is None:
        message = f"the body has more than the {max_bytes} bytes that are accepted"
        raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")
    return body


async def _read_at_most(request: Request, max_bytes: int, place: BytePlace) -> bytes | None:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        return None
    body = bytearray()
    async for piece in request.stream():
        if place.size + len(piece) > max_bytes:
            return None
        place.grow(len(piece))
        body += piece
    return bytes(body)
