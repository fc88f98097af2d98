"""Server-sent events, and knowing when the client of a request has gone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


class ClientWatch:
    """Notices that the client has gone, in every phase of a request; an async context manager.

    With `end`, a request ends with the error that this future has, once it is there.

    # invariant: the request's body was read before, so that nothing but the disconnect can be received.
    """

    def __init__(self, receive: Receive, end: asyncio.Future[Exception] | None = None) -> None:
        self._receive = receive
        self._end = end

    async def __aenter__(self) -> Self:
        self._gone = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _end(self._gone)

    async def race(self, awaitable: Awaitable[T]) -> T:
        """The result of `awaitable`; raises `ClientGoneError`, and cancels it, when the client goes first."""
        step = asyncio.ensure_future(_awaited(awaitable))
        try:
            others = {self._gone} if self._end is None else {self._gone, self._end}
            await asyncio.wait({step, *others}, return_when=asyncio.FIRST_COMPLETED)
            if not step.done():
                raise self._end.result() if self._end and self._end.done() else ClientGoneError
            return step.result()
        finally:
            # invariant: nobody runs inside an iterator any more when it is closed
            await _end(step)

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


class EventStreamResponse(StreamingResponse):
    """`text/event-stream` that owns `resources` and closes them however the stream ends.

    # why: Starlette ends a stream whose client has gone by cancelling it in the middle of a step, or leaves
    # it to the garbage collector; our streams watch for that themselves and are always closed here.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        content: AsyncIterator[bytes],
        resources: AsyncExitStack,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        own = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(content, headers=own | dict(headers or {}))
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (ASGI)."""
        async with self._resources:
            await self.stream_response(send)


def event_bytes(data: bytes, *, event_id: int | None = None, name: str | None = None) -> bytes:
    """One event of a stream; `data` is JSON and therefore one line.

    One with a `name` is heard only by clients that listen for that name.
    """
    prefix = b"" if event_id is None else b"id: %d\n" % event_id
    if name is not None:
        prefix += b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (prefix, data)


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def _end(task: "asyncio.Task[T]") -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
