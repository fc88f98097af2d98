"""`appliance demo`, which `make demo` runs: the appliance on two drawn cameras, at work in the terminal.

It starts `serve` as a child and is then a client like any other: everything on the screen came over HTTP.
"""

import itertools
import json
import threading
import time
from collections import deque

from appliance.client import ApplianceClient, ChatTimes, ClientError, percentile, user_message
from appliance.demo.view import DemoView, event_line
from appliance.ports import listen
from appliance.processes import Child, ChildError
from appliance.settings import Settings, SettingsError, to_json

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 15.0
LAST_WORDS_S = 2.0
STATUS_EVERY_S = 0.5
PROBE_EVERY_S = 4.0
MAX_TOKENS = 48
PICTURE_QUESTIONS = ("How many people are there?", "Is it day or night?", "Is there a car?")
TEXT_QUESTION = "What can you do?"


def run_demo(settings: Settings, seconds: float | None = None) -> None:
    """Starts the appliance, shows it until Ctrl-C or for `seconds`, and ends all that it started.

    Raises `SettingsError` when the settings have no camera or the port is taken, `ChildError` when the
    appliance does not come up.
    """
    if not settings.cameras:
        raise SettingsError("cameras is empty: name one, or leave out --config, which shows the demo's own")
    started_at = time.monotonic()
    settings = _with_port(settings)
    url = settings.server.url
    with DemoView() as view, ApplianceClient(url, settings.server.key) as client:
        child = Child("appliance.serve:child_main", to_json(settings), is_heard=True)
        listener = threading.Thread(target=_pass_on, args=(child, view), daemon=True)
        listener.start()
        try:
            _wait_until_ready(child, client, view)
            elapsed_s = time.monotonic() - started_at
            view.say(_where_to_look(url, client.model_name(), settings, elapsed_s), is_verbatim=True)
            _show(child, client, settings, view, seconds)
        except KeyboardInterrupt:
            pass
        finally:
            view.status("stopping …")
            child.stop(STOP_TIMEOUT_S)
            listener.join(LAST_WORDS_S)
    print("stopped")


def _pass_on(child: Child, view: DemoView) -> None:
    """Shows what the appliance says of itself, above the line that is always current."""
    for line in child.lines():
        view.report(line)


def _with_port(settings: Settings) -> Settings:
    """The settings with the port that is going to be used, in place of 0."""
    with listen(settings.server) as listener:
        port = listener.getsockname()[1]
    return settings.model_copy(update={"server": settings.server.model_copy(update={"port": port})})


def _wait_until_ready(child: Child, client: ApplianceClient, view: DemoView) -> None:
    started_at, is_ready = time.monotonic(), threading.Event()
    # why: a server that loads takes a question and answers it when it is ready
    threading.Thread(target=_ask_until_ready, args=(client, is_ready), daemon=True).start()
    while not is_ready.wait(STATUS_EVERY_S):
        elapsed_s = time.monotonic() - started_at
        if child.exit_code is not None:
            raise ChildError("the appliance ended while it started: see the lines above")
        if elapsed_s > START_TIMEOUT_S:
            raise ChildError(f"the appliance did not come up within {START_TIMEOUT_S:.0f} s")
        view.status(f"loading the models … {elapsed_s:.0f} s")


def _ask_until_ready(client: ApplianceClient, is_ready: threading.Event) -> None:
    while not _is_ready(client):
        time.sleep(STATUS_EVERY_S)
    is_ready.set()


def _is_ready(client: ApplianceClient) -> bool:
    try:
        return all(client.newest_frame(camera["name"]) for camera in client.cameras())
    except ClientError:
        return False


