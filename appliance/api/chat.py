"""`POST /v1/chat/completions`: OpenAI's shape, streamed or whole."""

import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from starlette.requests import Request

from appliance.api.answers import ChatAnswer
from appliance.api.bodies import read_body
from appliance.api.content import engine_messages
from appliance.api.schemas import ChatRequest, parse_chat
from appliance.api.services import Services, services_of
from appliance.api.streams import ClientWatch, EventStreamResponse
from vlm_engine import GenerationRequest, TokenEvent

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Continue a conversation. Whatever can be refused is refused before the first byte of an answer is sent.

    A client that goes away, in whatever phase, ends the request at the engine's next step.
    """
    services = services_of(request)
    async with aclosing(AsyncExitStack()) as resources:
        services.check_places()
        return await _respond(request, services, resources)


async def _respond(request: Request, services: Services, resources: AsyncExitStack) -> Response:
    """The whole answer, or a stream that has taken over `resources`."""
    async with AsyncExitStack() as held:
        chat, messages, watch = await _read(request, services, resources, held)
        sampling = await services.in_thread(chat.sampling)
        answer = ChatAnswer(chat, f"chatcmpl-{uuid.uuid4().hex}")
        wanted = GenerationRequest(answer.answer_id, messages, sampling, chat.urgency)
        events = services.engine.generate(wanted)
        resources.push_async_callback(_close, events)
        first = await watch.race(anext(events))
        # why: the engine has them by now, and nobody may hold pixels for as long as an answer takes.
        messages.clear()
    answer.check(first)
    steps = _watched(first, events, watch)
    headers = {"X-Request-Id": answer.answer_id}
    if chat.stream:
        return EventStreamResponse(answer.stream(steps), resources.pop_all(), headers)
    return JSONResponse(await answer.whole(steps), headers=headers)


async def _read(
    request: Request, services: Services, resources: AsyncExitStack, held: AsyncExitStack
) -> tuple[ChatRequest, list[dict[str, Any]], ClientWatch]:
    """The request without its messages, these for the engine, and who watches the client.

    `held` gets the room that the messages take until the engine has them.
    """
    with services.bodies.place() as place:
        body = await read_body(request, services.limits, place, services.limits.max_body_bytes)
        # why: whoever sends slowly, or never all of it, holds no place that somebody else could use
        resources.enter_context(services.chat_slot())
        watch = await resources.enter_async_context(ClientWatch(request.receive, services.end_of_chats))
        chat = await watch.race(services.in_thread(lambda: parse_chat(body)))
        services.check_model(chat.model)
        messages = await watch.race(engine_messages(chat.messages, services, held))
        return chat.model_copy(update={"messages": []}), messages, watch


async def _close(events: AsyncIterator[TokenEvent]) -> None:
    if isinstance(events, AsyncGenerator):
        await events.aclose()


async def _watched(
    first: TokenEvent, events: AsyncIterator[TokenEvent], watch: ClientWatch
) -> AsyncIterator[TokenEvent]:
    """`first` and what follows it; ends with `ClientGoneError` when nobody reads any more."""
    yield first
    while (event := await watch.race(anext(events, None))) is not None:
        yield event
