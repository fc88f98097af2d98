"""`/v1/events`: what was described, as a list or as a stream that goes on."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from fastapi.responses import Response
from starlette.requests import Request

from appliance.api.errors import bad_request, clipped, not_found
from appliance.api.services import Services, services_of
from appliance.api.streams import KEEP_ALIVE, ClientGoneError, ClientWatch, EventStreamResponse, event_bytes
from appliance.events import EventFilter, Place, SearchError, StoredEvent

router = APIRouter()

_PARAMETERS = ("camera", "label", "zone", "q", "since", "until", "limit", "cursor", "named")
_MAX_LIMIT = 1000
_MAX_WORDS = 1000
_PAGE = 100
_KEEP_ALIVE_S = 15.0
_BATCH = 100
_RECONNECT_AFTER = b"retry: 2000\n\n"
_SNAPSHOT_HEADERS = {"Cache-Control": "private, max-age=3600"}


@router.get("/v1/events")
async def list_events(
    request: Request,
    camera: str | None = None,
    label: str | None = None,
    zone: str | None = None,
    q: Annotated[str | None, Query(max_length=_MAX_WORDS)] = None,
    since: str | None = None,
    until: str | None = None,
    limit: Annotated[int | None, Query(ge=1, le=_MAX_LIMIT)] = None,
    cursor: str | None = None,
    named: bool = False,
) -> Response:
    """Events by capture, newest first: at most `limit` (100), as `EventFilter` says.

    `q` are words to look for. Times are unix seconds or ISO 8601 (UTC unless it says otherwise).
    `next_cursor` of one page is the `cursor` of the next. With `Accept: text/event-stream` it is a stream of
    changes without end, oldest first: what follows `Last-Event-ID`, else the newest `limit` or everything
    `since` when one of them is given, then what is new. If they are to be `named`, `event:` says what changed
    last (`new`, `update`, `end`, `described`, `failed`); else all are messages without a name.
    """
    services = services_of(request)
    _check_names(request)
    times = _parse_time(since, "since"), _parse_time(until, "until")
    wanted = _checked(EventFilter(camera, label, *times, zone, q))
    if "text/event-stream" not in request.headers.get("accept", ""):
        return await _page(services, wanted, limit or _PAGE, cursor)
    past, seq = await _past(request.headers.get("last-event-id"), services, wanted, limit)
    resources = AsyncExitStack()
    watch = await resources.enter_async_context(ClientWatch(request.receive))
    return EventStreamResponse(_follow(services, wanted, past, seq, watch, is_named=named), resources)


@router.get("/v1/events/{event_id:path}/snapshot.jpg")
async def get_snapshot(request: Request, event_id: str) -> Response:
    """The picture that an event describes, or 404 when it is not kept (any longer)."""
    jpeg = await asyncio.to_thread(services_of(request).events.snapshot, event_id)
    if jpeg is None:
        raise not_found(f"there is no snapshot of an event '{clipped(event_id)}'", code="event_not_found")
    return Response(jpeg, media_type="image/jpeg", headers=_SNAPSHOT_HEADERS)


@router.get("/v1/events/{event_id:path}")
async def get_event(request: Request, event_id: str) -> Response:
    """One event, or 404."""
    event = await asyncio.to_thread(services_of(request).events.find, event_id)
    if event is None:
        raise not_found(f"there is no event '{clipped(event_id)}'", code="event_not_found")
    return Response(event.body, media_type="application/json")


def _checked(wanted: EventFilter) -> EventFilter:
    try:
        wanted.where()
    except SearchError as error:
        raise bad_request(f"q: {error}", param="q") from None
    return wanted


def _check_names(request: Request) -> None:
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in _PARAMETERS:
            known = ", ".join(_PARAMETERS)
            raise bad_request(f"{name}: is no parameter of /v1/events; it has {known}", param=name)
        if names.count(name) > 1:
            raise bad_request(f"{name}: is given twice", param=name)


async def _page(services: Services, wanted: EventFilter, limit: int, cursor: str | None) -> Response:
    before = None if cursor is None else _parse_cursor(cursor)
    events = await asyncio.to_thread(services.events.latest, wanted, limit + 1, before)
    page = events[:limit]
    body = {
        "object": "list",
        "data": [msgspec.Raw(event.body) for event in page],
        "next_cursor": f"{page[-1].captured_at!r}:{page[-1].born}" if len(events) > limit else None,
    }
    return Response(msgspec.json.encode(body), media_type="application/json")


def _parse_cursor(text: str) -> Place:
    captured_at, _, number = text.partition(":")
    born = _parse_number(number)
    try:
        seconds = float(captured_at)
    except ValueError:
        seconds = math.nan
    if born is None or not math.isfinite(seconds):
        raise bad_request("cursor: has to be the next_cursor of an earlier page", param="cursor")
    return seconds, born


def _parse_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def _parse_time(text: str | None, name: str) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
            seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            seconds = math.nan
    if not math.isfinite(seconds):
        raise bad_request(
            f"{name}: has to be unix seconds or ISO 8601 such as 2025-01-31T12:00:00Z", param=name
        )
    return seconds


async def _past(
    last_event_id: str | None, services: Services, wanted: EventFilter, limit: int | None
) -> tuple[list[StoredEvent], int]:
    """The events that a stream starts with, oldest first, and the number to go on from."""
    seq = await asyncio.to_thread(services.events.last_seq)
    if last_event_id is not None:
        resumed = _parse_number(last_event_id)
        if resumed is None:
            raise bad_request("Last-Event-ID: has to be the id of an earlier event of this stream")
        # why: a number that is yet to come is of another store, and nothing of this one was seen
        return [], resumed if resumed <= seq else 0
    if limit is None:
        return [], seq if wanted.since is None else 0
    past = (await asyncio.to_thread(services.events.newest, wanted, limit))[::-1]
    # why: what has changed since comes by itself
    return [event for event in past if event.seq <= seq], seq


async def _follow(
    services: Services,
    wanted: EventFilter,
    past: list[StoredEvent],
    seq: int,
    watch: ClientWatch,
    *,
    is_named: bool,
) -> AsyncIterator[bytes]:
    """`past`, then everything behind `seq` as it comes, until the client or the server goes."""
    store = services.events
    yield _RECONNECT_AFTER
    with store.changes() as changed:
        batch = past
        while not services.is_stopping:
            for event in batch:
                yield event_bytes(event.body, event_id=event.seq, name=event.kind if is_named else None)
                seq = max(seq, event.seq)
            changed.clear()
            batch = await asyncio.to_thread(store.after, seq, wanted, _BATCH)
            if batch:
                continue
            try:
                await watch.race(asyncio.wait_for(changed.wait(), _KEEP_ALIVE_S))
            except TimeoutError:
                yield KEEP_ALIVE
            except ClientGoneError:
                return
