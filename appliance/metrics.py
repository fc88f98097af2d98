"""The appliance's numbers in Prometheus' families; names follow vLLM's where they mean the same.

`class` is `chat` for what people wait for and `frame` for descriptions. Times are in seconds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from appliance.jobs import CAMERA_STATES, CameraStatus
from appliance.metric_families import PREFIX, buckets, counter, counters, gauge
from appliance.outputs.outbox import OutputStatus
from appliance.turn_metrics import turn_families
from queues.types import QueueStatus
from vlm_engine import EngineStats
from vlm_engine.request import FinishReason, Priority

CLASS_NAMES: Mapping[Priority, str] = {"interactive": "chat", "background": "frame"}
PREEMPTION_REASONS = ("memory", "slots", "deadlock")

_LATENCIES = (
    ("inter_token_latency", "From one token of a request to its next", "inter_token"),
    ("time_to_first_token", "From a request's arrival to its first token", "first_token"),
    (
        "e2e_request_latency",
        "From a request's arrival to its end, of those that ended by themselves",
        "whole",
    ),
    ("request_queue_time", "From arrival to the first step that works for the request", "queue"),
    ("request_encode_time", "Spent in the vision encoder, of requests with images", "encode"),
    (
        "request_prefill_time",
        "From the first step to the first token, without the encoder's share",
        "prefill",
    ),
    ("request_decode_time", "From the first token to the end", "decode"),
)
"""Name, help, and the histogram of `ClassStats`; likewise below."""
_CLASS_GAUGES = (
    ("num_requests_running", "Requests that hold a place in the steps", "num_running"),
    ("num_requests_waiting", "Requests that wait for one", "num_waiting"),
)
_CLASS_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of requests that gave a token", "prompt_tokens"),
    ("prefix_cache_queries", "Prompt tokens that were looked for in the KV cache", "prompt_tokens"),
    ("prefix_cache_hits", "Prompt tokens that were found in the KV cache", "cached_tokens"),
    ("generation_tokens", "Tokens generated", "generation_tokens"),
)
_SPECULATION = (
    ("spec_decode_num_drafts", "Times that tokens were proposed for a request", "num_drafts"),
    ("spec_decode_num_draft_tokens", "Tokens proposed", "num_draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Proposed tokens that were right", "num_accepted_tokens"),
)
_QUEUE_GAUGES = (
    ("queue_depth", "Jobs that wait", "depth"),
    ("queue_pending", "Jobs in the hands of workers", "pending"),
    ("queue_dead", "Jobs among the dead letters", "dead"),
    ("queue_bytes", "Size of all jobs that wait or are pending", "num_bytes"),
    ("queue_oldest_age_seconds", "Age of the oldest job", "oldest_age_s"),
    ("queue_longest_wait_seconds", "Longest time that a camera has waited for its turn", "longest_wait_s"),
)
_QUEUE_COUNTERS = (
    ("queue_put", "Jobs put", "num_put"),
    ("queue_done", "Jobs answered", "num_done"),
    ("queue_retried", "Deliveries that failed and came again", "num_retried"),
    ("queue_duplicates", "Jobs refused since their id was known", "num_duplicates"),
)
_OUTPUT_GAUGES = (
    ("output_waiting", "Messages that an output has not taken yet", "num_waiting"),
    ("output_dead", "Messages that were given up", "num_dead"),
    ("output_oldest_age_seconds", "Age of the oldest message that waits", "oldest_age_s"),
)
_OUTPUT_COUNTERS = (
    ("output_sent", "Messages that an output has confirmed", "num_sent"),
    ("output_overflowed", "Messages given up since too many wait", "num_overflowed"),
)
_CAMERA_COUNTERS = (
    ("frames", "Frames that the detector has seen", "num_frames"),
    ("detections", "Detections", "num_detections"),
    ("jobs", "Observations that became jobs", "num_jobs"),
    ("camera_openings", "Times that a stream began", "num_openings"),
)
_DROPPED = "dropped."
_HELD_BACK = "held_back."


class CameraTotals:
    """Adds up the cameras' counts over restarts of the vision worker and gaps in its reports."""

    def __init__(self) -> None:
        self._last: dict[str, CameraStatus] = {}
        self._earlier: dict[str, Counter[str]] = {}

    def update(self, statuses: Iterable[CameraStatus]) -> None:
        """Take in what the worker said last; cameras of which it said nothing keep their counts."""
        for status in statuses:
            if not status.updated_at:
                continue
            last, earlier = self._last.get(status.name), self._earlier.setdefault(status.name, Counter())
            if last is not None and status.num_frames < last.num_frames:
                earlier.update(_counts(last))
            self._last[status.name] = status

    def counts(self) -> dict[str, Counter[str]]:
        """By camera, the counts of `CameraStatus` since this program's start."""
        return {name: self._earlier[name] + Counter(_counts(last)) for name, last in self._last.items()}


