"""The describe dispatcher against a real Valkey: what becomes a description, and what never does."""

import asyncio
import io
import itertools
import json
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from PIL import Image

from appliance import describer
from appliance.describer import Describer, VisionLanguageModel
from appliance.events import EventStore
from appliance.jobs import DescribeJob, Description, Quality, decode_description, encode_job
from appliance.ladder import Rung
from appliance.serve import _keep
from queues import Delivery, EmbeddedServer, Job, JobConsumer, JobProducer, QueueConfig, ResultReader
from tests.appliance.descriptions import description
from vlm_engine import (
    AsyncEngine,
    EngineConfig,
    EngineStopped,
    GenerationRequest,
    ImageRejected,
    StructuredOutput,
    Timings,
    TokenEvent,
)

BOX = {"x1": 0.0, "y1": 8.0, "x2": 32.0, "y2": 40.0}
WAIT_S = 120


@pytest.fixture(scope="module")
def server():
    with EmbeddedServer() as server:
        yield server


_number = itertools.count()


@pytest.fixture
def queue() -> QueueConfig:
    return QueueConfig(stream=f"describer-test-{next(_number)}", retry_delay_s=0.05, max_deliveries=2)


def picture(color: str = "white") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (96, 64), color).save(buffer, "JPEG")
    return buffer.getvalue()


def job(job_id: str, *, image: bytes | None = None, expires_at: float | None = None, **more: Any) -> Job:
    body = DescribeJob(
        job_id=job_id,
        camera="front",
        source="front.mp4",
        frame_index=3,
        time_s=0.3,
        captured_at=time.time(),
        track_id=1,
        label="person",
        reason="new_track",
        detections=[{"name": "person", "class": 0, "confidence": 0.9, "box": BOX, "track_id": 1}],
        width=96,
        height=64,
        prompt="What is there?",
        image=picture() if image is None else image,
        **more,
    )
    return Job(job_id, "front", encode_job(body), time.time(), expires_at)


Event = Callable[[str], TokenEvent]


def says(text: str) -> Event:
    timings = Timings(queue_ms=1, preprocess_ms=2, encode_ms=3, prefill_ms=4, decode_ms=5)
    return lambda request_id: TokenEvent(request_id, text, finish_reason="stop", timings=timings)


def ends(reason: str, error: str | None = None) -> Event:
    return lambda request_id: TokenEvent(request_id, "half a sent", finish_reason=reason, error=error)  # type: ignore[arg-type]


@dataclass
class Scripted:
    """A model that does what the test says: an event, or an exception, one a request; `always` by job id."""

    script: list[Event | Exception]
    always: dict[str, Event] = field(default_factory=dict)
    model_name: str = "scripted"
    reads_videos: bool = False
    unhealthy_reason: str | None = None
    delay_s: float = 0.0
    num_running: int = 0
    most_running: int = 0
    requests: list[GenerationRequest] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        self.requests.append(request)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(self.delay_s)
            answer = self.script.pop(0) if self.script else says("A person.")
            answer = self.always.get(request.request_id.split("-")[1], answer)
            if isinstance(answer, Exception):
                raise answer
            yield answer(request.request_id)
        finally:
            self.num_running -= 1


async def describe(
    server: EmbeddedServer,
    queue: QueueConfig,
    model: VisionLanguageModel,
    jobs: list[Job],
    concurrency: int = 2,
) -> dict[str, Description]:
    """Everything that was settled (as the listener and as readers of the results see it), by job id."""
    return (await describe_and_count(server, queue, model, jobs, concurrency))[0]


async def nothing(description: Description, jpeg: bytes) -> None:
    """Keeps no answer."""


