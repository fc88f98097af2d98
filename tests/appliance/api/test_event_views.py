"""`/v1/events` as a list and as a stream."""

import json
import threading
import time
from typing import Any

import httpx
import pytest

from appliance.fates import why_dropped
from tests.appliance.api.serving import Running, Servers, wait_until
from tests.appliance.descriptions import begun, description

SSE = {"Accept": "text/event-stream"}


def listed(server: Running, **params: Any) -> list[str]:
    reply = httpx.get(f"{server.url}/v1/events", params=params)
    assert reply.status_code == 200, reply.text
    assert reply.json()["object"] == "list"
    return [event["id"] for event in reply.json()["data"]]


class Follower:
    """A client of the stream, in a thread of its own."""

    def __init__(self, server: Running, params: dict[str, Any] | None = None, **headers: str) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.names: list[str] = []
        self.is_connected = False
        self.is_ended = False
        self._is_leaving = False
        arguments = (f"{server.url}/v1/events", params, SSE | headers)
        self._thread = threading.Thread(target=self._follow, args=arguments, daemon=True)
        self._thread.start()
        wait_until(lambda: self.is_connected, "a stream")

    @property
    def ids(self) -> list[str]:
        return [event["id"] for _, event in self.events]

    def wait_for(self, *ids: str) -> None:
        wait_until(lambda: self.ids == list(ids), f"{ids}")

    def _follow(self, url: str, params: Any, headers: dict[str, str]) -> None:
        with httpx.stream("GET", url, params=params, headers=headers, timeout=60) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            number = ""
            for line in reply.iter_lines():
                self.is_connected = self.is_connected or line.startswith("retry: ")
                if line.startswith("id: "):
                    number = line[4:]
                if line.startswith("event: "):
                    self.names.append(line[7:])
                if line.startswith("data: "):
                    self.events.append((number, json.loads(line[6:])))
                if self._is_leaving:
                    return
        self.is_ended = True

    def leave(self) -> None:
        self._is_leaving = True


@pytest.fixture
def filled(own_server: Running) -> Running:
    own_server.events.add(description("1", camera="street", label="car", captured_at=100.0), b"\xff\xd8one")
    own_server.events.add(description("2", camera="yard", label="dog", captured_at=200.5))
    own_server.events.add(description("cam/3:x", camera="street", label="dog", captured_at=300.0))
    return own_server


def test_the_list_and_its_filters(filled: Running) -> None:
    assert listed(filled) == ["cam/3:x", "2", "1"]
    assert listed(filled, limit=1) == ["cam/3:x"]
    assert listed(filled, camera="street") == ["cam/3:x", "1"]
    assert listed(filled, label="dog") == ["cam/3:x", "2"]
    assert listed(filled, camera="street", label="dog") == ["cam/3:x"]
    assert listed(filled, camera="garden") == []
    assert listed(filled, since=200.5) == ["cam/3:x", "2"]
    assert listed(filled, since="1970-01-01T00:05:00Z") == ["cam/3:x"]
    assert listed(filled, since="1970-01-01T01:05:00+01:00") == ["cam/3:x"]
    assert listed(filled, since="1970-01-01") == ["cam/3:x", "2", "1"]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"since": "yesterday"}, "since"),
        ({"since": "nan"}, "since"),
        ({"since": "inf"}, "since"),
        ({"since": ""}, "since"),
        ({"until": "tomorrow"}, "until"),
        ({"q": "word " * 33}, "q"),
        ({"q": "w" * 1001}, "q"),
    ],
)
@pytest.mark.parametrize("headers", [{}, SSE])
def test_bad_parameters_are_named(
    http: httpx.Client, params: dict[str, Any], param: str, headers: dict[str, str]
) -> None:
    reply = http.get("/v1/events", params=params, headers=headers)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


def test_words_zones_and_times(filled: Running) -> None:
    filled.events.add(description("4", text='A "red" bus.', zones=["road"], captured_at=400.0))
    assert listed(filled, q="bus red") == ["4"]
    assert listed(filled, q="person walk") == ["cam/3:x", "2", "1"]
    assert listed(filled, zone="road") == ["4"]
    assert listed(filled, until=300) == ["2", "1"]
    for q in ('"', 'a" OR "b', "*", "NEAR(", "text:x", "\0", "-", "'; DROP TABLE events; --", "%", "💡"):
        assert listed(filled, q=q) == []


