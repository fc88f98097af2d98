"""The course of an event: what is told when, and what becomes of it in an outage."""

import numpy as np

from appliance.courses import Courses, Teller
from appliance.jobs import EventChange, decode_change
from queues import EmbeddedServer, JobProducer, ResultReader
from tests.queues.helpers import kill_server
from tests.vision.moving import Thing, detections, frame
from vision.pipeline import FrameResult
from vision.types import Observation
from vision.zones import Whereabouts


def result(index: int, *tracks: int, zones: tuple[str, ...] = ()) -> FrameResult:
    """Frame `index` of ten a second with these tracks, all of which have been in `zones`."""
    things = [Thing(0, 1000, 10 * track) for track in tracks]
    tracked = detections(things, index).with_tracks(np.array(tracks, np.int64))
    where = tuple(Whereabouts((0.5, 0.5), entered=zones) for _ in tracks)
    return FrameResult(frame(index), tracked, None, where)


def observation(index: int, track: int = 1, label: str = "person") -> Observation:
    seen = result(index, 1)
    return Observation(seen.frame, seen.detections, track, label, "new_track")


def told(changes: list[EventChange]) -> list[tuple[str, int, str, list[str]]]:
    return [(change.event_id, change.num, change.state, change.zones) for change in changes]


def test_an_event_begins_moves_and_ends_with_its_track() -> None:
    courses = Courses()
    changes = list(courses.begin(observation(0), "a"))
    for index in range(1, 60):
        zones = ("porch",) if index > 5 else ()
        changes += courses.see(result(index, *([1] if index < 20 else []), zones=zones))
    assert told(changes) == [("a", 0, "new", []), ("a", 1, "update", ["porch"]), ("a", 2, "end", ["porch"])]
    assert courses.num_open == 0


def test_two_events_of_one_track_end_together_and_others_go_on() -> None:
    courses = Courses()
    for name in "ab":
        list(courses.begin(observation(0), name))
    list(courses.begin(observation(0, track=2), "c"))
    changes = [change for index in range(1, 40) for change in courses.see(result(index, 2))]
    assert told(changes) == [("a", 1, "end", []), ("b", 1, "end", [])]
    assert [change.event_id for change in courses.end("a")] == ["c"]
    assert not list(courses.end_all())


def test_the_events_that_go_on_are_named() -> None:
    courses = Courses()
    for name in "ab":
        list(courses.begin(observation(0), name))
    assert courses.open_events("a") == ["a", "b"]
    list(courses.end("a"))
    assert courses.open_events("a") == []


def test_a_scene_ends_as_it_begins() -> None:
    courses = Courses()
    changes = list(courses.begin(observation(0, track=0, label="scene"), "a"))
    assert [change.state for change in changes] == ["new", "end"]
    assert courses.num_open == 0


async def test_what_could_not_be_told_is_told_later_in_order() -> None:
    """Q6: Redis is away for a moment."""
    courses = Courses()
    with EmbeddedServer() as server, JobProducer(server.url) as producer:
        teller = Teller(producer)
        kill_server(server)
        teller.tell(courses.begin(observation(0), "a"))
        server.ensure_running()
        async with ResultReader(server.url, stream=producer.config.told) as reader:
            found = []
            while len(found) < 2:
                teller.tell(courses.end("a"))
                found = await reader.read("0-0", 100)
    states = [decode_change(one.body).state for one in found]
    assert states == ["new", "end"]
    assert [one.job_id for one in found] == ["a", "a"]