def engine_families(stats: EngineStats, *, is_up: bool) -> Iterator[Metric]:
    """What the engine says of itself."""
    yield gauge("engine_up", "Whether the engine answers", float(is_up))
    yield counter("engine_restarts", "Times that the engine was started again", stats.num_restarts)
    yield gauge("kv_cache_usage_perc", "Share of the KV blocks that are held, 0 to 1", stats.kv_cache_usage)
    yield gauge("kv_cache_used_blocks", "KV blocks that are held", stats.num_blocks - stats.num_free_blocks)
    yield gauge("kv_cache_blocks", "KV blocks", stats.num_blocks)
    usage = stats.num_encoder_tokens / stats.encoder_cache_tokens
    yield gauge("encoder_cache_usage_perc", "Share of the encoder cache that is filled, 0 to 1", usage)
    yield gauge("encoder_cache_used_tokens", "Image tokens in the encoder cache", stats.num_encoder_tokens)
    yield gauge("encoder_cache_tokens", "Image tokens that fit it", stats.encoder_cache_tokens)
    yield counter("engine_steps", "Steps computed", stats.num_steps)
    yield counter("encoded_images", "Images encoded", stats.num_encoded_images)
    yield from _reasons(stats)
    yield from _work_families(stats)
    yield from _class_families(stats)
    yield from turn_families(stats.turns)
    for name, text, field in _SPECULATION:
        yield counter(name, text, getattr(stats.speculation, field))


def queue_families(status: QueueStatus) -> Iterator[Metric]:
    """How the job queue is doing."""
    for name, text, field in _QUEUE_GAUGES:
        yield gauge(name, text, getattr(status, field))
    for name, text, field in _QUEUE_COUNTERS:
        yield counter(name, text, getattr(status, field))
    yield counters("queue_dropped", "Jobs dropped", "reason", status.dropped)


def camera_families(
    statuses: Sequence[CameraStatus], totals: CameraTotals, *, per_camera: bool
) -> Iterator[Metric]:
    """How the cameras are doing, together or (`per_camera`) each under its name."""
    states = Counter(status.state for status in statuses)
    family = GaugeMetricFamily(f"{PREFIX}cameras", "Cameras by state", labels=["state"])
    for state in CAMERA_STATES:
        family.add_metric([state], states[state])
    yield family
    by_camera = totals.counts()
    for name, text, field in _CAMERA_COUNTERS:
        if per_camera:
            yield counters(name, text, "camera", {camera: c[field] for camera, c in by_camera.items()})
        else:
            yield counter(name, text, sum(counts[field] for counts in by_camera.values()))
    for name, text, prefix in (
        ("frames_dropped", "Frames or observations that were given up", _DROPPED),
        ("held_back", "Tracks and frames that were no reason for a description", _HELD_BACK),
    ):
        yield _family_by_reason(name, text, prefix, by_camera, per_camera=per_camera)
    if per_camera:
        yield _per_camera_gauge(
            "camera_up", "Whether the camera runs", statuses, lambda s: s.state == "running"
        )
        yield _per_camera_gauge("camera_fps", "Frames a second", statuses, lambda s: s.fps)
        with_frames = [status for status in statuses if status.frame_age_s is not None]
        yield _per_camera_gauge(
            "camera_frame_age_seconds", "Age of the newest frame", with_frames, lambda s: s.frame_age_s
        )


def output_families(statuses: Mapping[str, OutputStatus]) -> Iterator[Metric]:
    """How webhooks and MQTT are doing."""
    for name, text, field in _OUTPUT_GAUGES:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["output"])
        for output, status in statuses.items():
            family.add_metric([output], getattr(status, field))
        yield family
    for name, text, field in _OUTPUT_COUNTERS:
        values = {output: getattr(status, field) for output, status in statuses.items()}
        yield counters(name, text, "output", values)


