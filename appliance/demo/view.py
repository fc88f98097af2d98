"""The demo's screen: lines that stay, over one line that is always current."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

PLAIN_STATUS_EVERY_S = 10.0


class DemoView:
    """Prints lines from any thread; the status line is live on a terminal and seldom elsewhere."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._status_at = float("-inf")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def say(self, text: str, style: str = "", *, is_verbatim: bool = False) -> None:
        """A line that stays; on a terminal it is wrapped at words unless it is meant to be copied."""
        keep = is_verbatim or not self._console.is_terminal
        self._console.print(escape(text), style=style or None, soft_wrap=keep)

    def report(self, line: str) -> None:
        """A line of the appliance's own log: on a terminal above the current one, elsewhere as an error."""
        if self._console.is_terminal:
            self._console.print(escape(line), style="dim", soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def status(self, text: str) -> None:
        """What is so right now."""
        if self._console.is_terminal:
            self._live.update(Text(text, style="reverse"))
        elif time.monotonic() - self._status_at >= PLAIN_STATUS_EVERY_S:
            self._status_at = time.monotonic()
            self.say(text)


def event_line(event: Mapping[str, Any]) -> str:
    """One description as a line: when, where, what made it worth one, and what was said."""
    clock = time.strftime("%H:%M:%S", time.localtime(event["captured_at"]))
    text = event["description"] or f"(no description: {event['error']})"
    return f"{clock} [{event['camera']}] {event['label']} #{event['track_id']}: {text}"
