"""Events as HTTP POSTs, signed (`appliance.outputs.signing`)."""

import asyncio
import os
import socket
import ssl
import time
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from urllib.parse import urlsplit

import httpx

from appliance.output_settings import WebhookSettings
from appliance.outputs.delivery import DeliveryError
from appliance.outputs.messages import told
from appliance.outputs.outbox import Message
from appliance.outputs.signing import signed_headers, signing_key

_MOST_READ = 64 * 1024
_LONGEST_WISH_S = 3600.0
_OUTAGES = {
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.PROXY_AUTHENTICATION_REQUIRED,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS,
}
"""Beside 5xx, what is refused whatever the message; other refusals are of one message."""


class Webhook:
    """One receiver; the connection is kept between messages. Close it with `close`.

    The URL is the operator's and may be anywhere, but the receiver cannot send the appliance elsewhere:
    redirects are not followed.
    """

    def __init__(self, settings: WebhookSettings) -> None:
        self.name = settings.name
        self.give_up_after_s = settings.give_up_after_s
        self._url = settings.url.get_secret_value()
        self._where = _safe(self._url)
        self._timeout_s = settings.timeout_s
        self._key = signing_key(settings.secret.get_secret_value()) if settings.secret else None
        headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
        self._http = httpx.AsyncClient(headers=headers, timeout=settings.timeout_s, follow_redirects=False)

    async def send(self, message: Message) -> None:
        """POST one message; anything but a 2xx in time is a `DeliveryError`."""
        body = told(message)
        headers = signed_headers(self._key, message.message_id, int(time.time()), body)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._http.stream("POST", self._url, content=body, headers=headers) as reply,
            ):
                await _drain(reply)
        except TimeoutError:
            text = f"{self._where} did not answer within {self._timeout_s:g} s"
            raise DeliveryError(text, is_outage=True) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # why: the text of the library's own errors may repeat the URL, and a URL may be a secret.
            text = f"{self._where} cannot be reached: {_reason(error)}"
            raise DeliveryError(text, is_outage=True) from None
        if not reply.is_success:
            raise DeliveryError(
                self._refusal(reply),
                is_outage=reply.is_server_error or reply.status_code in _OUTAGES,
                is_final=reply.status_code == HTTPStatus.GONE,
                again_in_s=_wish(reply),
            )

    async def rest(self, pause_s: float) -> None:
        """Wait so long: nobody says when the receiver is there again."""
        await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Close the connection."""
        await self._http.aclose()

    def _refusal(self, reply: httpx.Response) -> str:
        hint = ", and redirects are not followed: give the final URL" if reply.is_redirect else ""
        return f"{self._where} answered {reply.status_code}{hint}"


async def _drain(reply: httpx.Response) -> None:
    """Read a short answer to its end, so that the connection can be used again; a long one is cut."""
    num_read = 0
    async for chunk in reply.aiter_raw():
        num_read += len(chunk)
        if num_read > _MOST_READ:
            return


def _wish(reply: httpx.Response) -> float | None:
    """The seconds of `Retry-After`, a number or a date, within reason."""
    text = reply.headers.get("retry-after", "")
    if text.isascii() and text.isdecimal():
        return min(float(text), _LONGEST_WISH_S)
    try:
        wish_s = parsedate_to_datetime(text).timestamp() - time.time()
    except ValueError:
        return None
    return min(max(wish_s, 0.0), _LONGEST_WISH_S)


def _reason(error: Exception) -> str:
    """What the system says at the root of it."""
    root: BaseException = error
    while below := root.__cause__ or root.__context__:
        root = below
    if isinstance(root, ssl.SSLCertVerificationError):
        return f"its certificate: {root.verify_message}"
    if isinstance(root, ssl.SSLError):
        return f"no TLS: {root.reason}"
    if isinstance(root, socket.gaierror):
        return str(root.strerror)
    if isinstance(root, OSError) and root.errno:
        return os.strerror(root.errno)
    return type(error).__name__


def _safe(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
