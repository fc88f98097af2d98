"""The describe dispatcher: jobs from the queue, one engine request each, answers back into the queue.

It takes a job only when the engine has a credit for it, so the backlog stays in Redis, where it can be seen,
replaced and expired. An error never becomes a description: it is stored as an error, tried again, or ends
among the dead letters.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol

from PIL import Image

from appliance.describe_books import DescribeBooks, DescribeStats
from appliance.images import ImageError, image_from_bytes
from appliance.jobs import DescribeJob, Description, Quality, Timings, decode_job, encode_description
from appliance.ladder import Ladder, LadderConfig, Rung
from appliance.pace import Pace
from appliance.prompts import context_line, describe_messages, detection_line
from appliance.tasks import end_all
from queues.consumer import JobConsumer
from queues.errors import QueueError
from queues.types import Delivery
from vlm_engine import GenerationRequest, SamplingParams, StructuredOutput, TokenEvent
from vlm_engine import Timings as EngineTimings
from vlm_engine.errors import EngineError, RequestError

logger = logging.getLogger(__name__)

TAKE_BLOCK_MS = 500
ENGINE_PAUSE_S = 1.0
WARN_AFTER_EXPIRED = 10
FORM_FACTOR = 4
"""An answer in a form may be so many times longer than a text: its names are tokens too, and half is none."""


class VisionLanguageModel(Protocol):
    """What answers a request: the engine in this process, or a client of one elsewhere."""

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""

    @property
    def reads_videos(self) -> bool:
        """Whether it takes videos beside images."""

    @property
    def unhealthy_reason(self) -> str | None:
        """Why requests do not move, or None."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        """Events of one request until its last; closing the iterator cancels the request."""


class DescribeError(Exception):
    """The model gave no description this time; another try may."""


class TooLate(Exception):
    """The frame was too old before the model could look at it."""


def prompt_of(
    job: DescribeJob,
    image: Image.Image,
    *,
    earlier: Sequence[Image.Image] = (),
    has_context: bool = False,
    reads_videos: bool = False,
) -> list[dict[str, Any]]:
    """The messages that put `job` to the model: instruction, pictures, what the detector saw in the last.

    With `has_context`, unless the job says otherwise, also which camera, when and in which zones. Pictures go
    as a clip where the job wants that, the model `reads_videos`, and they are of one size.
    """
    left, width = (job.crop[0], job.crop[2] - job.crop[0]) if job.crop else (0.0, job.width)
    centers = [((d["box"]["x1"] + d["box"]["x2"]) / 2 - left) / max(width, 1) for d in job.detections]
    shown = [(d, x) for d, x in zip(job.detections, centers, strict=True) if not job.crop or 0 <= x <= 1]
    line = detection_line([d["name"] for d, _ in shown], [x for _, x in shown])
    context = ""
    if has_context if job.has_context is None else job.has_context:
        zones = [(d["name"], [job.zone_names.get(z, z) for z in d.get("zones", ())]) for d, _ in shown]
        context = context_line(job.camera_name or job.camera, job.taken, zones)
    is_clip = reads_videos and all(picture.size == image.size for picture in earlier)
    clip_fps = job.clip_fps if is_clip else None
    return describe_messages(job.prompt, image, line, earlier=earlier, context=context, clip_fps=clip_fps)


def prompt_text(messages: list[dict[str, Any]]) -> str:
    """The messages as one text for people, `[image]` or `[video]` in the picture's place."""
    parts = messages[0]["content"]
    return "".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in parts)


def scale_images(messages: list[dict[str, Any]], scale: float) -> None:
    """Ask for so much of the size to which some families enlarge every picture, however small it comes."""
    for part in messages[0]["content"]:
        if part["type"] == "image" and scale < 1:
            part["scale"] = scale


