"""Events of requests on their way to their readers, shared by both clients of the engine."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from vlm_engine.errors import EngineError
from vlm_engine.request import TokenEvent


class Stream:
    """Events of one request; a slow reader gets them merged and never slows the engine.

    Args:
        num_answers: How many answers the request wants.
    """

    def __init__(self, num_answers: int = 1) -> None:
        self.num_answers = num_answers
        self._pending: dict[int, TokenEvent] = {}
        self._open = set(range(num_answers))
        self._refusal: EngineError | None = None
        self._ready = asyncio.Event()

    def push(self, event: TokenEvent) -> None:
        """Add an event, unless its answer has ended; runs in the reader's event loop."""
        if event.index not in self._open:
            return
        if event.is_failure:
            self._open.clear()
        elif event.is_last:
            self._open.remove(event.index)
        before = self._pending.get(event.index)
        self._pending[event.index] = event if before is None else before.merged(event)
        self._ready.set()

    @property
    def is_open(self) -> bool:
        """Whether an answer has still to end."""
        return bool(self._open)

    def fail(self, request_id: str, reason: str) -> None:
        """End what has not ended with an error; what has is told to its reader as it is."""
        if self._open:
            index = min(self._open)
            self.push(
                TokenEvent(request_id, finish_reason="error", error=reason, index=index, is_unanswered=True)
            )

    def refuse(self, error: EngineError) -> None:
        """Tell the reader that its request was not queued."""
        self._refusal = error
        self._ready.set()

    async def pull(self) -> TokenEvent:
        """Everything about one answer since it was pulled last, as one event; raises why it was refused."""
        await self._ready.wait()
        if self._refusal is not None:
            raise self._refusal
        # why: a failure ends the request, and answers that are complete are to be read before it
        index = min(self._pending, key=lambda each: self._pending[each].is_failure)
        event = self._pending.pop(index)
        if not self._pending:
            self._ready.clear()
        return event


class Streams:
    """The streams of all requests that run, by id."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def open(self, request_id: str, num_answers: int = 1) -> Stream:
        """Start the stream of a new request."""
        stream = self._streams[request_id] = Stream(num_answers)
        return stream

    def close(self, request_id: str, stream: Stream) -> bool:
        """Forget a stream; returns whether its request had not ended."""
        if self._streams.get(request_id) is not stream:
            return False
        del self._streams[request_id]
        return True

    async def follow(self, request_id: str, stream: Stream) -> AsyncIterator[TokenEvent]:
        """Events of a stream until all its answers have ended."""
        num_open = stream.num_answers
        while num_open:
            event = await stream.pull()
            num_open = 0 if event.is_failure else num_open - event.is_last
            if not num_open:
                self.close(request_id, stream)
            yield event

    def deliver(self, events: Iterable[TokenEvent]) -> None:
        """Hand the events of one step to their readers."""
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.push(event)

    def refuse(self, request_id: str, error: EngineError) -> None:
        """End a stream whose request was not queued, by an exception in its reader."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.refuse(error)

    def end_all(self, reason: str) -> list[str]:
        """End every stream that has not ended with an error event; the ids of their requests."""
        ended = [name for name, stream in self._streams.items() if stream.is_open]
        for name in ended:
            self._streams[name].fail(name, reason)
        return ended
