"""Memory of one part of the appliance while it does one thing very often: a leak, or something that fills up?

    python benchmarks/growth.py SUSPECT [--turns 800]

Suspects: reconnects, refusals, frames, jobs, events, pictures, descriptions, cancels. RSS is read 80
times. Reported are the growth over the second half, in MB (2^20 bytes) and in bytes a turn with its 95 %
interval, what `malloc_trim` gives back at the end, and by how many Python objects the process has grown. What
grows in the second half by more than its interval, and is not given back, leaks or is not yet full.
"""

import argparse
import ctypes
import gc
import json
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from slopes import slope_of

NUM_BLOCKS = 80
Action = Callable[[int], object]


@contextmanager
def reconnects() -> Iterator[Action]:
    """A camera that is opened, gives a frame and is closed."""
    from tests.vision.rtsp_server import RtspServer
    from vision.sources import open_source

    def turn(number: int) -> None:
        source = open_source(server.url(), camera="cam")
        next(iter(source))
        source.close()

    with RtspServer(fps=50) as server:
        yield turn


@contextmanager
def refusals() -> Iterator[Action]:
    """A camera that is not there."""
    from vision.errors import SourceError
    from vision.sources import open_source

    def turn(number: int) -> None:
        with suppress(SourceError):
            next(iter(open_source("rtsp://user:secret@127.0.0.1:9/cam", camera="cam")))

    yield turn


@contextmanager
def frames() -> Iterator[Action]:
    """Detecting, tracking and triggers, and the newest frame as JPEG."""
    from appliance.settings import load_settings
    from appliance.viewing import camera_config
    from vision.annotate import encode_jpeg
    from vision.detector import Detector
    from vision.pipeline import Pipeline
    from vision.scenes import SceneStream
    from vision.types import Frame

    cameras = {f"cam{i}": {"source": "synthetic://street"} for i in range(4)}
    settings = load_settings(None, {"detector": {"device": "cpu", "imgsz": 320}, "cameras": cameras})
    detector = Detector(settings.detector)
    pipeline = Pipeline(
        detector, [camera_config(settings, detector, name, frame_rate=5.0) for name in cameras]
    )
    scenes = SceneStream("street", 1, 5.0, (448, 256))
    pictures = [scenes.frame(index)[0] for index in range(100)]

    def turn(number: int) -> None:
        image = pictures[number % len(pictures)]
        pipeline.process([Frame(name, number, number / 5, time.time(), image) for name in cameras])
        encode_jpeg(image, 85)

    yield turn


@contextmanager
def jobs() -> Iterator[Action]:
    """The vision worker's side of Redis."""
    from appliance.board import BoardWriter
    from queues import EmbeddedServer, Job, JobProducer

    with EmbeddedServer() as server, JobProducer(server.url) as producer:
        board = BoardWriter(server.url)

        def turn(number: int) -> None:
            producer.put(Job(f"{number}", "cam", bytes(50_000), time.time(), slot="cam"), timeout_s=0)
            board.write_frame("cam", bytes(50_000))
            board.watched(("cam",))

        yield turn
        board.close()


@contextmanager
def events() -> Iterator[Action]:
    """The event store in a file."""
    from appliance.event_bodies import Body
    from appliance.event_queries import EventFilter
    from appliance.events import EventStore, Retention
    from tests.appliance.descriptions import description

    with tempfile.TemporaryDirectory() as folder:
        store = EventStore(Path(folder) / "events.db", Retention(max_events=500))

        def turn(number: int) -> list[Body]:
            store.add(description(f"cam-{number}"), bytes(50_000))
            return store.newest(EventFilter(), 20)

        yield turn
        store.close()


@contextmanager
def pictures() -> Iterator[Action]:
    """The front's work on a picture: decoding, then a prompt for the bundled model, in threads as there."""
    from concurrent.futures import ThreadPoolExecutor

    from appliance.images import image_from_bytes
    from appliance.settings import load_settings
    from vlm_engine.models.loading import load_prompts

    prompts = load_prompts(load_settings(None, {}).engine)
    seen = _jpegs()

    def turn(number: int) -> None:
        image = image_from_bytes(seen[number % len(seen)])
        content = [{"type": "image", "image": image}, {"type": "text", "text": f"What is there? {number}"}]
        prompts.prepare([{"role": "user", "content": content}])

    with ThreadPoolExecutor(2) as workers:
        yield lambda number: workers.submit(turn, number).result()


