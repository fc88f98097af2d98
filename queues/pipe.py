"""Several commands in one send, on connections of the client library but past its clients.

why: what a client does for each command (a look into the pool and at the socket, pieces sent apart, a clock
for each answer, its books) takes as long as a frame's whole way through the server.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import redis
from hiredis import pack_command

Argument = str | bytes | int | float


_BEGIN = ("MULTI",)
_LARGE = 2**14


def pack(commands: Sequence[Sequence[Argument]]) -> bytes:
    """Commands as the server reads them, to be sent at once; a large last word is copied once."""
    parts: list[bytes] = []
    for command in commands:
        # why: typed so, for the library's own types tell of one word only.
        words: Any = tuple(command)
        last = command[-1]
        if isinstance(last, bytes) and len(last) > _LARGE:
            # why: packed with an empty word in its place, which is six bytes at the end.
            words = (*words[:-1], b"")
            parts += (pack_command(words)[:-6], b"$%d\r\n" % len(last), last, b"\r\n")
        else:
            parts.append(pack_command(words))
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
        self._is_open = self._is_begun = False

    def begin(self) -> None:
        """Tell the server that a transaction comes; what fails here fails again there.

        why: a server that has slept takes as long to wake up as its caller to put the commands together.
        """
        if self._is_open and not self._is_begun:
            try:
                self._connection.send_packed_command([pack([_BEGIN])])
            except redis.RedisError:
                self._disconnect()
            else:
                self._is_begun = True

    def transaction(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Do all of these commands or none of them; a connection that was lost is replaced once.

        invariant: it may be done twice then, so the commands must be such that this changes nothing.
        """
        try:
            return answers_of(self._exchange(commands))
        except redis.ConnectionError:
            return answers_of(self._exchange(commands))

    def close(self) -> None:
        """Give the connection back."""
        if self._connection:
            if self._is_begun:
                self._disconnect()
            self._pool.release(self._connection)
            self._connection, self._is_open = None, False

    def _exchange(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        self._connection = connection = self._connection or self._pool.get_connection()
        try:
            if not self._is_open:
                # why: sending would connect too, but where it was last; this asks who is the master now.
                connection.connect()
            begin = [] if self._is_begun else [_BEGIN]
            connection.send_packed_command([pack([*begin, *commands, ("EXEC",)])])
            replies = [_reply(connection) for _ in range(len(commands) + 2)]
        except BaseException:
            # invariant: no reply is left behind for who comes next.
            self._disconnect()
            raise
        self._is_open, self._is_begun = True, False
        return replies

    def _disconnect(self) -> None:
        self._is_open = self._is_begun = False
        self._connection.disconnect()


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error
