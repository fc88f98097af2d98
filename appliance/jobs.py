"""What travels through Redis between the vision worker and the front: jobs, their answers, camera status.

Machines read these, so they are `msgspec` structs; every field that a person reads has a unit in its name.
"""

from typing import Any, Literal

import msgspec

EventState = Literal["new", "update", "end"]


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one description went, in milliseconds."""

    queue_ms: float = 0.0
    preprocess_ms: float = 0.0
    encode_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """How well a description could be made: `level` 0 is in full, `rung` says what gave way last above it.

    The picture that the model got had `width` x `height` pixels, the text at most `max_tokens`; `is_cut` when
    it ended there.
    """

    level: int = 0
    rung: str = "full"
    width: int = 0
    height: int = 0
    max_tokens: int = 0
    is_cut: bool = False


class DescribeJob(msgspec.Struct, frozen=True, kw_only=True):
    """One observation that is worth a sentence: the frame, what the detector saw in it, and what to ask.

    `detections` has the keys of ultralytics' `Results.summary()` (name, class, confidence, box, track_id),
    boxes in pixels of the frame as it was captured (`width` x `height`); `image` is that frame as JPEG, maybe
    smaller. `prompt` is the instruction, without the line of detections, which is made from `detections`.
    `zones` are those that the track has been in, `earlier` are pictures of it from before, oldest first.
    `camera_name`, `zone_names` (of zones that have one) and `taken` say for people which camera and zones
    these are, and when the frame was taken. `crop` is the part of the frame that `image` shows (x1, y1, x2,
    y2), None for all of it. `has_context` says whether the model is told all that (None: as suits it),
    `has_snapshot` whether the picture is kept with the event. With `answer_schema` the answer has to be JSON
    of that schema. With `clip_fps` the pictures are frames of a video, so many a second, to models that read
    videos.
    """

    job_id: str
    camera: str
    source: str
    frame_index: int
    time_s: float
    captured_at: float
    track_id: int
    label: str
    reason: str
    detections: list[dict[str, Any]]
    width: int
    height: int
    prompt: str
    image: bytes
    zones: list[str] = []
    zone_names: dict[str, str] = {}
    earlier: list[bytes] = []
    camera_name: str = ""
    taken: str = ""
    crop: list[float] | None = None
    has_context: bool | None = None
    has_snapshot: bool = True
    answer_schema: dict[str, Any] | None = None
    clip_fps: float | None = None


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one `DescribeJob`, as it is stored, sent to readers and written by `replay`.

    `text` is `description` in JSON, and None when there is none; then `error` says why. An error is no text.
    `num_replaced` older frames waited and were replaced by this one.
    """

    job_id: str
    camera: str
    source: str
    frame_index: int
    time_s: float
    captured_at: float
    described_at: float
    track_id: int
    label: str
    reason: str
    detections: list[dict[str, Any]]
    prompt: str
    text: str | None = msgspec.field(default=None, name="description")
    error: str | None = None
    model: str = ""
    timings: Timings = Timings()
    quality: Quality = Quality()
    num_replaced: int = 0
    zones: list[str] = []

    @classmethod
    def of(
        cls,
        job: DescribeJob,
        *,
        prompt: str,
        described_at: float,
        text: str | None = None,
        error: str | None = None,
        model: str = "",
        timings: Timings | None = None,
        quality: Quality | None = None,
        num_replaced: int = 0,
    ) -> "Description":
        """The answer to `job`; `prompt` is the whole text that the model was given."""
        return cls(
            job_id=job.job_id,
            camera=job.camera,
            source=job.source,
            frame_index=job.frame_index,
            time_s=job.time_s,
            captured_at=job.captured_at,
            described_at=described_at,
            track_id=job.track_id,
            label=job.label,
            reason=job.reason,
            detections=job.detections,
            prompt=prompt,
            text=text,
            error=error,
            model=model,
            timings=timings or Timings(),
            quality=quality or Quality(),
            num_replaced=num_replaced,
            zones=job.zones,
        )