async def describe_and_count(
    server: EmbeddedServer,
    queue: QueueConfig,
    model: VisionLanguageModel,
    jobs: list[Job],
    concurrency: int = 2,
) -> tuple[dict[str, Description], dict[str, int]]:
    """The same with the describer's own counts, zeros left out."""
    settled: dict[str, Description] = {}

    async def settle(description: Description, jpeg: bytes) -> None:
        settled.setdefault(description.job_id, description)

    with JobProducer(server.url, queue) as producer:
        for each in jobs:
            producer.put(each)
    async with JobConsumer(server.url, queue) as consumer, ResultReader(server.url, queue) as reader:
        dispatcher = Describer(
            consumer,
            model,
            concurrency=concurrency,
            max_tokens=8,
            on_settled=settle,
        )
        task = asyncio.create_task(dispatcher.run())
        deadline = time.monotonic() + WAIT_S
        while not (await consumer.status()).is_idle and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        stored = {r.job_id: decode_description(r.body) for r in await reader.read("0-0", 50)}
        status = await consumer.status()
    assert status.is_idle
    assert {name: settled[name] for name in stored} == stored
    assert len(settled) - len(stored) == status.dead
    return settled, {name: num for name, num in dispatcher.stats().outcomes.items() if num}


async def test_a_job_becomes_a_description(server, queue):
    model = Scripted([says(" A person on the left. ")])

    answer = (await describe(server, queue, model, [job("a")]))["a"]

    assert answer.text == "A person on the left."
    assert answer.error is None
    assert answer.prompt == "What is there?\n[image]\nDetected: 1 person (left)."
    assert answer.model == "scripted"
    assert answer.quality == Quality(width=96, height=64, max_tokens=8)
    assert answer.timings.queue_ms > 1
    assert (answer.timings.preprocess_ms, answer.timings.decode_ms) == (2, 5)
    assert model.requests[0].priority == "background"
    assert model.requests[0].sampling.max_tokens == 8


async def test_several_pictures_of_a_track_are_one_prompt_in_order_of_time(server, queue):
    model = Scripted([says("She comes closer.")])
    earlier = [picture("red"), picture("green")]
    wanted = job(
        "a", image=picture("blue"), earlier=earlier, has_context=True, camera_name="Gate", taken="noon"
    )

    answer = (await describe(server, queue, model, [wanted]))["a"]

    content = model.requests[0].messages[0]["content"]
    colours = [part["image"].getpixel((40, 40)) for part in content if part["type"] == "image"]
    assert [max(range(3), key=colour.__getitem__) for colour in colours] == [0, 1, 2]
    assert answer.prompt.startswith("What is there?\nSpeak only of what is listed as detected")
    assert answer.prompt.endswith(
        "[image][image][image]\nCamera: Gate. Time: noon.\nDetected: 1 person (left)."
    )


async def test_an_answer_has_the_form_of_the_schema_or_is_an_error(server, queue):
    schema = {"type": "object"}
    model = Scripted([says("{}"), ends("length"), says("{}")])
    jobs = [job(name, answer_schema=schema) for name in "ab"] + [job("c")]

    answers = await describe(server, queue, model, jobs)

    assert [request.sampling.structured is not None for request in model.requests] == [True, True, False]
    form = model.requests[0].sampling.structured
    assert form == StructuredOutput.of_json(schema, "describe.schema")
    assert model.requests[0].sampling.max_tokens == 4 * model.requests[2].sampling.max_tokens
    assert sorted(answer.error or "" for answer in answers.values()) == [
        "",
        "",
        "the answer was cut before its JSON was complete: raise describe.max_tokens",
    ]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (says(""), "the model answered with an empty text"),
        (says("  \n"), "the model answered with an empty text"),
        (ImageRejected("the image is too large"), "the image is too large"),
    ],
)
async def test_what_another_try_cannot_help_is_stored_as_an_error(server, queue, answer, error):
    """A8: never the error's text as a description, and no second try."""
    model = Scripted([answer])

    settled = (await describe(server, queue, model, [job("a")]))["a"]

    assert settled.text is None
    assert settled.error == error
    assert len(model.requests) == 1


@pytest.mark.parametrize(
    "answer", [ends("error", "CUDA out of memory"), ends("cancelled"), EngineStopped("the engine is closed")]
)
async def test_a_fault_of_the_engine_is_tried_again(server, queue, answer):
    """A8, Q3: half a sentence before a fault is not a description."""
    model = Scripted([answer, says("A person.")])

    settled = (await describe(server, queue, model, [job("a")]))["a"]

    assert settled.text == "A person."
    assert len({request.request_id for request in model.requests}) == 2


async def test_a_fault_that_stays_ends_in_the_dead_letters_and_is_told(server, queue):
    """Q3: the job that always fails holds nobody up."""
    model = Scripted([], always={"bad": ends("error", "CUDA out of memory")})

    settled = await describe(server, queue, model, [job("bad"), job("good")], concurrency=1)

    assert settled["bad"].text is None
    assert settled["bad"].error == "CUDA out of memory"
    assert settled["good"].text == "A person."


