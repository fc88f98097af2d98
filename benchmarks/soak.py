"""An appliance under faults: what it loses (nothing that it does not count), and what grows (nothing).

    python benchmarks/soak.py [--seconds 600] [--cameras 8] [--every 4] [--seed 1] [--without FAULT …]

The real `appliance serve` with the bundled models, MJPEG cameras over HTTP, a Redis that keeps its data, a
webhook and an event file. Every few seconds one fault: a worker or the engine is killed, Redis is killed or
hangs, cameras are cut, hang or are gone, the webhook's receiver refuses or is gone, a chat is broken off. At
the end all is well again, the cameras stop, and the books are read. Writes one JSON object to standard
output; exit code 1 when `problems` is not empty. MB are of 2^20 bytes.

RSS of a process is said to grow when the slope over the second half of its longest life is above 0 by more
than its 95 % interval and `MAX_SLOPE_MB_PER_MIN`; only lives of `LONG_S` are judged, for which `--without
"vision killed" "engine killed"` leaves these processes alone. The engine's caches are made so small that they
are full before that.
"""

import argparse
import json
import os
import random
import shutil
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from slopes import slope_of
from soak_world import Appliance, Cameras, Receiver, Redis, Sample, Sampler, until

from queues import DeadLetters

SETTLE_S = 10.0
PRODUCERS_OWN = {"refused"}
FRESH_S = 5.0
CACHES = {"kv_cache_tokens": 8192, "encoder_cache_tokens": 2048}
AFTER_A_START = {"vision killed", "engine killed"}
MAX_NEW = {"num_processes": 0, "num_threads": 3, "num_fds": 8}
MAX_GROWTH = 1.2
MAX_SLOPE_MB_PER_MIN = 0.2
LONG_S = 300.0


