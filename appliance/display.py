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
TELL_EVERY_S = 10.0


class Display:
    """A progress bar with frames/s, detections, descriptions and queue depth; lines in a log."""

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
        """Shows the counts until cancelled: without a terminal as lines, while they change."""
        started_at, told = time.monotonic(), ""
        while True:
            await asyncio.sleep(TELL_EVERY_S if self._progress.disable else REFRESH_S)
            elapsed_s = max(time.monotonic() - started_at, 1e-3)
            state = (
                f"{counts.num_frames / elapsed_s:.1f} frames/s  {counts.num_detections} detections  "
                f"{describer.num_described} of {counts.num_jobs} descriptions  queue {await _depth(consumer)}"
            )
            if not self._progress.disable:
                self._update(counts, state)
            elif (done := f"{counts.num_frames} {describer.num_described}") != told:
                told = done
                self.say(_line(counts, state))

    def _update(self, counts: PlayCounts, state: str) -> None:
        recording = counts.recording
        self._progress.update(
            self._task,
            description=escape(recording.name) if recording else "",
            total=recording.num_frames if recording else None,
            completed=counts.num_frames_of_recording,
            state=state,
        )


def _line(counts: PlayCounts, state: str) -> str:
    recording = counts.recording
    of = f" of {recording.num_frames}" if recording and recording.num_frames else ""
    where = f"{recording.name}: frame {counts.num_frames_of_recording}{of}  " if recording else ""
    return where + state


async def _depth(consumer: JobConsumer) -> int:
    try:
        status = await consumer.status()
    except QueueError:
        return 0
    return status.depth + status.pending