async def test_what_was_too_old_for_the_engine_is_counted_and_told_nobody(server, queue):
    """E19: an expired frame is no event, and is not tried again."""
    model = Scripted([], always={"old": ends("expired")})

    settled, outcomes = await describe_and_count(server, queue, model, [job("old"), job("good")])

    assert list(settled) == ["good"]
    assert outcomes == {"described": 1, "expired": 1}
    with JobProducer(server.url, queue) as producer:
        assert producer.status().dropped == {"expired": 1}
    assert len(model.requests) == 2


async def test_what_expires_in_hand_never_reaches_the_engine(server, queue, monkeypatch):
    """E19: the picture took too long; its request is not made."""
    picture_of = describer._picture
    monkeypatch.setattr(describer, "_picture", lambda *of: time.sleep(0.6) or picture_of(*of))
    model, expires_at = Scripted([]), time.time() + 0.5

    settled, outcomes = await describe_and_count(server, queue, model, [job("a", expires_at=expires_at)])

    assert not settled
    assert outcomes in ({"expired": 1}, {})
    assert not model.requests


def test_a_deadline_does_not_depend_on_the_cameras_clock():
    """The vision worker may be on another machine: what counts is how long the frame is wanted."""
    delivery = Delivery(Job("a", "front", b"", created_at=5000.0, expires_at=5020.0), "1-0", 1, queue_ms=3000)
    task = describer._Task(delivery, 0, Rung("full", 1.0, 8))

    assert task.expires_at == pytest.approx(task.taken_s + 17)


async def test_outcomes_are_counted(server, queue):
    model = Scripted([], always={"bad": ends("error", "CUDA out of memory"), "mute": says("")})

    _, outcomes = await describe_and_count(server, queue, model, [job("bad"), job("good"), job("mute")])

    assert outcomes == {"described": 1, "failed": 1, "retried": 1, "dead": 1}


@pytest.mark.parametrize("answer", [says("A person."), EngineStopped("gone")])
async def test_what_a_camera_withdraws_while_it_is_described_is_told_nobody(server, queue, answer):
    """Neither its text nor its picture, also when the model has failed for the last time."""
    settled = []
    last_try = replace(queue, max_deliveries=1)

    async def settle(*one: object) -> None:
        settled.append(one)

    class Masked(Scripted):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
            producer.permit("front", "masked")
            async for event in super().generate(request):
                yield event

    with JobProducer(server.url, last_try) as producer:
        producer.put(job("0"))
        async with JobConsumer(server.url, last_try) as consumer:
            dispatcher = Describer(
                consumer,
                Masked([answer]),
                concurrency=1,
                max_tokens=8,
                on_settled=settle,
            )
            task = asyncio.create_task(dispatcher.run())
            async with asyncio.timeout(WAIT_S):
                while not (status := await consumer.status()).num_dropped:
                    await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    assert (settled, status.dropped, status.num_done, status.dead) == ([], {"withdrawn": 1}, 0, 0)
    assert dispatcher.stats().outcomes["withdrawn"] == 1


async def test_others_go_on_while_an_answer_is_stored(tmp_path):
    """Another process may hold the event file for seconds."""
    path = tmp_path / "events.sqlite3"
    with closing(EventStore(path)) as store, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        task = asyncio.create_task(_keep(store, Counter(), description("a"), b"jpeg"))
        await asyncio.sleep(0.1)
        assert not task.done()
        other.execute("COMMIT")
        await task
        assert store.snapshot("a") == b"jpeg"


async def test_a_broken_picture_is_an_error_of_its_own(server, queue):
    """I5: the picture is looked at like every other that comes from outside."""
    model = Scripted([])

    settled = await describe(server, queue, model, [job("cut", image=picture()[:-128]), job("good")])

    assert settled["cut"].text is None
    assert settled["cut"].error
    assert settled["good"].text == "A person."
    assert len(model.requests) == 1


