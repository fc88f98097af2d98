"""How clients connect: time-outs, the server's version, and Redis' errors in our words."""

import logging
from collections.abc import Mapping
from typing import Any, cast

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import MasterNotFoundError as AsyncMasterNotFoundError
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelConnectionPool
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from queues.address import Address, parse_address, safe_url
from queues.config import QueueConfig
from queues.errors import QueueError, QueueFull, QueueUnavailable, ServerRefuses, ServerTooOld

logger = logging.getLogger("queues")

OLDEST_VERSION = (7, 0)
"""XAUTOCLAIM reports deleted entries from Redis 7.0 on; Valkey began at 7.2."""

_LONGEST_LOOKUP_S = 1.0
_READ_SIZE = 2**18

CURABLE = (QueueUnavailable, QueueFull, ServerRefuses)
"""What may pass while the same call is made again, by itself or by the server's operator."""

_Kinds = tuple[type[Exception], ...]

# why: some errors have no class in the client library and are known by how they begin; what a script must
# not do is said by each server in words of its own.
_MEANINGS: tuple[tuple[_Kinds, tuple[str, ...], type[QueueError], str], ...] = (
    (
        (redis.exceptions.AuthenticationError, redis.exceptions.AuthorizationError),
        ("Protocol error: unauthenticated",),
        ServerRefuses,
        "the server at {} refuses the user name or password: {}",
    ),
    (
        (redis.exceptions.NoPermissionError,),
        ("ACL failure in script", "The user executing the script can't"),
        ServerRefuses,
        "the server at {} does not permit what the queue needs: {}",
    ),
    ((), ("MISCONF ",), ServerRefuses, "the server at {} does not write: {}"),
    ((redis.OutOfMemoryError,), (), QueueFull, "the server at {} is out of memory: {}"),
    (
        (MasterNotFoundError, AsyncMasterNotFoundError),
        (),
        QueueUnavailable,
        "the queue at {} cannot be reached: no Sentinel names a master",
    ),
    (
        (redis.ConnectionError, redis.TimeoutError, OSError),
        (),
        QueueUnavailable,
        "the queue at {} cannot be reached: {}",
    ),
    (
        (
            redis.ReadOnlyError,
            redis.exceptions.ClusterDownError,
            redis.exceptions.MasterDownError,
            redis.exceptions.TryAgainError,
        ),
        ("BUSY ", "NOREPLICAS ", "UNKILLABLE "),
        QueueUnavailable,
        "the queue at {} cannot be used now: {}",
    ),
)


class _MasterConnection(SentinelManagedConnection):
    """Leaves a server that fell silent.

    why: redis-py's blocking connection to a Sentinel's master is the only one that stays connected after a
    time-out: to a master that hangs, also when there is a new one, and to a reply that nobody waits for.
    """

    def read_response(self, *args: Any, **options: Any) -> Any:
        return super().read_response(*args, **{"disconnect_on_error": True} | options)


class _TlsMasterConnection(_MasterConnection, SentinelManagedSSLConnection):
    """The same by TLS."""


class _Master(redis.Redis):
    """A client of the master that Sentinels name; closes its ways to them too."""

    def close(self) -> None:
        super().close()
        pool = cast(SentinelConnectionPool, self.connection_pool)
        for sentinel in pool.sentinel_manager.sentinels:
            sentinel.close()


