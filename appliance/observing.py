"""From observations to jobs for the model: what it is shown, and what it is told of it."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from appliance.jobs import DescribeJob, encode_job
from appliance.permits import permit_of
from appliance.prompts import DEFAULT_INSTRUCTION
from appliance.settings import Settings
from appliance.view_settings import ViewSettings
from queues.types import Job
from vision.annotate import encode_jpeg
from vision.pixels import shrink
from vision.types import Detections, Frame, Image, Observation

JPEG_QUALITY = 92

Box = NDArray[np.float32]


def make_job(
    observation: Observation,
    settings: Settings,
    *,
    job_id: str,
    source: str,
    is_live: bool,
    view: ViewSettings | None = None,
) -> Job:
    """The job that asks for a description of `observation`; one of a live camera expires.

    `view` None takes what the settings say of the frame's camera.
    """
    frame = observation.frame
    view = view or settings.view_of(frame.camera)
    taken = _taken(frame, is_live=is_live)
    crop = _crop_of(observation, view)
    side = settings.picture_side(view)
    body = DescribeJob(
        job_id=job_id,
        camera=frame.camera,
        source=source,
        frame_index=frame.index,
        time_s=round(frame.time_s, 3),
        captured_at=frame.captured_at,
        track_id=observation.track_id,
        label=observation.label,
        reason=observation.reason,
        detections=summary(observation),
        width=frame.width,
        height=frame.height,
        prompt=_instruction(observation, view, taken),
        image=_jpeg(frame.image, crop, side),
        zones=list(observation.zones),
        zone_names={name: one.friendly_name for name, one in view.zones.items() if one.friendly_name},
        earlier=_earlier(observation, view, side),
        clip_fps=1 / view.describe.image_interval if view.describe.images_as == "clip" else None,
        camera_name=view.friendly_name or frame.camera,
        taken=taken,
        crop=None if crop is None else [round(float(v), 1) for v in crop],
        has_context=view.describe.context,
        has_snapshot=view.snapshots.enabled,
        answer_schema=view.describe.answer_schema,
    )
    now = time.time()
    if not is_live:
        return Job(job_id, frame.camera, encode_job(body), now)
    max_age_s = settings.describe.max_age_s
    # why: a clock that is ahead of ours must not make a frame last longer; and behind a detector that takes
    # longer than that, every frame would be too old and nothing ever described.
    expires_at = max(min(frame.captured_at, now) + max_age_s, now + max_age_s / 2)
    slot = slot_of(observation, view.describe.replace)
    permit = permit_of(settings.cameras.get(frame.camera))
    return Job(job_id, frame.camera, encode_job(body), now, expires_at, slot, permit)


def slot_of(observation: Observation, replace: str) -> str | None:
    """What a newer observation has to share to take this one's place in the queue; None: nobody does.

    A frame that somebody asked for is never replaced.
    """
    if replace == "none" or observation.reason == "on_demand":
        return None
    camera = observation.frame.camera
    return camera if replace == "camera" else f"{camera}/{observation.track_id}"


def summary(observation: Observation) -> list[dict[str, Any]]:
    """The detections as they are told, with the zones of each where the camera has some."""
    rows = observation.detections.to_summary()
    if observation.zones_by_row:
        for row, zones in zip(rows, observation.zones_by_row, strict=True):
            row["zones"] = list(zones)
    return rows


def _instruction(observation: Observation, view: ViewSettings, taken: str) -> str:
    describe = view.describe
    text = describe.object_prompts.get(observation.label) or describe.prompt or DEFAULT_INSTRUCTION
    known = {
        "camera": view.friendly_name or observation.frame.camera,
        "label": observation.label,
        "zones": ", ".join(_zone_names(observation.zones, view)) or "no zone",
        "time": taken,
    }
    # why: not `format`, for a prompt may hold braces of its own, of JSON that is wanted
    for name, value in known.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _zone_names(zones: Sequence[str], view: ViewSettings) -> list[str]:
    return [view.zones[name].friendly_name or name if name in view.zones else name for name in zones]


def _taken(frame: Frame, *, is_live: bool) -> str:
    if is_live:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(frame.captured_at))
    minutes, seconds = divmod(frame.time_s, 60)
    return f"{minutes:.0f}:{seconds:04.1f} into the recording"


def _crop_of(observation: Observation, view: ViewSettings) -> Box | None:
    """The part of the frame around the object, None for the whole."""
    if view.describe.image == "frame":
        return None
    return _around(observation.frame, observation.detections, observation.track_id, view.describe.crop_margin)


def _around(frame: Frame, detections: Detections, track_id: int, margin: float) -> Box | None:
    """A track's box with a margin, a share of its longer side, within the frame; None without the track."""
    assert detections.track_ids is not None
    rows = np.flatnonzero(detections.track_ids == track_id)
    if not len(rows):
        return None
    box = detections.boxes[rows[0]]
    space = margin * float(np.max(box[2:] - box[:2]))
    box = box + np.array([-space, -space, space, space], np.float32)
    return np.asarray(np.clip(box, 0, [frame.width, frame.height] * 2), np.float32)


def _earlier(observation: Observation, view: ViewSettings, side: int) -> list[bytes]:
    """Pictures of the track from before, oldest first, cut as the newest is."""
    is_cropped, margin = view.describe.image == "crop", view.describe.crop_margin
    pictures = []
    for one in observation.earlier:
        crop = _around(one.frame, one.detections, observation.track_id, margin) if is_cropped else None
        pictures.append(_jpeg(one.frame.image, crop, side))
    return pictures


def _jpeg(image: Image, crop: Box | None, side: int) -> bytes:
    if crop is not None:
        (x1, y1), (x2, y2) = np.floor(crop[:2]).astype(int), np.ceil(crop[2:]).astype(int)
        image = image[y1 : max(y2, y1 + 1), x1 : max(x2, x1 + 1)]
    return encode_jpeg(shrink(image, side), JPEG_QUALITY)
