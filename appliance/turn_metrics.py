"""The turns of detectors on the engine's device, in Prometheus' families."""

from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily, Metric

from appliance.metric_families import PREFIX, buckets, counter, counters, gauge
from vlm_engine import TurnStats

_HISTOGRAMS = (
    ("detector_turn_wait", "From a detector's asking for the device to its turn", "wait"),
    ("detector_turn", "Turns of detectors: how long the steps waited for the device", "length"),
)
LOST_REASONS = ("expired", "died")


def turn_families(turns: TurnStats) -> Iterator[Metric]:
    """What detectors got of the engine's device."""
    yield gauge("detectors_connected", "Detectors that ask the engine for its device", turns.num_clients)
    yield counter("detector_turns", "Turns of detectors on the engine's device", turns.wait.num_values)
    yield counter("detector_batches", "Batches that detectors finished within turns", turns.num_rounds)
    text = "Turns given for the detectors' floor though they did not fit the allowance"
    yield counter("detector_floor_overruns", text, turns.counts.get("floor_overruns", 0))
    lost = {reason: turns.counts.get(reason, 0) for reason in LOST_REASONS}
    text = "Turns that were not given back: the lease had expired, or the detector died"
    yield counters("detector_turns_lost", text, "reason", lost)
    text = "Times that a detector went on since the engine did not answer"
    yield counter("detector_ungated", text, turns.counts.get("ungated", 0))
    for name, text, field in _HISTOGRAMS:
        snapshot = getattr(turns, field)
        family = HistogramMetricFamily(f"{PREFIX}{name}_seconds", text)
        family.add_metric([], buckets(snapshot), snapshot.sum)
        yield family
