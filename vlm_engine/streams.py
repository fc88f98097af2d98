"""Events of requests on their way to their readers, shared by both clients of the engine."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from vlm_engine.request import TokenEvent


class Stream:
    """Events of one request; a slow reader gets them merged and never slows the engine."""

    def __init__(self) -> None:
        self._pending: TokenEvent | None = None
        self._ready = asyncio.Event()

    def push(self, event: TokenEvent) -> None:
        """Add an event; runs in the reader's event loop."""
        self._pending = event if self._pending is None else self._pending.merged(event)
        self._ready.set()

    async def pull(self) -> TokenEvent:
        """Everything since the last call as one event."""
        await self._ready.wait()
        self._ready.clear()
        event, self._pending = self._pending, None
        assert event is not None, "woken without an event"
        return event


class Streams:
    """The streams of all requests that run, by id."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def open(self, request_id: str) -> Stream:
        """Start the stream of a new request."""
        stream = self._streams[request_id] = Stream()
        return stream

    def close(self, request_id: str, stream: Stream) -> bool:
        """Forget a stream; returns whether its request had not ended."""
        if self._streams.get(request_id) is not stream:
            return False
        del self._streams[request_id]
        return True

    async def follow(self, request_id: str, stream: Stream) -> AsyncIterator[TokenEvent]:
        """Events of a stream to its last."""
        while True:
            event = await stream.pull()
            if event.is_last:
                self.close(request_id, stream)
            yield event
            if event.is_last:
                return

    def deliver(self, events: Iterable[TokenEvent]) -> None:
        """Hand the events of one step to their readers."""
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.push(event)

    def end_all(self, reason: str) -> None:
        """End every stream with an error event."""
        self.deliver([TokenEvent(name, finish_reason="error", error=reason) for name in self._streams])
