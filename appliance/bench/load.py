"""The load generator: chats one after the other, frames at their times."""

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field

from appliance.bench.exposition import Growth
from appliance.bench.plan import LoadPlan
from appliance.bench.target import Exchange, Target
from appliance.bench.traffic import chat_body, encoded, frame_body, num_frames_to_make
from vlm_engine.trace import StepTrace

DRAIN_S = 60.0
"""How long frames that were sent in time may be answered after the measured seconds."""

PAUSE_AFTER_ERROR_S = 0.5


@dataclass(slots=True)
class Recording:
    """All that happened in a run; `begin` to `end` is what counts, in seconds of `time.perf_counter`.

    `growth` is what the server counted meanwhile, `steps` what it recorded; None where it tells neither.
    """

    begin: float = 0.0
    end: float = 0.0
    chats: list[Exchange] = field(default_factory=list)
    frames: list[Exchange] = field(default_factory=list)
    num_pictures: int = 0
    growth: Growth | None = None
    steps: list[StepTrace] | None = None


async def run_load(target: Target, plan: LoadPlan, model: str) -> Recording:
    """Checks that the server answers, then puts the load on it.

    Raises `BenchError` when it does not answer one chat, or one frame where the plan has frames.
    """
    bodies = await asyncio.to_thread(
        lambda: [encoded(frame_body(plan, model, index)) for index in range(num_frames_to_make(plan))]
    )
    await target.check(encoded(chat_body(plan, model, random.Random(f"check {plan.seed}"))), "chat")
    if plan.has_frames:
        # why: a picture of its own, else the first one measured would come from a cache.
        await target.check(encoded(frame_body(plan, model, len(bodies))), "question about a picture")
    return await Load(target, plan, model, bodies).run()


class Load:
    """The load of `plan` on `target`; frames take `bodies` in turn, again and again."""

    def __init__(self, target: Target, plan: LoadPlan, model: str, bodies: list[bytes]) -> None:
        self._target, self._plan, self._model = target, plan, model
        self._bodies = itertools.cycle(bodies)
        self._recording = Recording(num_pictures=len(bodies))

    async def run(self) -> Recording:
        """Runs once to the end; failures are in the recording."""
        start = time.perf_counter()
        recording, plan = self._recording, self._plan
        recording.begin = start + plan.warm_up_s
        recording.end = recording.begin + plan.seconds
        chats = [asyncio.create_task(self._chat(index)) for index in range(plan.num_chats)]
        frames = [asyncio.create_task(self._frames_in_turn()) for _ in range(plan.frame_concurrency)]
        if plan.frame_rate:
            frames.append(asyncio.create_task(self._frames_on_time(start)))
        await _until(recording.begin, [*chats, *frames])
        before = await self._target.exposition()
        await _until(recording.end, [*chats, *frames])
        after = await self._target.exposition()
        recording.growth = Growth(before, after) if before and after else None
        await _cancel(chats)
        await _until(recording.end + DRAIN_S, frames)
        await _cancel(frames)
        recording.steps = await self._target.steps()
        return recording

    async def _chat(self, index: int) -> None:
        words = random.Random(f"chat {index} {self._plan.seed}")
        while True:
            body = encoded(chat_body(self._plan, self._model, words))
            await self._ask(body, self._recording.chats)

    async def _frames_in_turn(self) -> None:
        while time.perf_counter() < self._recording.end:
            await self._ask(next(self._bodies), self._recording.frames)

    async def _frames_on_time(self, start: float) -> None:
        async with asyncio.TaskGroup() as group:
            for index in itertools.count():
                due_at = start + index / self._plan.frame_rate
                if due_at >= self._recording.end:
                    return
                await asyncio.sleep(due_at - time.perf_counter())
                group.create_task(self._ask(next(self._bodies), self._recording.frames, due_at))

    async def _ask(self, body: bytes, into: list[Exchange], due_at: float | None = None) -> None:
        exchange = Exchange(time.perf_counter() if due_at is None else due_at)
        # invariant: it is recorded before it is sent, so that what is cut off at the end is seen too.
        into.append(exchange)
        await self._target.ask(body, exchange)
        if exchange.error and due_at is None:
            await asyncio.sleep(PAUSE_AFTER_ERROR_S)


async def _until(end: float, tasks: list[asyncio.Task[None]]) -> None:
    """Waits until `end` or until nothing runs any more; an error of a task is raised."""
    waiting = set(tasks)
    while waiting and (left_s := end - time.perf_counter()) > 0:
        done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