def _reasons(stats: EngineStats) -> Iterator[Metric]:
    counts = dict(stats.counts)
    text = "Least pieces of frames that were computed though they did not fit the allowance"
    yield counter("floor_overruns", text, counts.pop("floor_overruns", 0))
    yield counters("stalls", "Requests that got nothing in a step", "reason", counts)
    preemptions = {reason: stats.preemptions.get(reason, 0) for reason in PREEMPTION_REASONS}
    yield counters("num_preemptions", "Requests sent back to the queue", "reason", preemptions)


def _work_families(stats: EngineStats) -> Iterator[Metric]:
    kinds = {"step": stats.steps, "encode": stats.slices, "turn": stats.turns.work}
    total = CounterMetricFamily(
        f"{PREFIX}work_seconds",
        "Time of steps, of encoding and of detectors' turns",
        labels=["work", "source"],
    )
    last = GaugeMetricFamily(
        f"{PREFIX}work_last_seconds", "The same, the last time", labels=["work", "source"]
    )
    error = GaugeMetricFamily(
        f"{PREFIX}cost_model_relative_error", "Median error of the last 256 predictions", labels=["work"]
    )
    residual = GaugeMetricFamily(
        f"{PREFIX}cost_model_residual_seconds", "What plans keep free since predictions err", labels=["work"]
    )
    for name, work in kinds.items():
        total.add_metric([name, "measured"], work.total_ms / 1e3)
        total.add_metric([name, "predicted"], work.total_predicted_ms / 1e3)
        last.add_metric([name, "measured"], work.last_ms / 1e3)
        last.add_metric([name, "predicted"], work.last_predicted_ms / 1e3)
        error.add_metric([name], work.relative_error)
        residual.add_metric([name], work.residual_ms / 1e3)
    yield from (total, last, error, residual)
    if stats.allowance_ms is not None:
        yield gauge("step_allowance_seconds", "What the last step could take", stats.allowance_ms / 1e3)


def _class_families(stats: EngineStats) -> Iterator[Metric]:
    for name, text, field in _CLASS_GAUGES:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["class"])
        for priority, books in stats.classes.items():
            family.add_metric([CLASS_NAMES[priority]], getattr(books, field))
        yield family
    for name, text, field in _CLASS_COUNTERS:
        yield counters(name, text, "class", _by_class(stats, field))
    ends = CounterMetricFamily(
        f"{PREFIX}request_success", "Requests by how they ended", labels=["class", "finished_reason"]
    )
    for priority, books in stats.classes.items():
        for reason in get_args(FinishReason):
            ends.add_metric([CLASS_NAMES[priority], reason], books.finished.get(reason, 0))
    yield ends
    for name, text, field in _LATENCIES:
        histogram = HistogramMetricFamily(f"{PREFIX}{name}_seconds", text, labels=["class"])
        for label, snapshot in _by_class(stats, field).items():
            histogram.add_metric([label], buckets(snapshot), snapshot.sum)
        yield histogram


def _by_class(stats: EngineStats, field: str) -> dict[str, Any]:
    return {CLASS_NAMES[priority]: getattr(books, field) for priority, books in stats.classes.items()}


def _counts(status: CameraStatus) -> dict[str, int]:
    counts = {field: getattr(status, field) for _, _, field in _CAMERA_COUNTERS}
    counts |= {f"{_DROPPED}{reason}": num for reason, num in status.dropped.items()}
    return counts | {f"{_HELD_BACK}{reason}": num for reason, num in status.held_back.items()}


def _family_by_reason(
    name: str, text: str, prefix: str, by_camera: Mapping[str, Counter[str]], *, per_camera: bool
) -> CounterMetricFamily:
    labels = ["camera", "reason"] if per_camera else ["reason"]
    family = CounterMetricFamily(f"{PREFIX}{name}", text, labels=labels)
    groups = by_camera if per_camera else {"": sum(by_camera.values(), Counter())}
    for camera, counts in groups.items():
        for key, num in counts.items():
            if key.startswith(prefix):
                reason = key.removeprefix(prefix)
                family.add_metric([camera, reason] if per_camera else [reason], num)
    return family


def _per_camera_gauge(
    name: str, text: str, statuses: Iterable[CameraStatus], value: Any
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(PREFIX + name, text, labels=["camera"])
    for status in statuses:
        family.add_metric([status.name], float(value(status)))
    return family