class Describer:
    """Runs until cancelled; at most `concurrency` descriptions are with the engine at once.

    `on_settled` gets every outcome with the picture as JPEG: descriptions, errors, and what was given up
    after its last delivery and lies among the dead letters, but not what was too old to be looked at, which
    the queue counts as `expired`; the picture is empty when none is to be kept. With `has_context` the model
    is told camera, time and zones, unless a job says otherwise. `ladder` says how well live frames are
    described (None: always in full).
    """

    def __init__(
        self,
        consumer: JobConsumer,
        model: VisionLanguageModel,
        *,
        concurrency: int,
        max_tokens: int,
        has_context: bool = False,
        ladder: Ladder | None = None,
        on_settled: Callable[[Description, bytes], Awaitable[object]],
    ) -> None:
        self._books = DescribeBooks()
        self._ladder = ladder or Ladder(LadderConfig(until="full"), max_tokens=max_tokens, max_age_s=60.0)
        self._pace = Pace()
        self._others_wait = False
        self._consumer = consumer
        self._model = model
        self._has_context = has_context
        self._on_settled = on_settled
        self._concurrency = concurrency
        self._running: set[asyncio.Task[None]] = set()

    @property
    def num_described(self) -> int:
        """Descriptions made."""
        return self._books.outcomes["described"]

    def stats(self) -> DescribeStats:
        """What was done so far, and where the ladder stands."""
        return self._books.snapshot(self._ladder)

    async def run(self) -> None:
        """Takes and answers jobs until cancelled; what is in hand then goes back to the queue."""
        try:
            while True:
                if len(self._running) >= self._concurrency:
                    await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                for delivery in await self._take():
                    task = asyncio.create_task(self._handle(delivery), name=f"describe-{delivery.job.job_id}")
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
        finally:
            await end_all(list(self._running))

    async def _take(self) -> list[Delivery]:
        if self._model.unhealthy_reason is not None:
            # why: jobs wait in the queue for the engine; taking them now would use up their deliveries.
            await asyncio.sleep(ENGINE_PAUSE_S)
            self._pace.stand_still(time.monotonic())
            return []
        num_free, hold = self._concurrency - len(self._running), self._pace.held(time.monotonic())
        try:
            deliveries = await self._consumer.take(num_free, TAKE_BLOCK_MS, hold=hold)
        except QueueError as error:
            logger.error("no jobs can be taken: %s", error)
            await asyncio.sleep(ENGINE_PAUSE_S)
            return []
        self._climb(hold)
        return deliveries

    def _climb(self, hold: Collection[str]) -> None:
        """Let the ladder see who still waits, but for those that are held back."""
        now = time.monotonic()
        for camera, wait_s in self._consumer.expired_s:
            self._ladder.observe_expired(now, self._pace.own_wait_s(camera, now, wait_s))
        waits_s = {camera: s for camera, s in self._consumer.waits_s.items() if camera not in hold}
        self._others_wait = bool(waits_s)
        level_before = self._ladder.level
        level = self._ladder.update(now, self._pace.longest_wait_s(waits_s, now))
        if level != level_before:
            wait_s, rung = self._ladder.wait_s, self._ladder.rung.name
            logger.warning("frames wait %.1f s: describing at level %d (%s)", wait_s, level, rung)

    async def _handle(self, delivery: Delivery) -> None:
        task = _Task(delivery, self._ladder.level, self._ladder.rung, is_urgent=self._others_wait)
        wait_s = self._pace.own_wait_s(delivery.job.key, task.taken_s, delivery.waited_ms / 1e3)
        self._pace.begin(delivery.job.key, task.taken_s, task.rung.interval_s)
        try:
            engine_s = await self._answer(task)
            is_live = delivery.times_delivered == 1 and delivery.job.expires_at is not None
            if engine_s is not None and is_live:
                self._ladder.observe(time.monotonic(), wait_s + engine_s, task.level)
        except QueueError as error:
            # why: unanswered jobs come back by themselves once the queue is there again.
            logger.error("job=%s could not be settled: %s", delivery.job.job_id, error)

    async def _answer(self, task: "_Task") -> float | None:
        """Settles one job; the seconds that it waited inside of the engine, None when there is no answer."""
        delivery = task.delivery
        try:
            job = decode_job(delivery.job.body)
        except ValueError as error:
            logger.error("job=%s is not a describe job: %s", delivery.job.job_id, error)
            self._books.settle("invalid")
            await self._consumer.fail(delivery, f"not a describe job: {error}")
            return None
        try:
            description, engine_s = await self._describe(job, task)
        except TooLate:
            await self._let_go(delivery)
            now = time.monotonic()
            self._ladder.observe_expired(now, now - task.taken_s)
            return None
        except (DescribeError, EngineError) as error:
            await self._give_up(job, delivery, str(error))
            return None
        if await self._withdraw(delivery):
            return None
        # why: whoever follows the results must not be told before this listener, who also gets the picture.
        await self._on_settled(description, _snapshot(job))
        outcome = "failed" if description.error is not None else "described"
        is_first = await self._consumer.finish(delivery, encode_description(description))
        self._books.settle(outcome if is_first else "duplicate")
        if is_first and description.text is not None:
            # why: the clock may have been set back since
            latency_s = max(0.0, description.described_at - job.captured_at)
            self._books.describe(job.camera, task.rung.name, latency_s)
        return engine_s

    async def _withdraw(self, delivery: Delivery) -> bool:
        """Drop a job if its camera was masked, paused or removed meanwhile; whether it was."""
        if not await self._consumer.is_withdrawn(delivery):
            return False
        await self._consumer.drop(delivery, "withdrawn")
        self._books.settle("withdrawn")
        return True

    async def _let_go(self, delivery: Delivery) -> None:
        await self._consumer.drop(delivery, "expired")
        self._books.settle("expired")
        if self._books.num_expired_in_a_row == WARN_AFTER_EXPIRED:
            logger.warning(
                "the last %d frames were too old before the engine had encoded them: "
                "raise describe.max_age_s, or give it smaller pictures (describe.max_side)",
                WARN_AFTER_EXPIRED,
            )

    async def _give_up(self, job: DescribeJob, delivery: Delivery, error: str) -> None:
        if await self._withdraw(delivery):
            return
        logger.warning("camera=%s job=%s was not described: %s", job.camera, job.job_id, error)
        # why: first, as in `_answer`; the queue tells of dead letters too.
        if delivery.times_delivered >= self._consumer.config.max_deliveries:
            description = Description.of(job, prompt=job.prompt, described_at=time.time(), error=error)
            await self._on_settled(description, _snapshot(job))
        is_retried = await self._consumer.fail(delivery, error)
        self._books.settle("retried" if is_retried else "dead")

    async def _describe(self, job: DescribeJob, task: "_Task") -> tuple[Description, float]:
        """The answer, an error for its text when trying again cannot help, and seconds in the engine's queue.

        Raises `TooLate`, `DescribeError` or another `EngineError`.
        """
        try:
            *earlier, image = await asyncio.to_thread(_pictures, job, task.rung)
        except ImageError as broken:
            return Description.of(job, prompt=job.prompt, described_at=time.time(), error=str(broken)), 0.0
        messages = prompt_of(
            job,
            image,
            earlier=earlier,
            has_context=self._has_context,
            reads_videos=self._model.reads_videos,
        )
        if job.answer_schema is not None:
            task.max_tokens = FORM_FACTOR * self._ladder.rungs[0].max_tokens
        scale_images(messages, task.rung.scale)
        text, error, last = None, None, TokenEvent("")
        try:
            text, last = await self._generate(task, messages, _form_of(job))
            error = _refusal(text, last, has_form=job.answer_schema is not None)
        except RequestError as refused:
            error = str(refused)
        description = Description.of(
            job,
            prompt=prompt_text(messages),
            described_at=time.time(),
            text=None if error else text,
            error=error,
            model=self._model.model_name,
            timings=_timings(task.delivery, last),
            quality=task.quality(image, last),
            num_replaced=task.delivery.num_replaced,
        )
        # why: what nobody waits for, the engine may put off by itself; that is no overload.
        engine_ms = (last.timings or EngineTimings()).queue_ms if task.is_urgent else 0.0
        return description, engine_ms / 1e3

    async def _generate(
        self, task: "_Task", messages: list[dict[str, Any]], form: StructuredOutput | None
    ) -> tuple[str, TokenEvent]:
        expires_at = task.expires_at
        if expires_at is not None and expires_at <= time.monotonic():
            raise TooLate
        request = GenerationRequest(
            request_id=f"describe-{task.delivery.job.job_id}-{task.delivery.times_delivered}",
            messages=messages,
            sampling=SamplingParams(max_tokens=task.max_tokens, temperature=0.0, structured=form),
            priority="background",
            tenant=task.delivery.job.key,
            expires_at=expires_at,
            # why: the engine takes its time for what is in time, and cannot know who waits out here.
            wanted_at=task.taken_s if task.is_urgent else None,
        )
        pieces = []
        async for event in self._model.generate(request):
            pieces.append(event.text)
            if event.finish_reason == "expired":
                raise TooLate
            if event.finish_reason is not None:
                return "".join(pieces).strip(), event
        raise DescribeError("the engine ended without a last event")


