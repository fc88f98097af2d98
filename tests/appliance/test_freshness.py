"""From the camera to the description under too much load: fresh, fair, and less good first."""

import asyncio
import io
import itertools
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import numpy as np
import pytest
from PIL import Image

from appliance.describer import Describer
from appliance.jobs import DescribeJob, Description, encode_job
from appliance.ladder import Ladder, LadderConfig
from appliance.reader import CameraReader
from queues import EmbeddedServer, Job, JobConsumer, JobProducer, QueueConfig
from vision.types import Frame
from vlm_engine import GenerationRequest, TokenEvent

CAMERA_FPS, DETECTOR_FPS = 25.0, 5.0
_number = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


class Camera:
    """A live source of 25 frames a second that goes on until it is closed."""

    name = "camera"
    is_live = True
    is_video = True
    fps = CAMERA_FPS
    num_frames = None
    losses: Mapping[str, int] = {}

    def __init__(self) -> None:
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[Frame]:
        for index in itertools.count():
            if self._closed.wait(1 / CAMERA_FPS):
                return
            yield Frame("camera", index, index / CAMERA_FPS, time.time(), np.zeros((2, 2, 3), np.uint8))

    def close(self) -> None:
        self._closed.set()


class Slow:
    """A model that takes `delay_s` for each picture, one after the other."""

    model_name = "slow"
    reads_videos = False
    unhealthy_reason = None

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.sizes: list[tuple[tuple[int, int], float]] = []
        self._turn = asyncio.Lock()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        part = request.messages[0]["content"][1]
        self.sizes.append((part["image"].size, part.get("scale", 1.0)))
        async with self._turn:
            await asyncio.sleep(self.delay_s)
        yield TokenEvent(request.request_id, "A person.", finish_reason="stop")


class Outrun(Slow):
    """Answers only when, meanwhile, three newer pictures were put: a detector that is faster in any case."""

    def __init__(self, delay_s: float, num_put: Callable[[], int]) -> None:
        super().__init__(delay_s)
        self._num_put = num_put

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        num_before = self._num_put()
        async for event in super().generate(request):
            while self._num_put() < num_before + 3:
                await asyncio.sleep(0.01)
            yield event


def a_job(camera: str, captured_at: float, max_age_s: float = 5.0) -> Job:
    picture = io.BytesIO()
    Image.new("RGB", (96, 64), "white").save(picture, "JPEG")
    job_id = f"{camera}-{next(_number)}"
    body = DescribeJob(
        job_id=job_id,
        camera=camera,
        source=camera,
        frame_index=0,
        time_s=0.0,
        captured_at=captured_at,
        track_id=1,
        label="person",
        reason="new_track",
        detections=[],
        width=96,
        height=64,
        prompt="What is there?",
        image=picture.getvalue(),
    )
    now = time.time()
    return Job(job_id, camera, encode_job(body), now, captured_at + max_age_s, slot=camera)


class Described:
    """A describer at work on one queue, and what it has said so far."""

    def __init__(self, consumer: JobConsumer, model: Slow, ladder: Ladder | None = None) -> None:
        self.descriptions: list[Description] = []
        self.describer = Describer(
            consumer,
            model,
            concurrency=1,
            max_tokens=8,
            ladder=ladder,
            on_settled=self._settle,
        )
        self._task = asyncio.create_task(self.describer.run())

    async def _settle(self, description: Description, jpeg: bytes) -> None:
        self.descriptions.append(description)

    async def until(self, condition: object, timeout_s: float = 120.0) -> None:
        assert callable(condition)
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def detect(reader: CameraReader, url: str, queue: QueueConfig, stop: threading.Event, put: list[str]) -> None:
    """Takes the newest frame five times a second and finds every one of them worth a sentence."""
    with JobProducer(url, queue) as producer:
        while not stop.wait(1 / DETECTOR_FPS):
            if frame := reader.take():
                job = a_job("camera", frame.captured_at)
                producer.put(job)
                put.append(job.job_id)


