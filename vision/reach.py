"""Whether a camera's host or disk answers at all, asked so that nobody else waits for it."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar
from urllib.request import getproxies

from vision.errors import SourceUnreadable
from vision.urls import StreamUrl, is_stream, parse_stream_url

T = TypeVar("T")

_PORTS = {"rtsp": 554, "rtsps": 322, "http": 80, "https": 443, "rtmp": 1935, "rtmps": 443}


def check_reach(uri: str, timeout_s: float) -> None:
    """Connect to the host of a live stream and hang up; sources of other kinds are let through.

    why: a host that is switched off gives no answer at all. Whoever waits for one as long as for a slow
    camera repeats the question after 1, 2, 4 … seconds only (TCP); short connections see the host return.

    Args:
        uri: as for `vision.sources.open_source`.
        timeout_s: how long the host has.

    Raises:
        SourceUnreadable: no answer in that time. What else is wrong, opening tells better.
        SourceUnsupported: the address cannot be used.
    """
    url = parse_stream_url(uri) if is_stream(uri) else None
    if url is None or _goes_by_proxy(url):
        return
    try:
        with socket.create_connection((url.host.strip("[]"), url.port or _PORTS[url.scheme]), timeout_s):
            return
    except TimeoutError:
        raise SourceUnreadable(
            f"{url.shown} gave no answer for {timeout_s:g} s: check host and network"
        ) from None
    except OSError:
        return


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """What `call` returns, or raises; one that does not come back is left behind in a thread of its own.

    why: a file on a disk or a network drive that hangs holds whoever opens it for ever.

    Raises:
        TimeoutError: it did not come back in that time.
    """
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="within", daemon=True).start()
    return answer.result(timeout_s)


def _goes_by_proxy(url: StreamUrl) -> bool:
    return url.scheme.startswith("http") and bool({url.scheme, "http", "all"} & set(getproxies()))
