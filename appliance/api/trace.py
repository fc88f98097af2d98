"""`GET /v1/trace`: what the engine's newest steps did, for whoever wants to draw or explain them."""

import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from fastapi.responses import Response
from starlette.requests import Request

from appliance.api.errors import not_found
from appliance.api.services import services_of

router = APIRouter()


@router.get("/v1/trace")
async def get_trace(request: Request, first: Annotated[int, Query(ge=0, lt=2**63)] = 0) -> Response:
    """Some of the steps from number `first` on, oldest first; ask again behind the last one for more.

    `now_s` is the time of the answer on the clock of the steps. 404 when the engine records none.
    """
    steps = await services_of(request).engine.trace(first)
    if steps is None:
        raise not_found(
            "steps are not recorded: set engine.trace_steps, as in APPLIANCE_ENGINE__TRACE_STEPS=20000",
            code="trace_off",
        )
    content = {"object": "trace", "now_s": time.monotonic(), "steps": steps}
    return Response(msgspec.json.encode(content), media_type="application/json")
