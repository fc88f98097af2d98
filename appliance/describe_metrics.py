"""The dispatcher's numbers in Prometheus' families."""

from collections.abc import Iterator
from functools import reduce
from operator import add

from prometheus_client.core import HistogramMetricFamily, Metric

from appliance.describe_books import LATENCY_BOUNDS, DescribeStats
from appliance.metric_families import PREFIX, buckets, counters, gauge
from vlm_engine.books import Histogram


def describe_families(stats: DescribeStats, *, per_camera: bool) -> Iterator[Metric]:
    """What became of the jobs that this program took, and how well it may describe now."""
    yield counters("descriptions", "Jobs that were taken, by what became of them", "outcome", stats.outcomes)
    yield counters("descriptions_made", "Descriptions, by what had given way", "rung", stats.by_rung)
    yield gauge("describe_level", "How far quality gave way, 0 is in full", stats.level)
    yield gauge("describe_max_level", "How far it may", stats.max_level)
    yield gauge("describe_wait_seconds", "How long frames wait for the engine", stats.wait_s)
    yield _latency(stats, per_camera=per_camera)


def _latency(stats: DescribeStats, *, per_camera: bool) -> HistogramMetricFamily:
    family = HistogramMetricFamily(
        f"{PREFIX}capture_to_description_seconds",
        "From a frame's capture to its description",
        labels=["camera"] if per_camera else [],
    )
    whole = reduce(add, stats.latency.values()) if stats.latency else Histogram(LATENCY_BOUNDS).snapshot()
    shown = [([camera], one) for camera, one in stats.latency.items()] if per_camera else [([], whole)]
    for labels, snapshot in shown:
        family.add_metric(labels, buckets(snapshot), snapshot.sum)
    return family
