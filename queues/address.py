"""Where a server is, as a URL says it: one server, or the master that a set of Sentinels names.

redis://[user:password@]host:6379/0            rediss:// is the same by TLS
unix:///run/valkey.sock
redis+sentinel://[user:password@]host:26379,host:26379/service[/0]?sentinel_password=…

What has a meaning in a URL (`@ / ? # : %`) is percent-encoded inside a user name or password. Options of TLS
are redis-py's: `?ssl_ca_certs=ca.pem&ssl_certfile=…&ssl_keyfile=…`.
"""

import inspect
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import redis
from redis.connection import parse_url

from queues.errors import ServerError

_SENTINEL = re.compile(r"(rediss?)\+sentinel://(.*)", re.DOTALL)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@/?#\s]+)(?::(\d{1,5}))?")
_KNOWN = {*inspect.signature(redis.Redis.__init__).parameters, "path"}
_SENTINEL_PORT = 26379
_FORM = "redis+sentinel://[user:password@]host[:port],host[:port]/service[/db]"
_PLAIN_FORM = "redis://[user:password@]host[:port][/db]"
_UNIX_FORM = "unix:///path"


@dataclass(frozen=True, slots=True)
class Address:
    """One server by `options` of redis-py, or with a `service` its master by these `sentinels`."""

    options: dict[str, Any] = field(repr=False)
    is_tls: bool = False
    service: str | None = None
    sentinels: tuple[tuple[str, int], ...] = ()
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)


def safe_url(url: str) -> str:
    """The URL without user, password and query, fit for logs and errors."""
    scheme, _, rest = url.partition("://")
    head = re.split(r"[?#]", rest, maxsplit=1)[0]
    if scheme == "unix" and head.startswith("/"):
        return f"{scheme}://{head}"
    tail = head.rpartition("@")[2]
    # why: an @ behind a ? or # may end a password in which they should have been encoded.
    is_clear = "@" not in rest[len(head) :] and all(map(_HOST.fullmatch, tail.partition("/")[0].split(",")))
    return f"{scheme}://{tail if is_clear or scheme == 'unix' else '(hidden)'}"


def parse_address(url: str) -> Address:
    """The address in `url`; raises `ServerError`, without any password in it, when there is none."""
    try:
        found = _SENTINEL.fullmatch(url)
        if _has_raw_password(url):
            raise ValueError("not encoded")
        if found:
            return _by_sentinel(found[1], found[2])
        return Address(_options(url), is_tls=url.startswith("rediss://"))
    except ValueError:
        # why: the library's own text repeats a part of the URL, which may be one of the password.
        form = _FORM if "+sentinel" in url else _UNIX_FORM if url.startswith("unix") else _PLAIN_FORM
        raise ServerError(
            f"the server's URL {safe_url(url)} cannot be read: it has to be {form}, "
            "where / ? # @ : in a password are %2F %3F %23 %40 %3A"
        ) from None


def _has_raw_password(url: str) -> bool:
    scheme, _, rest = url.partition("://")
    head = re.split(r"[?#]", rest, maxsplit=1)[0]
    return scheme != "unix" and ("@" in rest[len(head) :] or "/" in head.rpartition("@")[0])


def _options(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    is_database = parts.path.strip("/").isdecimal() or not parts.path.strip("/")
    # why: it takes port 0 for none, and a database that is no number for the first
    if parts.port == 0 or not (parts.path if parts.scheme == "unix" else is_database):
        raise ValueError("no port, or no database")
    options: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
    options.pop("connection_class", None)
    for name in options:
        if name not in _KNOWN:
            raise ServerError(f"the server's URL {safe_url(url)} has an unknown option {name}")
    host = options.get("host")
    if host is not None and not _HOST.fullmatch(f"[{host}]" if ":" in host else host):
        raise ValueError("no host")
    return options


def _by_sentinel(scheme: str, rest: str) -> Address:
    head, _, query = rest.partition("?")
    user, at, tail = head.rpartition("@")
    hosts, _, path = tail.partition("/")
    service, _, db = path.partition("/")
    if not service or (db and not db.isdecimal()):
        raise ValueError("no service")
    given = {name: values[0] for name, values in parse_qs(query).items()}
    sentinel_options = {name: given.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    options = _options(f"{scheme}://{user}{at}sentinel/{db}?{urlencode(given)}")
    del options["host"]
    return Address(
        options,
        is_tls=scheme == "rediss",
        service=service,
        sentinels=tuple(_host(text) for text in hosts.split(",")),
        sentinel_options={name: value for name, value in sentinel_options.items() if value},
    )


def _host(text: str) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    if not found or not 0 < int(found[2] or _SENTINEL_PORT) < 65536:
        raise ValueError("no host")
    return found[1].strip("[]"), int(found[2] or _SENTINEL_PORT)