def _snapshot(job: DescribeJob) -> bytes:
    return job.image if job.has_snapshot else b""


class _Task:
    """One delivery in hand: since when, how well it is to be described, and whether others wait for it."""

    def __init__(self, delivery: Delivery, level: int, rung: Rung, *, is_urgent: bool = False) -> None:
        self.delivery, self.level, self.rung, self.is_urgent = delivery, level, rung, is_urgent
        self.taken_s = time.monotonic()
        self.max_tokens = rung.max_tokens

    @property
    def expires_at(self) -> float | None:
        """On the engine's clock; None for never.

        why: by how long it was wanted less how long it was queued, as the producer's clock may differ.
        """
        job = self.delivery.job
        if job.expires_at is None:
            return None
        return self.taken_s + job.expires_at - job.created_at - self.delivery.queue_ms / 1e3

    def quality(self, image: Image.Image, last: TokenEvent) -> Quality:
        """The record of it."""
        return Quality(
            level=self.level,
            rung=self.rung.name,
            width=image.width,
            height=image.height,
            max_tokens=self.max_tokens,
            is_cut=last.finish_reason == "length",
        )


def _pictures(job: DescribeJob, rung: Rung) -> list[Image.Image]:
    return [_picture(jpeg, rung) for jpeg in (*job.earlier, job.image)]


