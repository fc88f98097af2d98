"""How soon a camera's frames are back after its server was away, and the queue after Redis was.

    python benchmarks/recovery.py [--rounds 20] [--seed 1] [--output FILE]

Each measured alone. The camera is H.264 over RTSP on loopback, a key frame a second, read as the vision
worker reads it; away it is killed (connections are refused), silent (nothing answers, as a host that is
switched off) or killed for so long that the pauses between attempts have their full length. Redis is killed
and started again under a producer and a consumer; measured is the time until a job came through, and until
the newest frame of a camera is shown. Seconds from the moment that the server listens again.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from soak_world import Redis, until

from appliance.bench.machine import environment
from appliance.board import BoardReader, BoardWriter
from appliance.camera import Camera
from appliance.camera_settings import CameraSettings
from queues import Job, JobConsumer, JobProducer, QueueError
from tests.vision.rtsp_server import Deaf, RtspServer

AWAY_S = {"killed": (0.5, 4.0), "killed for long": (8.0, 12.0), "silent": (4.0, 9.0)}
PUT_EVERY_S = 0.05


def camera_returns(kind: str, rounds: int, chance: random.Random) -> list[float]:
    times = []
    with RtspServer(fps=10.0) as server:
        camera = Camera("cam", CameraSettings(source=server.url()), threading.Event())
        camera.start()
        try:
            until(lambda: camera.reader.state == "running", "the first frame")
            for _ in range(rounds):
                server.kill()
                deaf = Deaf(server.port) if kind == "silent" else None
                until(lambda: camera.reader.state != "running", "the camera to be missed")
                time.sleep(chance.uniform(*AWAY_S[kind]))
                if deaf is not None:
                    deaf.close()
                num_read, started = camera.reader.num_read, time.monotonic()
                server.revive()
                times.append(_seconds_until(lambda n=num_read: camera.reader.num_read > n, started))
        finally:
            camera.reader.stop(5.0)
    return times


def _seconds_until(what: Callable[[], bool], started: float) -> float:
    while not what():
        time.sleep(0.005)
    return round(time.monotonic() - started, 3)


async def redis_returns(rounds: int, chance: random.Random) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"job": [], "frame": []}
    with tempfile.TemporaryDirectory() as folder:
        redis = Redis(Path(folder))
        sender = Sender(redis.url)
        sender.start()
        board = BoardReader(redis.url, ("cam",))
        async with JobConsumer(redis.url) as consumer:
            for _ in range(rounds):
                await _next_job(consumer, time.time())
                redis.kill()
                await asyncio.sleep(chance.uniform(0.5, 6.0))
                await asyncio.to_thread(redis.start)
                started, since = time.monotonic(), time.time()
                shown = asyncio.create_task(_next_frame(board, since))
                await _next_job(consumer, since)
                times["job"].append(round(time.monotonic() - started, 3))
                times["frame"].append(round(await shown - started, 3))
        sender.stop()
        await board.close()
        redis.kill()
    return times


async def _next_job(consumer: JobConsumer, since: float) -> None:
    """Until a job that was put after `since` comes."""
    while True:
        for delivery in await consumer.take(8, 200):
            await consumer.finish(delivery, b"")
            if delivery.job.created_at >= since:
                return


async def _next_frame(board: BoardReader, since: float) -> float:
    while float(await board.frame("cam") or 0) < since:
        await asyncio.sleep(0.01)
    return time.monotonic()


class Sender(threading.Thread):
    """Puts a job and shows a frame again and again, as a vision worker does."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._producer, self._board = JobProducer(url), BoardWriter(url)
        self._stopping = threading.Event()

    def run(self) -> None:
        number = 0
        while not self._stopping.wait(PUT_EVERY_S):
            number, now = number + 1, time.time()
            self._board.write_frame("cam", str(now).encode())
            with suppress(QueueError):
                self._producer.put(Job(f"{id(self)}-{number}", "cam", b"x" * 1000, now), timeout_s=0)

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def _spread(times: list[float]) -> dict[str, Any]:
    return {"n": len(times), "p50": statistics.median(times), "max": max(times), "all": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    report = {f"camera {kind}": _spread(camera_returns(kind, options.rounds, chance)) for kind in AWAY_S}
    found = asyncio.run(redis_returns(options.rounds, chance))
    report |= {f"redis, next {what}": _spread(times) for what, times in found.items()}
    text = json.dumps({"seconds": report, "environment": environment()}, indent=2)
    (options.output.write_text(text + "\n") if options.output else print(text))


if __name__ == "__main__":
    main()