def test_pages(filled: Running) -> None:
    """What comes in between two pages neither repeats an event nor hides one."""
    pages, params = [], {"limit": "1"}
    while True:
        page = httpx.get(f"{filled.url}/v1/events", params=params).json()
        pages.append([event["id"] for event in page["data"]])
        filled.events.add(description(f"new {len(pages)}"))
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]
    assert pages == [["cam/3:x"], ["2"], ["1"]]


def test_pages_are_by_time_whatever_changes_meanwhile(filled: Running) -> None:
    """One that goes on while it is paged does not jump over the pages that were read."""
    first = httpx.get(f"{filled.url}/v1/events", params={"limit": 1}).json()
    filled.events.end("1")
    filled.events.end("2")
    rest = {"limit": 9, "cursor": first["next_cursor"]}
    assert [event["id"] for event in first["data"]] == ["cam/3:x"]
    assert listed(filled, **rest) == ["2", "1"]
    assert listed(filled) == ["cam/3:x", "2", "1"]
    assert listed(filled, camera="street") == ["cam/3:x", "1"]


@pytest.mark.parametrize("headers", [{}, SSE])
def test_parameters_that_are_none_are_named(http: httpx.Client, headers: dict[str, str]) -> None:
    reply = http.get("/v1/events", params={"labell": "dog"}, headers=headers)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "labell")
    assert reply.json()["error"]["message"] == (
        "labell: is no parameter of /v1/events; it has camera, label, zone, q, since, until, limit, "
        "cursor, named"
    )
    twice = http.get("/v1/events", params=[("camera", "a"), ("camera", "b")], headers=headers)
    assert (twice.status_code, twice.json()["error"]["message"]) == (400, "camera: is given twice")


@pytest.mark.parametrize("cursor", ["", "x", "-1", "9" * 30, "1:x", "nan:1", "1:2:3", f"1:{'9' * 30}"])
def test_a_cursor_that_is_none(http: httpx.Client, cursor: str) -> None:
    reply = http.get("/v1/events", params={"cursor": cursor})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "cursor")


def test_one_event_and_its_snapshot(filled: Running) -> None:
    event = httpx.get(f"{filled.url}/v1/events/cam%2F3%3Ax")
    assert event.json()["id"] == "cam/3:x"
    assert event.json()["description"] == "A person walks."
    assert "source" not in event.json()
    snapshot = httpx.get(f"{filled.url}/v1/events/1/snapshot.jpg")
    assert (snapshot.content, snapshot.headers["content-type"]) == (b"\xff\xd8one", "image/jpeg")
    for path in ("/v1/events/nothing", "/v1/events/2/snapshot.jpg", "/v1/events/nothing/snapshot.jpg"):
        missing = httpx.get(filled.url + path)
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "event_not_found"


def test_the_stream_tells_what_is_new(filled: Running) -> None:
    follower = Follower(filled)
    filled.events.add(description("4"))
    filled.events.add(description("5", text=None, error="the engine failed"))
    follower.wait_for("4", "5")
    assert follower.events[0][1]["description"] == "A person walks."
    assert follower.events[1][1]["description"] is None
    assert follower.events[1][1]["error"] == "the engine failed"


def test_the_stream_filters(filled: Running) -> None:
    follower = Follower(filled, {"camera": "yard", "label": "dog"})
    filled.events.add(description("4", camera="yard", label="cat"))
    filled.events.add(description("5", camera="street", label="dog"))
    filled.events.add(description("6", camera="yard", label="dog"))
    follower.wait_for("6")


def test_messages_are_named_for_who_wants_that(filled: Running) -> None:
    """By what changed last; to others a name would be a message that they do not hear."""
    named, plain = Follower(filled, {"named": "true", "limit": 1}), Follower(filled, {"limit": 1})
    steps = [
        lambda: filled.events.change(begun("4")),
        lambda: filled.events.add(description("4")),
        lambda: filled.events.end("4"),
        lambda: filled.events.add(description("5", text=None, error="the engine failed")),
    ]
    seen = ["cam/3:x"]
    for step, event_id in zip(steps, ("4", "4", "4", "5"), strict=True):
        step()
        seen.append(event_id)
        named.wait_for(*seen)
    plain.wait_for(*seen)
    assert named.names == ["described", "new", "described", "end", "failed"]
    assert plain.names == []


def test_the_stream_may_start_in_the_past(filled: Running) -> None:
    last_two, since = Follower(filled, {"limit": 2}), Follower(filled, {"since": 150})
    last_two.wait_for("2", "cam/3:x")
    since.wait_for("2", "cam/3:x")
    filled.events.add(description("4"))
    last_two.wait_for("2", "cam/3:x", "4")