def _picture(jpeg: bytes, rung: Rung) -> Image.Image:
    """The picture in the size that the rung allows; raises `ImageError`."""
    image = image_from_bytes(jpeg)
    side = rung.side(max(image.size))
    if side < max(image.size):
        image.thumbnail((side, side), Image.Resampling.BICUBIC)
    return image


def _form_of(job: DescribeJob) -> StructuredOutput | None:
    """The form that the answer must have; raises `RequestError` for a schema that is none."""
    schema = job.answer_schema
    return None if schema is None else StructuredOutput.of_json(schema, "describe.schema")


def _refusal(text: str, last: TokenEvent, *, has_form: bool) -> str | None:
    """Why `text` is no description, None when it is one; raises `DescribeError` when another try may help."""
    if last.finish_reason in {"error", "cancelled"}:
        raise DescribeError(last.error or f"the engine ended with {last.finish_reason}")
    if has_form and last.finish_reason == "length":
        return "the answer was cut before its JSON was complete: raise describe.max_tokens"
    return None if text else "the model answered with an empty text"


def _timings(delivery: Delivery, last: TokenEvent) -> Timings:
    spent = last.timings or EngineTimings()
    return Timings(
        queue_ms=round(delivery.queue_ms + spent.queue_ms, 1),
        preprocess_ms=round(spent.preprocess_ms, 1),
        encode_ms=round(spent.encode_ms, 1),
        prefill_ms=round(spent.prefill_ms, 1),
        decode_ms=round(spent.decode_ms, 1),
    )
