"""Whether a camera's host answers at all, asked cheaply between two attempts to open its stream."""

import socket
from urllib.request import getproxies

from vision.errors import SourceUnreadable
from vision.urls import StreamUrl, is_stream, parse_stream_url

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


def _goes_by_proxy(url: StreamUrl) -> bool:
    return url.scheme.startswith("http") and bool({url.scheme, "http", "all"} & set(getproxies()))