async def test_a_body_that_is_no_job_goes_to_the_dead_letters(server, queue):
    with JobProducer(server.url, queue) as producer:
        producer.put(Job("junk", "front", b"junk", time.time()))
    async with JobConsumer(server.url, queue) as consumer:
        dispatcher = Describer(consumer, Scripted([]), concurrency=1, max_tokens=8, on_settled=nothing)
        task = asyncio.create_task(dispatcher.run())
        deadline = time.monotonic() + WAIT_S
        while not (await consumer.status()).dead and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        status = await consumer.status()

    assert status.dead == 1
    assert status.is_idle


class Crowded(Scripted):
    """Answers nobody before so many ask at once as may; a little later, so that one more could come."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        async for event in super().generate(request):
            while self.most_running < 3:
                await asyncio.sleep(0.01)
            yield event


async def test_no_more_jobs_are_taken_than_the_engine_has_credits(server, queue):
    model = Crowded([], delay_s=0.05)

    settled = await describe(server, queue, model, [job(str(i)) for i in range(9)], concurrency=3)

    assert len(settled) == 9
    assert model.most_running == 3


async def test_what_is_in_hand_at_the_end_goes_back_to_the_queue(server, queue):
    """Q2, the polite half: a stopped dispatcher loses nothing."""
    model = Scripted([], delay_s=60)
    with JobProducer(server.url, queue) as producer:
        producer.put(job("a"))
    async with JobConsumer(server.url, queue) as consumer:
        dispatcher = Describer(consumer, model, concurrency=1, max_tokens=8, on_settled=nothing)
        task = asyncio.create_task(dispatcher.run())
        while not model.num_running:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert model.num_running == 0

    settled = await describe(server, queue, Scripted([]), [])

    assert settled["a"].text == "A person."


async def test_jobs_wait_in_the_queue_while_the_engine_is_away(server, queue, monkeypatch):
    """A dead engine's work comes back: no delivery is spent before it is up again."""
    monkeypatch.setattr(describer, "ENGINE_PAUSE_S", 0.05)
    model = Scripted([], unhealthy_reason="being started again")

    async def come_back() -> None:
        with JobProducer(server.url, queue) as producer:
            while producer.status().longest_wait_s < 0.4:
                await asyncio.sleep(0.02)
        model.unhealthy_reason = None

    coming_back = asyncio.create_task(come_back())
    settled = await describe(server, queue, model, [job("a")])
    await coming_back

    assert settled["a"].text == "A person."
    assert settled["a"].timings.queue_ms >= 400


async def test_the_engines_deadline_is_the_jobs(server, queue):
    model = Scripted([])
    began, by_the_camera = time.monotonic(), time.time()

    await describe(server, queue, model, [job("a", expires_at=by_the_camera + 600), job("b")])

    deadlines = {r.request_id.split("-")[1]: r.expires_at for r in model.requests}
    assert began + 599 < deadlines["a"] <= time.monotonic() + 600
    assert deadlines["b"] is None


async def test_the_engine_is_told_to_hurry_while_others_wait(server, queue):
    """It spreads the work on what is in time, and cannot see who waits in the queue."""
    model = Scripted([])

    await describe(server, queue, model, [job("a"), job("b"), job("c")], concurrency=1)

    wanted = {r.request_id.split("-")[1]: r.wanted_at for r in model.requests}
    assert wanted["a"] is not None
    assert wanted["a"] <= time.monotonic()
    assert wanted["c"] is None


async def test_with_a_real_engine(server, queue, qwen3_vl_checkpoint):
    """Also in a form: JSON in one line, however the model likes to lay it out."""
    number = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"people": number}, "required": ["people"]}
    schema["additionalProperties"] = False
    config = EngineConfig(str(qwen3_vl_checkpoint), device="cpu", kv_cache_tokens=2048, num_threads=1)
    engine = AsyncEngine(config)
    await engine.start()
    try:
        jobs = [job("a"), job("b", image=picture("red")), job("c", answer_schema=schema)]
        settled = await describe(server, queue, engine, jobs)
        engine.engine.check_integrity()
    finally:
        await engine.close()

    assert {name: bool(d.text) for name, d in settled.items()} == dict.fromkeys("abc", True)
    answer = json.loads(settled["c"].text)
    assert answer["people"] in range(10)
    assert settled["c"].text == json.dumps(answer)
    assert settled["a"].timings.prefill_ms > 0
    assert settled["a"].timings.decode_ms > 0
