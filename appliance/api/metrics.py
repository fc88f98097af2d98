"""`/metrics` for Prometheus; whoever may read the other pages may read it."""

import asyncio
from collections.abc import Iterable

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request

from appliance.api.services import Services, services_of
from appliance.describe_metrics import describe_families
from appliance.metric_families import counters
from appliance.metrics import (
    camera_families,
    engine_families,
    output_families,
    queue_families,
)

router = APIRouter()


class _Families(Collector):
    """Families that are ready, in the form that the exposition asks for."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


@router.get("/metrics")
async def get_metrics(request: Request) -> Response:
    """All numbers in Prometheus' text format; a part that does not answer is left out."""
    text = generate_latest(_Families(await _families(services_of(request))))
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST, "Cache-Control": "no-store"})


async def _families(services: Services) -> list[Metric]:
    queue, cameras, outputs = await asyncio.gather(
        services.queue_now(), services.cameras_now(), services.outputs_now()
    )
    stats = services.engine_stats()
    families: list[Metric] = []
    if stats is not None:
        families += engine_families(stats, is_up=services.engine.unhealthy_reason is None)
    if queue is not None:
        families += queue_families(queue)
    if cameras is not None:
        services.camera_totals.update(cameras)
        families += camera_families(cameras, services.camera_totals, per_camera=services.metrics_per_camera)
    if services.describe_stats is not None:
        families += describe_families(services.describe_stats(), per_camera=services.metrics_per_camera)
    if outputs is not None:
        families += output_families(outputs)
    families.append(
        counters("failures", "Times that work failed and began again", "work", services.num_failures)
    )
    return families
