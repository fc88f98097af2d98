"""The course of each event while its track is in view: it begins, its zones change, it ends."""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from appliance.jobs import EventChange, EventState, encode_change
from appliance.observing import summary
from queues.errors import QueueError
from queues.producer import JobProducer
from vision.pipeline import FrameResult
from vision.types import Frame, Observation

logger = logging.getLogger(__name__)

GONE_S = 3.0
"""A track that was not seen for so long, by the frames' time, is gone: a tracker keeps it for less."""

MAX_UNTOLD = 1000


@dataclass(slots=True)
class _Course:
    newest: EventChange
    seen_s: float
    seen_at: float


class Courses:
    """The events of all cameras whose track is still there; gives the changes that are to be told."""

    def __init__(self) -> None:
        self._open: dict[str, list[_Course]] = {}

    @property
    def num_open(self) -> int:
        """Events that have not ended."""
        return sum(map(len, self._open.values()))

    def open_events(self, camera: str) -> list[str]:
        """The ids of the camera's events that have not ended."""
        return [course.newest.event_id for course in self._open.get(camera, ())]

    def begin(
        self, observation: Observation, event_id: str, error: str | None = None
    ) -> Iterator[EventChange]:
        """An observation becomes an event; one that is of no track ends at once.

        `error` says why it will not be described.
        """
        frame = observation.frame
        change = EventChange(
            event_id=event_id,
            num=0,
            state="new",
            camera=frame.camera,
            frame_index=frame.index,
            time_s=round(frame.time_s, 3),
            captured_at=frame.captured_at,
            changed_at=frame.captured_at,
            track_id=observation.track_id,
            label=observation.label,
            reason=observation.reason,
            detections=summary(observation),
            zones=list(observation.zones),
            error=error,
        )
        yield change
        course = _Course(change, frame.time_s, frame.captured_at)
        if observation.track_id:
            self._open.setdefault(frame.camera, []).append(course)
        else:
            yield _next(course, "end")

    def see(self, result: FrameResult) -> Iterator[EventChange]:
        """The next frame of a camera: tracks that came into a zone, tracks that are gone."""
        courses = self._open.get(result.frame.camera)
        if not courses:
            return
        ids = result.detections.track_ids
        where = dict(zip([] if ids is None else ids.tolist(), result.where, strict=True))
        for course in list(courses):
            if place := where.get(course.newest.track_id):
                yield from _seen(course, result.frame, list(place.entered))
            elif not 0 <= result.frame.time_s - course.seen_s <= GONE_S:
                courses.remove(course)
                yield _next(course, "end")

    def end(self, camera: str) -> Iterator[EventChange]:
        """All tracks of a camera are gone: its stream is away, or it is stopped."""
        for course in self._open.pop(camera, []):
            yield _next(course, "end")

    def end_all(self) -> Iterator[EventChange]:
        """The same for every camera."""
        for camera in list(self._open):
            yield from self.end(camera)


class Teller:
    """Tells changes to whoever follows them; what cannot be told is told later, the newest `MAX_UNTOLD`."""

    def __init__(self, producer: JobProducer) -> None:
        self._producer = producer
        self._untold: deque[EventChange] = deque(maxlen=MAX_UNTOLD)

    def tell(self, changes: Iterator[EventChange]) -> None:
        """Tell them, after those that were left; never raises for an outage."""
        self._untold.extend(changes)
        while self._untold:
            change = self._untold[0]
            try:
                self._producer.tell(change.event_id, change.camera, encode_change(change))
            except QueueError as error:
                logger.debug("event=%s was not told: %s", change.event_id, error)
                return
            self._untold.popleft()


def _seen(course: _Course, frame: Frame, entered: list[str]) -> Iterator[EventChange]:
    course.seen_s, course.seen_at = frame.time_s, frame.captured_at
    if entered != course.newest.zones:
        yield _next(course, "update", entered)


def _next(course: _Course, state: EventState, zones: list[str] | None = None) -> EventChange:
    last = course.newest
    course.newest = msgspec.structs.replace(
        last,
        num=last.num + 1,
        state=state,
        changed_at=course.seen_at,
        zones=last.zones if zones is None else zones,
    )
    return course.newest