def test_the_stream_may_start_long_ago(filled: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """`since` is everything, however much."""
    monkeypatch.setattr("appliance.api.event_views._BATCH", 7)
    monkeypatch.setattr("appliance.api.event_views._MAX_LIMIT", 10)
    for number in range(30):
        filled.events.add(description(f"{number + 10}", captured_at=500.0 + number))
    since = Follower(filled, {"since": 200})
    since.wait_for("2", "cam/3:x", *(f"{number + 10}" for number in range(30)))


def test_the_stream_resumes(filled: Running) -> None:
    """Nothing is lost between two connections, and nothing comes twice."""
    first = Follower(filled, {"limit": 1000})
    first.wait_for("1", "2", "cam/3:x")
    filled.events.add(description("4"))
    numbers = [number for number, _ in first.events]
    second = Follower(filled, {"limit": 1000}, **{"Last-Event-ID": numbers[1]})
    second.wait_for("cam/3:x", "4")
    from_an_old_store = Follower(filled, **{"Last-Event-ID": "12"})
    from_an_old_store.wait_for("1", "2", "cam/3:x", "4")
    from_a_newer_store = Follower(filled, **{"Last-Event-ID": f"{int(numbers[1]) + 10**12}"})
    from_a_newer_store.wait_for("1", "2", "cam/3:x", "4")


@pytest.mark.parametrize("number", ["abc", "-1", "1.5", "9" * 30])
def test_a_bad_number_to_resume_from(http: httpx.Client, number: str) -> None:
    reply = http.get("/v1/events", headers=SSE | {"Last-Event-ID": number})
    assert reply.status_code == 400
    assert "Last-Event-ID" in reply.json()["error"]["message"]


def test_a_late_description_comes_again(filled: Running) -> None:
    """A8: first the error, then the text that a second try brought, under the same id."""
    follower = Follower(filled)
    filled.events.add(description("4", text=None, error="the engine failed"))
    follower.wait_for("4")
    filled.events.add(description("4"))
    follower.wait_for("4", "4")
    assert [event["description"] for _, event in follower.events] == [None, "A person walks."]
    assert listed(filled, limit=1000) == ["4", "cam/3:x", "2", "1"]


def test_an_event_without_a_description_says_why(filled: Running) -> None:
    """A8: a job that was dropped is told on the stream and in the list; the page shows these words."""
    follower = Follower(filled)
    filled.events.change(begun("5"))
    filled.events.give_up("5", why_dropped("replaced"), 1_700_000_002.0)
    wait_until(lambda: len(follower.ids) >= 1 and follower.events[-1][1]["error"], "the reason")
    event = httpx.get(f"{filled.url}/v1/events/5").json()
    assert event == follower.events[-1][1]
    assert (event["description"], event["state"]) == (None, "new")
    assert event["error"].startswith("replaced: a newer frame")


def test_a_burst_arrives_whole_and_in_order(filled: Running) -> None:
    follower = Follower(filled)
    for number in range(450):
        filled.events.add(description(f"burst-{number}"))
    follower.wait_for(*(f"burst-{number}" for number in range(450)))


def test_followers_that_left_are_forgotten(filled: Running) -> None:
    followers = [Follower(filled) for _ in range(3)]
    for follower in followers:
        follower.leave()
    filled.events.add(description("4"))
    wait_until(lambda: not filled.events._followers, "forgotten followers")


def test_a_quiet_stream_is_kept_alive(filled: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.api.event_views._KEEP_ALIVE_S", 0.05)
    with httpx.stream("GET", f"{filled.url}/v1/events", headers=SSE, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith(":"))
        assert next(lines) == ": keep-alive"
        assert next(lines) == ": keep-alive"


def test_a_server_with_an_open_stream_stops_at_once(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.api.server._SHUTDOWN_TIMEOUT_S", 60)
    running = servers.start()
    follower = Follower(running)
    started = time.monotonic()
    servers.stop(running)
    assert time.monotonic() - started < 30, "what chats would get is a minute"
    wait_until(lambda: follower.is_ended, "the stream's end")


@pytest.mark.parametrize("path", ["", "/1", "/1/snapshot.jpg"])
def test_an_event_file_that_cannot_be_read_is_a_503(filled: Running, path: str) -> None:
    filled.events.close()
    reply = httpx.get(f"{filled.url}/v1/events{path}")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "events_unavailable")
    assert reply.json()["error"]["message"].startswith("events cannot be read: ")