def _where_to_look(url: str, model: str, settings: Settings, elapsed_s: float) -> str:
    camera = next(iter(settings.cameras))
    messages = [{"role": "user", "content": TEXT_QUESTION}]
    body = json.dumps({"model": model, "messages": messages})
    return f"""
The appliance is up after {elapsed_s:.0f} s: {len(settings.cameras)} cameras are watched and described.

  page    {url}/
  chat    .venv/bin/appliance chat --url {url} --camera {camera}
  API     curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' \\
            -d '{body}'
  events  curl -sN {url}/v1/events -H 'Accept: text/event-stream'

Ctrl-C stops everything.
"""


def _show(
    child: Child, client: ApplianceClient, settings: Settings, view: DemoView, seconds: float | None
) -> None:
    """Descriptions, questions and the status line until the time is over or the child ends."""
    talker = Talker(client, tuple(settings.cameras), view)
    for target in (lambda: _print_events(client, view), talker.run):
        threading.Thread(target=target, daemon=True).start()
    deadline = float("inf") if seconds is None else time.monotonic() + seconds
    while time.monotonic() < deadline:
        if child.exit_code is not None:
            raise ChildError(f"the appliance ended with code {child.exit_code}: see the lines above")
        view.status(_status_line(client, talker))
        time.sleep(STATUS_EVERY_S)


def _print_events(client: ApplianceClient, view: DemoView) -> None:
    shown: deque[str] = deque(maxlen=1000)
    try:
        for event in client.events():
            # why: an event is told again when its track moves on
            if event["described_at"] and event["id"] not in shown:
                shown.append(event["id"])
                view.say(event_line(event))
    except ClientError:
        return


def _status_line(client: ApplianceClient, talker: "Talker") -> str:
    try:
        cameras, queue = client.cameras(), client.health().get("queue", {})
    except ClientError:
        return "the appliance does not answer"
    fps = sum(camera["fps"] for camera in cameras)
    return (
        f" cameras {fps:.1f} frames/s | "
        f"{queue.get('num_done', 0)} described, {queue.get('depth', 0)} waiting | "
        f"chat, from token to token: {talker.gaps} "
    )


class Talker:
    """Asks the demo's questions once, aloud, and then goes on asking in silence: that is the chat load."""

    def __init__(self, client: ApplianceClient, cameras: tuple[str, ...], view: DemoView) -> None:
        self._client = client
        self._cameras = cameras
        self._view = view
        self._gaps_ms: deque[float] = deque(maxlen=2000)

    @property
    def gaps(self) -> str:
        """Milliseconds between tokens of the last answers, in words."""
        gaps_ms = list(self._gaps_ms)
        if not gaps_ms:
            return "no answer yet"
        return f"p50 {percentile(gaps_ms, 0.5):.0f} ms, p99 {percentile(gaps_ms, 0.99):.0f} ms"

    def run(self) -> None:
        """Asks for ever; meant for a daemon thread."""
        for question, camera in zip(PICTURE_QUESTIONS, itertools.cycle(self._cameras), strict=False):
            self._try(question, camera, is_aloud=True)
        self._try(TEXT_QUESTION, None, is_aloud=True)
        for question, camera in zip(
            itertools.cycle(PICTURE_QUESTIONS), itertools.cycle(self._cameras), strict=False
        ):
            time.sleep(PROBE_EVERY_S)
            self._try(question, camera, is_aloud=False)

    def _try(self, question: str, camera: str | None, *, is_aloud: bool) -> None:
        try:
            self._ask(question, camera, is_aloud=is_aloud)
        except ClientError as error:
            if is_aloud:
                self._view.say(f"{camera or 'chat'} > {question}: {error}")

    def _ask(self, question: str, camera: str | None, *, is_aloud: bool) -> None:
        picture = ("image/jpeg", self._client.newest_frame(camera)) if camera else None
        times, model = ChatTimes(), self._client.model_name()
        message = user_message(question, picture)
        answer = "".join(self._client.stream_chat([message], model=model, max_tokens=MAX_TOKENS, times=times))
        self._gaps_ms.extend(times.itl_ms)
        if is_aloud:
            self._view.say(f"{camera or 'chat'} > {question}\n{'':8}{answer}", style="bold")
