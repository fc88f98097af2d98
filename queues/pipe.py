"""Several commands in one send, on connections of the client library but past its clients.

why: what a client does for each command (a look into the pool and at the socket, pieces sent apart, a clock
for each answer, its books) takes as long as a frame's whole way through the server.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import redis

Argument = str | bytes | int | float


def pack(commands: Sequence[Sequence[Argument]]) -> bytes:
    """Commands as the server reads them, to be sent at once."""
    parts: list[bytes] = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        for word in command:
            data = word if isinstance(word, bytes) else str(word).encode()
            parts += (b"$%d\r\n" % len(data), data, b"\r\n")
    return b"".join(parts)


def answers_of(replies: Sequence[Any]) -> list[Any]:
    """The answers to the commands of a transaction, of the replies to all that was sent for it.

    Raises the server's first refusal; then nothing was done, or, of a script, what it had done until then.
    """
    for reply in replies:
        if isinstance(reply, redis.RedisError):
            raise reply
    answers: list[Any] = replies[-1]
    for answer in answers:
        if isinstance(answer, redis.RedisError):
            raise answer
    return answers


async def exchange(connection: Any, commands: Sequence[Sequence[Argument]], within_s: float) -> list[Any]:
    """The answers to commands, by a connection of asyncio; raises `redis.RedisError`."""
    try:
        await connection.send_packed_command(pack(commands))
        async with asyncio.timeout(within_s):
            return [await connection.read_response(timeout=math.inf) for _ in commands]
    except TimeoutError as error:
        raise redis.TimeoutError(f"no answer within {within_s} s") from error
    except redis.ResponseError:
        # invariant: no answer is left behind for who comes next.
        await connection.disconnect(nowait=True)
        raise


class Pipe:
    """Holds one connection of a client's pool, of one thread in one process."""

    def __init__(self, client: redis.Redis) -> None:
        self._pool = client.connection_pool
        self._connection: Any = None

    def transaction(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Do all of these commands or none of them; a connection that was lost is replaced once.

        invariant: it may be done twice then, so the commands must be such that this changes nothing.
        """
        data = pack([("MULTI",), *commands, ("EXEC",)])
        try:
            return answers_of(self._exchange(data, len(commands) + 2))
        except redis.ConnectionError:
            return answers_of(self._exchange(data, len(commands) + 2))

    def close(self) -> None:
        """Give the connection back."""
        if self._connection:
            self._pool.release(self._connection)
            self._connection = None

    def _exchange(self, data: bytes, number: int) -> list[Any]:
        self._connection = connection = self._connection or self._pool.get_connection()
        try:
            # why: sending would connect too, but where it was last; this asks who is the master now.
            connection.connect()
            connection.send_packed_command([data])
            return [_reply(connection) for _ in range(number)]
        except BaseException:
            # invariant: no reply is left behind for who comes next.
            connection.disconnect()
            raise


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error
