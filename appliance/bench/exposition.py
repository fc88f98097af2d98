"""A server's `/metrics` before and after a run: what it says of itself.

Ours and vLLM's have the same names behind their prefixes where they mean the same, so one code reads both.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PREFIXES = ("appliance_", "vllm:")
Samples = Mapping[str, list[tuple[Mapping[str, str], float]]]


@dataclass(frozen=True, slots=True)
class Exposition:
    """The samples of one scrape by name, without the server's prefix, which is `prefix`."""

    prefix: str
    samples: Samples

    @classmethod
    def parse(cls, text: str) -> "Exposition | None":
        """The samples of a text in Prometheus' format; None when it is none, or of an unknown server."""
        try:
            found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        except (ValueError, KeyError, IndexError):
            return None
        prefix = next((p for p in PREFIXES for sample in found if sample.name.startswith(p)), None)
        if prefix is None:
            return None
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for sample in found:
            if sample.name.startswith(prefix):
                samples.setdefault(sample.name.removeprefix(prefix), []).append((sample.labels, sample.value))
        return cls(prefix, samples)

    @property
    def is_ours(self) -> bool:
        """Whether the server is an appliance."""
        return self.prefix == PREFIXES[0]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of the samples with these labels; None without any."""
        values = [value for own, value in self.samples.get(name, ()) if labels.items() <= own.items()]
        return sum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The values of `name` by one of its labels."""
        return {own[label]: value for own, value in self.samples.get(name, ()) if label in own}


@dataclass(frozen=True, slots=True)
class Growth:
    """What a server counted from one scrape to the next."""

    before: Exposition
    after: Exposition

    def of(self, name: str, **labels: str) -> float | None:
        """By how much a counter grew; None when there is none."""
        last = self.after.total(name, **labels)
        return None if last is None else last - (self.before.total(name, **labels) or 0.0)

    def mean_ms(self, name: str, **labels: str) -> float | None:
        """The mean of the histogram `name` in milliseconds; None when nothing was counted."""
        seconds, number = self.of(f"{name}_sum", **labels), self.of(f"{name}_count", **labels)
        return round(1e3 * seconds / number, 2) if number and seconds is not None else None

    def by_label(self, name: str, label: str) -> dict[str, int]:
        """How often what was counted under each value of a label, without what was not."""
        before = self.before.by_label(name, label)
        grown = {key: value - before.get(key, 0) for key, value in self.after.by_label(name, label).items()}
        return {key: round(value) for key, value in grown.items() if value}


_MEANS = (
    ("ttft_ms", "time_to_first_token_seconds"),
    ("itl_ms", "inter_token_latency_seconds"),
    ("queue_ms", "request_queue_time_seconds"),
    ("encode_ms", "request_encode_time_seconds"),
    ("prefill_ms", "request_prefill_time_seconds"),
    ("decode_ms", "request_decode_time_seconds"),
)
"""Key of the result, and the histogram that tells its mean."""
_COUNTS = ("floor_overruns", "chat_overruns", "detector_overruns")


def server_report(growth: Growth) -> dict[str, Any]:
    """What the server says of a run, ready for JSON; keys that it does not know are left out."""
    report: dict[str, Any] = {"chat" if growth.after.is_ours else "all": _means(growth, "chat")}
    if growth.after.is_ours:
        report["frame"] = _means(growth, "frame")
        report["cost_model"] = dict(_predictions(growth))
        report["stalls"] = growth.by_label("stalls_total", "reason")
        report["preemptions"] = growth.by_label("num_preemptions_total", "reason")
        report["overruns"] = {name: round(n) for name in _COUNTS if (n := growth.of(f"{name}_total"))}
    elif (preempted := growth.of("num_preemptions_total")) is not None:
        report["preemptions"] = {"any": round(preempted)}
    return report


def _means(growth: Growth, name: str) -> dict[str, float]:
    labels = {"class": name} if growth.after.is_ours else {}
    means = {key: growth.mean_ms(metric, **labels) for key, metric in _MEANS}
    return {key: mean for key, mean in means.items() if mean is not None}


def _predictions(growth: Growth) -> Iterator[tuple[str, dict[str, float]]]:
    """By kind of work: time measured and predicted in the run, and the cost model's own error."""
    for work in ("step", "encode"):
        measured = growth.of("work_seconds_total", work=work, source="measured")
        predicted = growth.of("work_seconds_total", work=work, source="predicted")
        if measured and predicted is not None:
            yield (
                work,
                {
                    "measured_s": round(measured, 3),
                    "predicted_s": round(predicted, 3),
                    "relative_error": round(
                        growth.after.total("cost_model_relative_error", work=work) or 0, 4
                    ),
                    "residual_ms": round(
                        1e3 * (growth.after.total("cost_model_residual_seconds", work=work) or 0), 2
                    ),
                },
            )
