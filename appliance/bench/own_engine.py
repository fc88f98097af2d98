"""An engine of one's own for the time of a run: a child process, started and ended here."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from appliance.bench.errors import BenchError
from appliance.ports import listen
from appliance.processes import Child
from appliance.settings import ServerSettings, Settings, to_json

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 15.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class OwnEngine:
    """A child that serves: its address, and how long it took from its start to its first answer."""

    url: str
    start_s: float


@contextmanager
def own_engine(settings: Settings) -> Iterator[OwnEngine]:
    """The engine of `settings` on a free loopback port, without cameras; it ends with the block.

    Raises `BenchError` when it does not come up.
    """
    with listen(ServerSettings(port=0)) as listener:
        port = listener.getsockname()[1]
    settings = settings.model_copy(update={"server": ServerSettings(port=port), "cameras": {}})
    started_at = time.monotonic()
    child = Child("appliance.bench.serving:child_main", to_json(settings))
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(child, url)
        yield OwnEngine(url, round(time.monotonic() - started_at, 2))
    finally:
        child.stop(STOP_TIMEOUT_S)


def _wait_until_ready(child: Child, url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(timeout=1.0, trust_env=False) as http:
        while not _is_ready(http, url):
            if child.exit_code is not None:
                raise BenchError("the engine ended while it started: see the lines above")
            if time.monotonic() > deadline:
                raise BenchError(f"the engine did not come up within {START_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)


def _is_ready(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(f"{url}/v1/models").is_success
    except httpx.HTTPError:
        return False