class Soak:
    """One run: the world, the faults, and the books."""

    def __init__(self, folder: Path, num_cameras: int, seed: int, without: Collection[str] = ()) -> None:
        self.folder = folder
        self.without = without
        self.choice = random.Random(seed)
        self.redis = Redis(folder)
        self.cameras = Cameras(num_cameras)
        self.receiver = Receiver()
        self.appliance = Appliance(folder, self._settings())
        self.sampler = Sampler(self.appliance)
        self.recovery_s: dict[str, list[float]] = {}
        self.faults = Counter[str]()

    def _settings(self) -> dict[str, Any]:
        return {
            "engine": {"device": "cpu", "num_threads": 1} | CACHES,
            "detector": {"device": "cpu", "imgsz": 320},
            "describe": {"max_tokens": 12, "cooldown_s": 2, "min_hits": 2, "min_area": 0.0005},
            "queue": {"visibility_s": 10},
            "redis": {"url": self.redis.url},
            "events": {"path": str(self.folder / "events.db")},
            "outputs": {
                "webhooks": [
                    {"url": f"http://127.0.0.1:{self.receiver.port}/", "send": ["described", "failed"]}
                ]
            },
            "server": {"port": 0},
            "cameras": self.cameras.sources,
        }

    def wait_until_well(self, name: str, timeout_s: float = 600.0) -> float:
        """The seconds until everything is well."""
        started = time.time()
        until(lambda: self.appliance.is_well(started), name, timeout_s)
        return time.time() - started

    def hurt(self, seconds: float, every_s: float) -> None:
        """One fault after the other."""
        faults = {name: fault for name, fault in self._faults().items() if name not in self.without}
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            name = self.choice.choices(list(faults), [weight for weight, _ in faults.values()])[0]
            if name in AFTER_A_START and not self.appliance.is_well(time.time() - FRESH_S):
                # why: who is killed while it starts never does anything but start.
                continue
            print(f"{deadline - time.monotonic():5.0f} s left: {name}", file=sys.stderr, flush=True)
            self.faults[name] += 1
            faults[name][1]()
            time.sleep(self.choice.uniform(0.5, 1.5) * every_s)

    def _faults(self) -> dict[str, tuple[int, Callable[[], None]]]:
        return {
            "vision killed": (3, lambda: self._kill("vision")),
            "engine killed": (1, lambda: self._kill("engine")),
            "redis killed": (3, self._kill_redis),
            "redis hung": (2, lambda: self.redis.hang(self.choice.uniform(0.5, 3))),
            "cameras gone": (2, lambda: self._absent(self.cameras)),
            "cameras hung": (2, self._hang_cameras),
            "receiver gone": (2, lambda: self._absent(self.receiver)),
            "receiver refuses": (2, self._refuse),
            "chat broken off": (4, self._break_off_chat),
        }

    def _kill(self, role: str) -> None:
        self.appliance.kill(role)
        self._recovered(role)

    def _kill_redis(self) -> None:
        self.redis.kill()
        time.sleep(self.choice.uniform(0, 2))
        self.redis.start()
        self._recovered("redis")

    def _absent(self, server: Cameras | Receiver) -> None:
        server.go()
        time.sleep(self.choice.uniform(0.5, 3))
        server.come_back()
        if server is self.cameras:
            self._recovered("cameras")

    def _hang_cameras(self) -> None:
        self.cameras.is_hanging = True
        time.sleep(self.choice.uniform(1, 8))
        self.cameras.is_hanging = False

    def _refuse(self) -> None:
        self.receiver.status = self.choice.choice((500, 404, 429))
        time.sleep(self.choice.uniform(0.5, 3))
        self.receiver.status = 204

    def _break_off_chat(self) -> None:
        body = {"messages": [{"role": "user", "content": "What is there?"}], "stream": True, "max_tokens": 50}
        with suppress(httpx.HTTPError, KeyError, TypeError):
            body["model"] = self.appliance.get("/v1/models")["data"][0]["id"]
            with httpx.stream(
                "POST", f"{self.appliance.url}/v1/chat/completions", json=body, timeout=5
            ) as reply:
                next(reply.iter_lines())

    def _recovered(self, what: str) -> None:
        """Measure in the background, so that the next fault may come meanwhile; such a one is left out."""
        number, started = self.faults.total(), time.time()

        def watch() -> None:
            with suppress(RuntimeError):
                until(lambda: self.appliance.is_well(started), what, 300)
                if self.faults.total() == number:
                    self.recovery_s.setdefault(what, []).append(round(time.time() - started, 2))

        threading.Thread(target=watch, daemon=True).start()

    def drain(self) -> None:
        """Stop the pictures, and wait until every job and every webhook is settled."""
        self.cameras.is_hanging = True
        with DeadLetters(self.redis.url) as queue:
            until(lambda: queue.status().is_idle, "an empty queue", 600)
        with suppress(RuntimeError):
            until(lambda: not self._unsettled(), "a word on every event", 60)
        until(lambda: self._output()["num_waiting"] == 0, "an empty outbox", 600)

    def _events(self) -> list[tuple[str, str]]:
        with closing(sqlite3.connect(self.folder / "events.db")) as database:
            return database.execute("SELECT id, body FROM events").fetchall()

    def _unsettled(self) -> set[str]:
        return {name for name, body in self._events() if not json.loads(body)["described_at"]}

    def books(self) -> dict[str, Any]:
        """What went in and what came out."""
        with DeadLetters(self.redis.url) as queue:
            status = asdict(queue.status())
        rows = self._events()
        unsettled = self._unsettled()
        answered = {name for name, _ in rows} - unsettled
        return {
            "queue": status,
            "num_events": len(rows),
            "num_event_ids": len({name for name, _ in rows}),
            "num_answered": len(answered),
            "num_unsettled": len(unsettled),
            "num_posts": self.receiver.num_posts,
            "num_answered_but_not_posted": len(answered - self.receiver.ids),
            "output": self._output(),
        }

    def _output(self) -> dict[str, int]:
        with closing(sqlite3.connect(self.folder / "events.db")) as database:
            query = "SELECT coalesce(sum(is_dead = 0), 0), coalesce(sum(is_dead), 0) FROM outbox"
            waiting, dead = database.execute(query).fetchone()
        return {"num_waiting": waiting, "num_dead": dead}


def run(
    seconds: float, num_cameras: int, every_s: float, seed: int, folder: Path, without: Collection[str]
) -> dict[str, Any]:
    """One whole run; what it found."""
    soak = Soak(folder, num_cameras, seed, without)
    try:
        soak.wait_until_well("the start")
        time.sleep(SETTLE_S)
        before, num_before = soak.sampler.look(), soak.appliance.num_processes()
        soak.sampler.start()
        soak.hurt(seconds, every_s)
        recovered_s = soak.wait_until_well("all to be well after the faults")
        time.sleep(SETTLE_S)
        after, num_after = soak.sampler.look(), soak.appliance.num_processes()
        soak.sampler.stop()
        soak.drain()
        books = soak.books()
        exit_code = soak.appliance.stop()
    finally:
        soak.appliance.destroy()
        soak.redis.kill()
    report = {
        "seconds": seconds,
        "cameras": num_cameras,
        "faults": dict(soak.faults),
        "recovery_s": {what: _spread(times) for what, times in soak.recovery_s.items()},
        "all_well_after_s": round(recovered_s, 1),
        "books": books,
        "growth": {role: _growth(role, before, after, soak.sampler.samples) for role in before},
        "num_processes": [num_before, num_after],
        "exit_code": exit_code,
        "cores": len(os.sched_getaffinity(0)),
        "load_1m": round(os.getloadavg()[0], 2),
    }
    return report | {"problems": list(_problems(report))}


