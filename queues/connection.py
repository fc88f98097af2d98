"""How clients connect: time-outs, the server's version, and Redis' errors in our words."""

import logging
from collections.abc import Mapping
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from queues.config import QueueConfig
from queues.errors import QueueError, QueueFull, QueueUnavailable, ServerError, ServerTooOld
from queues.outage import safe_url

logger = logging.getLogger("queues")

OLDEST_VERSION = (7, 0)
"""XAUTOCLAIM reports deleted entries from Redis 7.0 on; Valkey began at 7.2."""

UNREACHABLE = (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError, OSError)
"""Errors of the way to the server, or of one that is starting or switching roles: waiting may cure them."""


def connect(url: str, config: QueueConfig) -> redis.Redis:
    """A blocking client whose calls end within `command_timeout_s`; a stale connection is replaced once.

    why: RESP2, whose reply shapes are the same in redis-py 6 to 8.
    """
    return redis.Redis.from_url(
        url,
        protocol=2,
        socket_timeout=config.command_timeout_s,
        socket_connect_timeout=config.command_timeout_s,
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
    )


def connect_async(url: str, config: QueueConfig) -> redis.asyncio.Redis:
    """The same for asyncio."""
    return redis.asyncio.Redis.from_url(
        url,
        protocol=2,
        socket_timeout=config.command_timeout_s,
        socket_connect_timeout=config.command_timeout_s,
        retry=AsyncRetry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
    )


def connect_reader(url: str, config: QueueConfig) -> redis.asyncio.Redis:
    """A client for blocking reads, on a connection of its own.

    invariant: its socket waits longer than the server may block, else every idle read would be an error.
    """
    return redis.asyncio.Redis.from_url(
        url,
        protocol=2,
        socket_timeout=config.max_block_s + config.read_margin_s,
        socket_connect_timeout=config.command_timeout_s,
        max_connections=1,
        retry=AsyncRetry(NoBackoff(), 0),
    )


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
    where = safe_url(url)
    if isinstance(error, redis.exceptions.AuthenticationError | redis.exceptions.AuthorizationError):
        return ServerError(f"the server at {where} refuses the user name or password: {error}")
    if isinstance(error, redis.OutOfMemoryError):
        return QueueFull(f"the server at {where} is out of memory: {error}")
    if isinstance(error, UNREACHABLE):
        return QueueUnavailable(f"the queue at {where} cannot be reached: {error}")
    return QueueError(f"the queue at {where} answered: {error}")