async def test_the_described_frame_is_fresh(server: EmbeddedServer) -> None:
    """V15: camera at 25 frames/s, detector at 5, model at 2: the age of what is described does not grow."""
    queue = QueueConfig(stream=f"fresh-{next(_number)}")
    reader, stop = CameraReader("camera", Camera, on_frame=lambda: None), threading.Event()
    reader.start()
    put = list[str]()
    async with JobConsumer(server.url, queue) as consumer:
        described = Described(consumer, Outrun(0.5, lambda: len(put)))
        detecting = asyncio.create_task(asyncio.to_thread(detect, reader, server.url, queue, stop, put))
        await described.until(lambda: len(described.descriptions) >= 8)
        stop.set()
        await detecting
        await described.stop()
        status = await consumer.status()
    reader.stop()
    ages_s = [one.described_at - one.captured_at for one in described.descriptions]
    told_s = [one.described_at for one in described.descriptions]
    slowest_s = max(later - earlier for earlier, later in itertools.pairwise(told_s))
    assert max(ages_s[2:]) < 1.0 + 2 * slowest_s, "a backlog of frames is described one by one"
    assert status.dropped["replaced"] >= 8
    assert sum(one.num_replaced for one in described.descriptions) >= 8
    assert set(status.dropped) <= {"replaced", "expired"}


async def test_a_flooding_camera_leaves_the_others_their_share(server: EmbeddedServer) -> None:
    """Q10: one busy camera, seven quiet ones, a model that cannot serve them all: everybody's turn comes."""
    queue = QueueConfig(stream=f"fair-{next(_number)}")
    quiet = [f"quiet-{number}" for number in range(7)]
    with JobProducer(server.url, queue) as producer:
        async with JobConsumer(server.url, queue) as consumer:
            described = Described(consumer, Slow(0.05))
            while len(described.descriptions) < 40:
                for camera in ["busy"] * 5 + quiet:
                    await asyncio.to_thread(producer.put, a_job(camera, time.time()))
                await asyncio.sleep(0.005)
            await described.stop()
    shares = Counter(one.camera for one in described.descriptions)
    assert set(shares) == {"busy", *quiet}
    assert max(shares.values()) <= 2 * min(shares.values())


async def test_quality_gives_way_and_comes_back(server: EmbeddedServer) -> None:
    """Overload: smaller pictures, then shorter texts, then pauses; each says so; then all in full."""
    queue = QueueConfig(stream=f"ladder-{next(_number)}")
    config = LadderConfig(min_side=32, min_tokens=2)
    ladder, model = Ladder(config, max_tokens=8, max_age_s=0.5), Slow(0.15)
    cameras = [f"camera-{number}" for number in range(6)]
    with JobProducer(server.url, queue) as producer:
        async with JobConsumer(server.url, queue) as consumer:
            described = Described(consumer, model, ladder)
            deadline = time.monotonic() + 120
            while described.describer.stats().rung != "frames":
                assert time.monotonic() < deadline
                for camera in cameras:
                    await asyncio.to_thread(producer.put, a_job(camera, time.time(), max_age_s=30.0))
                await asyncio.sleep(0.05)
            model.delay_s = 0.0
            await described.until(lambda: described.describer.stats().level == 0)
            producer.put(a_job("late", time.time()))
            await described.until(lambda: described.descriptions[-1].camera == "late")
            await described.stop()
    stats = described.describer.stats()
    by_level = {one.quality.level: one.quality for one in described.descriptions}
    assert by_level[0].rung == "full"
    assert (by_level[1].rung, by_level[1].width, by_level[1].height) == ("picture", 68, 45)
    assert (by_level[3].rung, by_level[3].width, by_level[3].max_tokens) == ("tokens", 48, 4)
    assert {((96, 64), 1.0), ((68, 45), 0.71), ((48, 32), 0.5)} == set(model.sizes)
    assert described.descriptions[-1].quality.level == 0
    assert stats.by_rung["picture"] > 0
    assert sum(stats.by_rung.values()) == sum(s.num_values for s in stats.latency.values())
    assert set(stats.latency) == {*cameras, "late"}