class EventChange(msgspec.Struct, frozen=True, kw_only=True):
    """How an event stands: it begins (`new`), its zones change (`update`), its track is gone (`end`).

    An event is one observation, and `event_id` is the id of its `DescribeJob`. Every change carries all that
    is known, so that the newest alone suffices; `num` counts them from 0, and a late one is told by it.
    `captured_at` and `detections` are of the frame that began it, `changed_at` is in unix seconds too. With
    an `error` it will have no description.
    """

    event_id: str
    num: int
    state: EventState
    camera: str
    frame_index: int
    time_s: float
    captured_at: float
    changed_at: float
    track_id: int
    label: str
    reason: str
    detections: list[dict[str, Any]]
    zones: list[str]
    error: str | None = None


CAMERA_STATES = (
    "connecting",
    "running",
    "stalled",
    "auth_failed",
    "not_found",
    "unsupported",
    "stopped",
    "ended",
)
"""`stalled` ran and is silent or away; `ended` is a recording at its end; the rest is what it says."""


class CameraStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How one camera is doing, written by the vision worker about once a second and read by the front.

    `state` is one of `CAMERA_STATES`, `num_frames` what the detector has seen, `dropped` what nobody will see
    by reason, `held_back` what was no reason for a description by what spoke against it, `num_openings` how
    often its stream began, `frame_age_s` the age of its newest frame, `begun_at` when the worker began with
    its settings (unix seconds, as `updated_at`). `open_events` are the ids of its events that have not ended;
    None from a worker that does not tell. `is_unheard`, which the front says, is for a worker gone or silent.
    `worker` names the process that wrote it, `life_id` is another one for each.
    """

    name: str
    state: str
    num_frames: int = 0
    num_detections: int = 0
    num_jobs: int = 0
    num_dropped: int = 0
    dropped: dict[str, int] = {}
    held_back: dict[str, int] = {}
    num_openings: int = 0
    fps: float = 0.0
    frame_age_s: float | None = None
    updated_at: float = 0.0
    begun_at: float = 0.0
    error: str | None = None
    open_events: list[str] | None = None
    is_unheard: bool = False
    worker: str = ""
    life_id: str = ""


def frame_key(camera: str) -> str:
    """The Redis key of a camera's newest frame: JPEG bytes that expire when the camera stops."""
    return f"appliance:frame:{camera}"


def status_key(camera: str) -> str:
    """The Redis key of a camera's `CameraStatus` as JSON, which expires when the worker dies."""
    return f"appliance:camera:{camera}"


def asked_key(camera: str) -> str:
    """The Redis key of a list of event ids: frames of the camera that somebody asked to have described."""
    return f"appliance:asked:{camera}"


def watched_key(camera: str) -> str:
    """The Redis key that is there while somebody looks at the camera's newest frame."""
    return f"appliance:watched:{camera}"


_job_encoder = msgspec.msgpack.Encoder()
_job_decoder = msgspec.msgpack.Decoder(DescribeJob)
_description_encoder = msgspec.json.Encoder()
_description_decoder = msgspec.json.Decoder(Description)
_change_decoder = msgspec.json.Decoder(EventChange)


def encode_job(job: DescribeJob) -> bytes:
    """A job as MessagePack (the JPEG stays bytes)."""
    return _job_encoder.encode(job)


def decode_job(body: bytes) -> DescribeJob:
    """The job in `body`; raises `msgspec.DecodeError` when it is none."""
    return _job_decoder.decode(body)


def encode_description(description: Description) -> bytes:
    """A description as one line of JSON, without the line's end."""
    return _description_encoder.encode(description)


def decode_description(body: bytes) -> Description:
    """The description in `body`; raises `msgspec.DecodeError` when it is none."""
    return _description_decoder.decode(body)


def encode_change(change: EventChange) -> bytes:
    """An event's change as one line of JSON, without the line's end."""
    return msgspec.json.encode(change)


def decode_change(body: bytes) -> EventChange:
    """The change in `body`; raises `msgspec.DecodeError` when it is none."""
    return _change_decoder.decode(body)