def _growth(
    role: str, before: dict[str, Sample], after: dict[str, Sample], samples: list[Sample]
) -> dict[str, Any]:
    """One role's process before and after, and the slope of its memory over its longest life."""
    lives = Counter(sample.pid for sample in samples if sample.role == role)
    longest = [s for s in samples if s.role == role and s.pid == lives.most_common(1)[0][0]]
    # why: the first half warms up caches and allocators.
    late = longest[len(longest) // 2 :]
    slope = slope_of([sample.at / 60 for sample in late], [sample.rss_mb for sample in late])
    values: dict[str, Any] = {
        name: [round(getattr(before[role], name), 1), round(getattr(after[role], name), 1)]
        for name in ("rss_mb", "num_threads", "num_fds")
    }
    return values | {
        "num_lives": len(lives),
        "longest_life_s": round(longest[-1].at - longest[0].at),
        "slope_mb_per_min": round(slope.value, 3) if slope else None,
        "slope_interval_mb_per_min": round(slope.interval, 3) if slope else None,
        "rss_mb_by_time": [round(sample.rss_mb, 1) for sample in longest[:: max(1, len(longest) // 20)]],
    }


def _problems(report: dict[str, Any]) -> list[str]:
    books, queue, found = report["books"], report["books"]["queue"], []
    dropped = {reason: n for reason, n in queue["dropped"].items() if reason not in PRODUCERS_OWN}
    settled = queue["num_done"] + sum(dropped.values()) + queue["depth"] + queue["pending"]
    most = queue["num_done"] + sum(queue["dropped"].values())
    checks = {
        f"put {queue['num_put']}, settled {settled}": settled == queue["num_put"],
        "nothing was described": queue["num_done"] > 0,
        "an event came twice": books["num_events"] == books["num_event_ids"],
        f"answers {books['num_answered']}, done {queue['num_done']}, done or dropped {most}": (
            queue["num_done"] <= books["num_answered"] <= most
        ),
        f"events that wait for ever: {books['num_unsettled']}": books["num_unsettled"] == 0,
        "events were not posted": books["num_answered_but_not_posted"] == 0,
        "webhooks were given up": books["output"]["num_dead"] == 0,
        f"exit code {report['exit_code']}": report["exit_code"] == 0,
        f"processes {report['num_processes']}": report["num_processes"][1] <= report["num_processes"][0],
    }
    found += [problem for problem, is_well in checks.items() if not is_well]
    for role, growth in report["growth"].items():
        found += [f"{role}: {problem}" for problem in _grown(growth)]
    return found


def _grown(growth: dict[str, Any]) -> list[str]:
    names = ("num_threads", "num_fds")
    found = [f"{name} {growth[name]}" for name in names if growth[name][1] > growth[name][0] + MAX_NEW[name]]
    if growth["rss_mb"][1] > growth["rss_mb"][0] * MAX_GROWTH:
        found.append(f"rss_mb {growth['rss_mb']}")
    slope, interval = growth["slope_mb_per_min"], growth["slope_interval_mb_per_min"]
    if growth["longest_life_s"] >= LONG_S and slope - interval > MAX_SLOPE_MB_PER_MIN:
        found.append(f"grows by {slope} ± {interval} MB a minute")
    return found


def _spread(times: list[float]) -> dict[str, float]:
    return {"n": len(times), "p50": statistics.median(times), "max": max(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--cameras", type=int, default=8)
    parser.add_argument("--every", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", nargs="*", default=[], metavar="FAULT")
    parser.add_argument("--keep", type=Path, help="folder for the logs; it is kept")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        report = run(options.seconds, options.cameras, options.every, options.seed, folder, options.without)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report, indent=2))
    sys.exit(1 if report["problems"] else 0)


if __name__ == "__main__":
    main()
