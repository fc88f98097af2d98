"""Families of Prometheus made from plain numbers, under the appliance's prefix."""

from collections.abc import Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from vlm_engine import HistogramSnapshot

PREFIX = "appliance_"


def buckets(snapshot: HistogramSnapshot) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus wants them."""
    bounds = [*map(str, snapshot.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(snapshot.counts)), strict=True))


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """A number that goes up and down."""
    return GaugeMetricFamily(PREFIX + name, text, value)


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    """A number that only grows."""
    return CounterMetricFamily(PREFIX + name, text, value)


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    """Numbers that only grow, told apart by one label."""
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
