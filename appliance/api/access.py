"""Who may talk to the API: whoever has the key or, without a key, programs on this machine only."""

import hmac
import ipaddress
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from appliance.api.errors import ApiError
from appliance.settings import ServerSettings

_OPEN_PATHS = ("/", "/health")
_OPEN_FOLDER = "/assets/"


class UnsafeBindingError(ValueError):
    """The server would listen to other machines without asking for a key."""


def check_binding(settings: ServerSettings) -> None:
    """Raises `UnsafeBindingError` when `settings` open the API to a network without an API key."""
    if not is_loopback(settings.host) and not settings.key:
        raise UnsafeBindingError(
            f"server.host is {settings.host!r}, which other machines can reach: set server.api_key "
            "(or APPLIANCE_SERVER__API_KEY), or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class AccessGuard:
    """ASGI middleware that lets requests through or answers 401 or 403.

    `scope["state"]["is_trusted"]` tells the handlers of open paths whether they may show details.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._key = settings.key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Guard one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = _foreign_page(headers) if self._key is None else self._wrong_key(headers, self._key)
        scope.setdefault("state", {})["is_trusted"] = refusal is None
        if refusal is not None and not (self._key and _is_open(scope["path"])):
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    @staticmethod
    def _wrong_key(headers: Headers, key: str) -> ApiError | None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # why: the bytes as they were sent, which headers are read from as Latin-1
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), key.encode()):
            return None
        return ApiError(
            HTTPStatus.UNAUTHORIZED,
            "an API key is needed: send it as 'Authorization: Bearer …'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _host(address: str) -> str:
    """The host of an address from a header, empty where that is none."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)


def _foreign_page(headers: Headers) -> ApiError | None:
    # why: without a key the browser of somebody on this machine is the way in: a page from elsewhere may
    # post here (Origin), or let its own name resolve to 127.0.0.1 and read everything (Host).
    origin = headers.get("origin")
    is_own_page = origin is None or is_loopback(_host(origin))
    if is_loopback(_host(f"//{headers.get('host', '')}")) and is_own_page:
        return None
    return ApiError(
        HTTPStatus.FORBIDDEN,
        "without server.api_key this server answers this machine only, under localhost or 127.0.0.1",
        code="foreign_host",
    )
