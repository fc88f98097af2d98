"""`POST /v1/chat/completions`: OpenAI's shape, streamed or whole."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from starlette.requests import Request

from appliance.api.content import engine_messages
from appliance.api.errors import ApiError, engine_error, unavailable
from appliance.api.schemas import ChatRequest, parse_chat
from appliance.api.services import ApiLimits, Services, services_of
from appliance.api.streams import ClientGoneError, ClientWatch, EventStreamResponse, event_bytes
from vlm_engine import EngineError, GenerationRequest, TokenEvent, Usage

logger = logging.getLogger(__name__)
router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Continue a conversation. Whatever can be refused is refused before the first byte of an answer is sent.

    A client that goes away, in whatever phase, ends the request at the engine's next step.
    """
    services = services_of(request)
    async with aclosing(AsyncExitStack()) as resources:
        resources.enter_context(services.chat_slot())
        return await _respond(request, services, resources)


async def _respond(request: Request, services: Services, resources: AsyncExitStack) -> Response:
    """The whole answer, or a stream that has taken over `resources`."""
    body = await _read_body(request, services.limits)
    chat = await services.in_thread(lambda: parse_chat(body))
    services.check_model(chat.model)
    messages = await engine_messages(chat.messages, services)
    answer = _Answer(chat, f"chatcmpl-{uuid.uuid4().hex}")
    watch = await resources.enter_async_context(ClientWatch(request.receive))
    wanted = GenerationRequest(answer.answer_id, messages, chat.sampling(), chat.urgency)
    events = services.engine.generate(wanted)
    resources.push_async_callback(_close, events)
    first = await watch.race(anext(events))
    answer.check(first)
    steps = _watched(first, events, watch)
    headers = {"X-Request-Id": answer.answer_id}
    if chat.stream:
        return EventStreamResponse(answer.stream(steps), resources.pop_all(), headers)
    return JSONResponse(await answer.whole(steps), headers=headers)


async def _read_body(request: Request, limits: ApiLimits) -> bytes:
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            body = await _read_at_most(request, limits.max_body_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_timeout_s:g} s"
        raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="body_timeout") from None
    if body is None:
        message = f"the body has more than the {limits.max_body_bytes} bytes that are accepted"
        raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")
    return body


async def _read_at_most(request: Request, max_bytes: int) -> bytes | None:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        return None
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            return None
    return bytes(body)


async def _close(events: AsyncIterator[TokenEvent]) -> None:
    if isinstance(events, AsyncGenerator):
        await events.aclose()


async def _watched(
    first: TokenEvent, events: AsyncIterator[TokenEvent], watch: ClientWatch
) -> AsyncIterator[TokenEvent]:
    """`first` and what follows it; ends with `ClientGoneError` when nobody reads any more."""
    event = first
    while True:
        yield event
        if event.is_last:
            return
        event = await watch.race(anext(events))


@dataclass(slots=True)
class _Answer:
    """One answer in the making, and its JSON."""

    chat: ChatRequest
    answer_id: str
    created: int = field(default_factory=lambda: int(time.time()))
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    num_tokens: int = 0

    def check(self, event: TokenEvent) -> None:
        """Raises `ApiError` when the engine gave up on the request."""
        if event.finish_reason not in ("cancelled", "expired", "error"):
            return
        logger.error("request=%s ended: %s %s", self.answer_id, event.finish_reason, event.error)
        if event.finish_reason == "error":
            message = "the engine failed on this request; the server's log tells why"
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="engine_error")
        raise unavailable(f"the request was {event.finish_reason}", code=event.finish_reason)

    async def whole(self, events: AsyncIterator[TokenEvent]) -> dict[str, Any]:
        """The JSON of an answer that is not streamed; raises `ApiError` and `ClientGoneError`."""
        pieces = []
        async for event in events:
            self.check(event)
            self._count(event)
            pieces.append(event.text)
        message = {"role": "assistant", "content": "".join(pieces), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": event.finish_reason}
        return self._head("chat.completion", [choice]) | {"usage": self._usage()} | _timings(event)

    async def stream(self, events: AsyncIterator[TokenEvent]) -> AsyncIterator[bytes]:
        """The events of a streamed answer; a failure becomes an error event that no [DONE] follows."""
        yield self._chunk({"role": "assistant", "content": ""})
        try:
            async for event in events:
                self.check(event)
                self._count(event)
                if event.text or event.is_last or self.chat.is_usage_continuous:
                    yield self._chunk({"content": event.text} if event.text else {}, event)
        except ClientGoneError:
            return
        except Exception as error:
            yield _json_event(_in_stream(error).body)
            return
        if self.chat.is_usage_wanted:
            yield self._chunk(None, event)
        yield event_bytes(b"[DONE]")

    def _count(self, event: TokenEvent) -> None:
        self.num_tokens += len(event.token_ids)
        self.usage = event.usage or self.usage

    def _chunk(self, delta: dict[str, str] | None, event: TokenEvent | None = None) -> bytes:
        """One chunk; without `delta` it is the one behind the answer, for the token counts."""
        reason = event.finish_reason if event else None
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = self._head("chat.completion.chunk", [] if delta is None else [choice])
        if self.chat.is_usage_wanted:
            has_usage = delta is None or self.chat.is_usage_continuous
            chunk["usage"] = self._usage() if has_usage else None
        return _json_event(chunk | _timings(event))

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.chat.model}
        return head | {"choices": choices}

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        num_tokens = usage.completion_tokens or self.num_tokens
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": usage.prompt_tokens + num_tokens,
            "prompt_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "image_tokens": usage.image_tokens,
            },
        }


def _in_stream(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return engine_error(error)
    logger.exception("a stream failed", exc_info=error)
    message = "internal error, which the server's log explains"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="internal_error")


def _timings(event: TokenEvent | None) -> dict[str, Any]:
    """Our extension: where the time of a finished answer went, in milliseconds."""
    return {"timings": asdict(event.timings)} if event and event.timings else {}


def _json_event(content: dict[str, Any]) -> bytes:
    return event_bytes(json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode())
