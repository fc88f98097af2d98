"""What a person sees while `replay` runs: one line of progress on standard error, if that is a terminal."""

import asyncio
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from appliance.describer import Describer
from appliance.player import PlayCounts
from queues.consumer import JobConsumer
from queues.errors import QueueError
from vision.readable import readable

REFRESH_S = 0.25


class Display:
    """A progress bar with frames/s, detections, descriptions and queue depth; silent where nobody looks."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, state="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.update(self._task, visible=False)
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line about the run itself."""
        self._console.print(escape(readable(text)), highlight=False, soft_wrap=True)

    def hint(self, text: str) -> None:
        """What is going on now; only where somebody watches."""
        self._progress.update(self._task, description=escape(text))

    def print(self, line: str) -> None:
        """A line of the result, above the bar."""
        if self._progress.disable:
            print(line, flush=True)
        else:
            self._console.print(escape(line), highlight=False, soft_wrap=True)

    async def follow(self, counts: PlayCounts, describer: Describer, consumer: JobConsumer) -> None:
        """Shows the counts until cancelled."""
        if self._progress.disable:
            await asyncio.Event().wait()
        started_at = time.monotonic()
        while True:
            self._update(counts, describer, await _depth(consumer), time.monotonic() - started_at)
            await asyncio.sleep(REFRESH_S)

    def _update(self, counts: PlayCounts, describer: Describer, depth: int, elapsed_s: float) -> None:
        recording = counts.recording
        fps = counts.num_frames / max(elapsed_s, 1e-3)
        self._progress.update(
            self._task,
            description=escape(recording.name) if recording else "",
            total=recording.num_frames if recording else None,
            completed=counts.num_frames_of_recording,
            state=f"{fps:.1f} frames/s  {counts.num_detections} detections  "
            f"{describer.num_described} of {counts.num_jobs} descriptions  queue {depth}",
        )


async def _depth(consumer: JobConsumer) -> int:
    try:
        status = await consumer.status()
    except QueueError:
        return 0
    return status.depth + status.pending
