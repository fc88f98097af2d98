"""Every error leaves the API in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from appliance.api.streams import ClientGoneError
from appliance.events import EventStoreError
from queues.errors import QueueError
from vlm_engine import EngineBusy, EngineError, ImageRejected, PromptTooLong, RequestError

logger = logging.getLogger(__name__)

_CLIENT_CLOSED_REQUEST = 499
_MAX_TOLD = 100


class ApiError(Exception):
    """An answer that is an error.

    `param` names the field of the request, for example `messages[0].content[1].image_url`; `code` is a
    word for programs, `retry_after_s` goes into the headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            # why: the OpenAI SDK reads milliseconds, everybody else the standard header
            self.headers |= {"Retry-After": str(retry_after_s), "Retry-After-Ms": str(1000 * retry_after_s)}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that is sent."""
        kind = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer, for those outside of the app's error handling."""
        return JSONResponse(self.body, self.status, self.headers)


def clipped(text: str) -> str:
    """What a client sent, short enough to be told back."""
    return text if len(text) <= _MAX_TOLD else f"{text[:_MAX_TOLD]}…"


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request as it stands can never be answered."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def not_found(message: str, *, code: str | None = None) -> ApiError:
    """A 404 for something that the URL or the body names."""
    return ApiError(HTTPStatus.NOT_FOUND, message, code=code)


def unknown_camera(name: str, known: Iterable[str]) -> ApiError:
    """A 404 for a camera that is none of those that are `known`."""
    text = f"there is no camera '{clipped(name)}'; cameras: {', '.join(sorted(known)) or 'none'}"
    return not_found(text, code="camera_not_found")


def unavailable(message: str, *, code: str, retry_after_s: int = 1) -> ApiError:
    """A 503: the same request may succeed after `retry_after_s`."""
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code=code, retry_after_s=retry_after_s)


def invalid_body(error: ValidationError) -> ApiError:
    """A 400 out of pydantic's complaints: the first one, and how many more there are."""
    return _invalid(error.errors(include_url=False, include_input=False))


def engine_error(error: EngineError) -> ApiError:
    """The engine's refusals as 400, anything else as 503: the same request may succeed later."""
    if isinstance(error, RequestError):
        codes = {PromptTooLong: "context_length_exceeded", ImageRejected: "invalid_image"}
        return bad_request(str(error), param=error.field, code=codes.get(type(error)))
    if isinstance(error, EngineBusy):
        return unavailable(str(error), code="engine_busy")
    logger.error("the engine refused a request: %s", error)
    return unavailable(f"the engine does not answer: {error}", code="engine_unavailable")


def install(app: FastAPI) -> None:
    """Put OpenAI's shape on everything that a handler of `app` may raise."""

    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    async def http_error(request: Request, error: HTTPException) -> Response:
        return _http_error(request, error).response()

    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        return _invalid(error.errors()).response()

    async def from_engine(_: Request, error: EngineError) -> Response:
        return engine_error(error).response()

    async def from_queue(_: Request, error: QueueError) -> Response:
        logger.warning("the queue does not answer: %s", error)
        return unavailable("the queue does not answer", code="queue_unavailable").response()

    async def from_events(_: Request, error: EventStoreError) -> Response:
        return unavailable(str(error), code="events_unavailable").response()

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    async def unexpected(_: Request, __: Exception) -> Response:
        message = "internal error, which the server's log explains"
        return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="internal_error").response()

    handlers: dict[type[Exception], Any] = {
        ApiError: api_error,
        HTTPException: http_error,
        RequestValidationError: validation_error,
        EngineError: from_engine,
        QueueError: from_queue,
        EventStoreError: from_events,
        ClientGoneError: gone,
        ClientDisconnect: gone,
        Exception: unexpected,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _http_error(request: Request, error: HTTPException) -> ApiError:
    path = clipped(request.url.path)
    texts = {
        HTTPStatus.NOT_FOUND: f"unknown request URL: {request.method} {path}",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{request.method} is not allowed on {path}",
    }
    message = texts.get(HTTPStatus(error.status_code), str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers)


def _invalid(problems: Sequence[Any]) -> ApiError:
    first = problems[0]
    location = [part for part in first["loc"] if part not in ("query", "path")]
    param = _dotted(location)
    message = first["msg"].removeprefix("Value error, ")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {message}", code="invalid_json")
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return bad_request(f"{param or 'body'}: {message}{more}", param=param, code=code)


def _dotted(location: Sequence[str | int]) -> str | None:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{clipped(part)}" for part in location)
    return text.removeprefix(".") or None