class _AsyncMaster(redis.asyncio.Redis):
    """The same for asyncio."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        pool = cast(AsyncSentinelConnectionPool, self.connection_pool)
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def connect(url: str, config: QueueConfig) -> redis.Redis:
    """A blocking client whose calls end within `command_timeout_s`; a stale connection is replaced once.

    Raises `ServerError` for a URL that is none.
    """
    timeout_s = config.command_timeout_s
    options = _times(timeout_s, timeout_s) | {"retry": Retry(NoBackoff(), 1, (redis.ConnectionError,))}
    address = parse_address(url)
    if address.service is None:
        return redis.Redis(**_plain(address) | options)
    lookups = _lookups(address, config) | {"retry": Retry(NoBackoff(), 0)}
    sentinel: Any = Sentinel(address.sentinels, sentinel_kwargs=lookups)  # type: ignore[no-untyped-call]
    options["connection_class"] = _TlsMasterConnection if address.is_tls else _MasterConnection
    managed = {name: value for name, value in _plain(address).items() if name != "ssl"}
    return cast(redis.Redis, sentinel.master_for(address.service, _Master, **managed | options))


def connect_async(url: str, config: QueueConfig) -> redis.asyncio.Redis:
    """The same for asyncio."""
    timeout_s = config.command_timeout_s
    retry = AsyncRetry(NoBackoff(), 1, (redis.ConnectionError,))
    return _connect_async(url, config, _times(timeout_s, timeout_s) | {"retry": retry})


def connect_reader(url: str, config: QueueConfig) -> redis.asyncio.Redis:
    """A client for blocking reads, on a connection of its own.

    invariant: its socket waits longer than the server may block, else every idle read would be an error.
    """
    times = _times(config.max_block_s + config.read_margin_s, config.command_timeout_s)
    return _connect_async(url, config, times | {"max_connections": 1, "retry": AsyncRetry(NoBackoff(), 0)})


def _connect_async(url: str, config: QueueConfig, options: dict[str, Any]) -> redis.asyncio.Redis:
    client = _new_async(parse_address(url), config, options)
    client.connection_pool.connection_kwargs["socket_read_size"] = _READ_SIZE
    return client


def _new_async(address: Address, config: QueueConfig, options: dict[str, Any]) -> redis.asyncio.Redis:
    if address.service is None:
        return redis.asyncio.Redis(**_plain(address) | options)
    lookups = _lookups(address, config) | {"retry": AsyncRetry(NoBackoff(), 0)}
    sentinel: Any = AsyncSentinel(address.sentinels, sentinel_kwargs=lookups)  # type: ignore[no-untyped-call]
    client = sentinel.master_for(address.service, _AsyncMaster, **_plain(address) | options)
    return cast(redis.asyncio.Redis, client)


def _times(read_s: float, connect_s: float) -> dict[str, Any]:
    # why: RESP2, whose reply shapes are the same in redis-py 6 to 8.
    return {"protocol": 2, "socket_timeout": read_s, "socket_connect_timeout": connect_s}


def _plain(address: Address) -> dict[str, Any]:
    options = dict(address.options)
    if "path" in options:
        options["unix_socket_path"] = options.pop("path")
    return options | ({"ssl": True, "ssl_check_hostname": True} | options if address.is_tls else {})


def _lookups(address: Address, config: QueueConfig) -> dict[str, Any]:
    """How Sentinels are asked: by TLS too where the servers are, soon given up, as there are others."""
    tls = {name: value for name, value in _plain(address).items() if name.startswith("ssl")}
    timeout_s = min(config.command_timeout_s, _LONGEST_LOOKUP_S)
    return tls | _times(timeout_s, timeout_s) | address.sentinel_options


def check_server(info: Mapping[str, Any], url: str) -> None:
    """Raise `ServerTooOld` unless the server of this INFO reply has what the queue needs.

    Warns when its memory policy may evict the queue's keys.
    """
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get("valkey_version") or info.get("redis_version") or "unknown")
    compatible = str(info.get("redis_version") or "0")
    numbers = tuple(int(part) for part in compatible.split(".")[:2] if part.isdigit())
    if numbers < OLDEST_VERSION:
        raise ServerTooOld(
            f"the server at {safe_url(url)} is {name} {version}; "
            "the queue needs Redis 7.0 or newer, or Valkey 7.2 or newer"
        )
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy.startswith("allkeys"):
        logger.warning(
            "the server at %s has maxmemory-policy %s and may evict queued jobs; use noeviction",
            safe_url(url),
            policy,
        )


def translate(error: Exception, url: str) -> QueueError:
    """One of our errors for one of Redis'; the address in it has no password."""
    if isinstance(error, redis.ConnectionError) and isinstance(error.__cause__, redis.RedisError):
        error = error.__cause__
    for kinds, beginnings, meaning, text in _MEANINGS:
        if isinstance(error, kinds) or str(error).startswith(beginnings):
            return meaning(text.format(safe_url(url), error))
    return QueueError(f"the queue at {safe_url(url)} answered: {error}")