@contextmanager
def descriptions() -> Iterator[Action]:
    """The engine's work on a frame, with the bundled model, and caches that are full after a few."""
    from appliance.images import image_from_bytes
    from appliance.settings import load_settings
    from vlm_engine import Engine, GenerationRequest, SamplingParams

    caches = {"kv_cache_tokens": 2048, "encoder_cache_tokens": 512}
    settings = load_settings(None, {"engine": {"device": "cpu", "num_threads": 1} | caches})
    engine, seen = Engine(settings.engine), _jpegs()

    def turn(number: int) -> str:
        image = image_from_bytes(seen[number % len(seen)])
        image.putpixel((0, 0), (number % 256, number // 256 % 256, 0))
        content = [{"type": "image", "image": image}, {"type": "text", "text": f"What is there? {number}"}]
        sampling = SamplingParams(max_tokens=12, temperature=0.0)
        return engine.generate(
            GenerationRequest(str(number), [{"role": "user", "content": content}], sampling)
        )

    yield turn


@contextmanager
def cancels() -> Iterator[Action]:
    """Chats with pictures whose clients go at any time, on the whole front, with an engine of its own."""
    from appliance.settings import load_settings
    from tests.appliance.api.serving import LoopThread, Servers
    from tests.appliance.api.test_chat_failures import post
    from tests.appliance.api.test_chat_memory import body
    from vlm_engine import EngineProcess

    rng, thread, open_ones = random.Random(7), LoopThread(), list[socket.socket]()
    seen = _jpegs((2560, 1440))
    engine = EngineProcess(load_settings(None, {"engine": {"device": "cpu", "num_threads": 1}}).engine)
    thread.call(engine.start())
    servers = Servers(engine, thread)  # type: ignore[arg-type]
    server = servers.start()

    def turn(number: int) -> None:
        chat = body(*rng.choices(seen, k=rng.choice([1, 1, 2]))) | {"max_tokens": 200, "stream": True}
        open_ones.append(post(server, json.dumps(chat).encode()))
        time.sleep(rng.random() * 0.2)
        if len(open_ones) > 4:
            open_ones.pop(rng.randrange(len(open_ones))).close()

    yield turn
    for connection in open_ones:
        connection.close()
    servers.close()
    thread.call(engine.close())
    thread.close()


def _jpegs(size: tuple[int, int] = (1280, 720)) -> list[bytes]:
    from vision.annotate import encode_jpeg
    from vision.scenes import SceneStream

    scenes = SceneStream("street", 1, 5.0, size)
    return [encode_jpeg(scenes.frame(index)[0], 85) for index in range(20)]


SUSPECTS = (reconnects, refusals, frames, jobs, events, pictures, descriptions, cancels)


def watch(turn: Action, num_turns: int) -> dict[str, Any]:
    """So many turns, RSS block by block."""
    process = psutil.Process()
    marks: list[tuple[float, float]] = []
    num_objects = 0
    for number in range(num_turns):
        turn(number)
        if (number + 1) % max(1, num_turns // NUM_BLOCKS) == 0:
            gc.collect()
            marks.append((number, process.memory_info().rss / 2**20))
            num_objects = num_objects or len(gc.get_objects())
    late = marks[len(marks) // 2 :]
    slope = slope_of([at for at, _ in late], [mb for _, mb in late])
    assert slope
    trimmed = process.memory_info().rss
    ctypes.CDLL(None).malloc_trim(0)
    return {
        "turns": num_turns,
        "rss_mb": [round(mb, 1) for _, mb in marks[::4]],
        "second_half_mb": round(late[-1][1] - late[0][1], 2),
        "bytes_a_turn": round(slope.value * 2**20),
        "interval": round(slope.interval * 2**20),
        "trimmed_mb": round((trimmed - process.memory_info().rss) / 2**20, 1),
        "new_objects": len(gc.get_objects()) - num_objects,
        "threads": threading.active_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    known = {suspect.__name__: suspect for suspect in SUSPECTS}
    parser.add_argument("suspect", choices=known)
    parser.add_argument("--turns", type=int, default=800)
    options = parser.parse_args()
    with known[options.suspect]() as turn:
        report = watch(turn, options.turns)
    print(json.dumps({"suspect": options.suspect} | report))


if __name__ == "__main__":
    main()
