"""The describe dispatcher: jobs from the queue, one engine request each, answers back into the queue.

It takes a job only when the engine has a credit for it, so the backlog stays in Redis, where it can be seen,
replaced and expired. An error never becomes a description: it is stored as an error, tried again, or ends
among the dead letters.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from PIL import Image

from appliance.images import ImageError, image_from_bytes
from appliance.jobs import DescribeJob, Description, Timings, decode_job, encode_description
from appliance.prompts import context_line, describe_messages, detection_line
from appliance.tasks import end_all
from queues.consumer import JobConsumer
from queues.errors import QueueError
from queues.types import Delivery
from vlm_engine import GenerationRequest, SamplingParams, TokenEvent
from vlm_engine import Timings as EngineTimings
from vlm_engine.errors import EngineError, RequestError

logger = logging.getLogger(__name__)

TAKE_BLOCK_MS = 500
ENGINE_PAUSE_S = 1.0
# What becomes of a delivery: a text; an error for good; it comes again; the last try failed; another
# worker was first; the body is no job.
OUTCOMES = ("described", "failed", "retried", "dead", "duplicate", "invalid")


class VisionLanguageModel(Protocol):
    """What answers a request: the engine in this process, or a client of one elsewhere."""

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""

    @property
    def unhealthy_reason(self) -> str | None:
        """Why requests do not move, or None."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        """Events of one request until its last; closing the iterator cancels the request."""


class DescribeError(Exception):
    """The model gave no description this time; another try may."""


def prompt_of(
    job: DescribeJob, image: Image.Image, *, earlier: Sequence[Image.Image] = (), has_context: bool = False
) -> list[dict[str, Any]]:
    """The messages that put `job` to the model: instruction, pictures, what the detector saw in the last.

    With `has_context`, unless the job says otherwise, also which camera, when and in which zones.
    """
    left, width = (job.crop[0], job.crop[2] - job.crop[0]) if job.crop else (0.0, job.width)
    centers = [((d["box"]["x1"] + d["box"]["x2"]) / 2 - left) / max(width, 1) for d in job.detections]
    shown = [(d, x) for d, x in zip(job.detections, centers, strict=True) if not job.crop or 0 <= x <= 1]
    line = detection_line([d["name"] for d, _ in shown], [x for _, x in shown])
    context = ""
    if has_context if job.has_context is None else job.has_context:
        zones = [(d["name"], d.get("zones", ())) for d, _ in shown]
        context = context_line(job.camera_name or job.camera, job.taken, zones)
    return describe_messages(job.prompt, image, line, earlier=earlier, context=context)


def prompt_text(messages: list[dict[str, Any]]) -> str:
    """The messages as one text for people, `[image]` in the picture's place."""
    parts = messages[0]["content"]
    return "".join(part["text"] if part["type"] == "text" else "[image]" for part in parts)


class Describer:
    """Runs until cancelled; at most `concurrency` descriptions are with the engine at once.

    `on_settled` gets every outcome with the picture as JPEG: descriptions, errors, and what was given up
    after its last delivery and lies among the dead letters; the picture is empty when none is to be kept.
    With `has_context` the model is told camera, time and zones, unless a job says otherwise.
    `outcomes` counts them, see `OUTCOMES`.
    """

    def __init__(
        self,
        consumer: JobConsumer,
        model: VisionLanguageModel,
        *,
        concurrency: int,
        max_tokens: int,
        has_context: bool = False,
        on_settled: Callable[[Description, bytes], object] = lambda description, jpeg: None,
    ) -> None:
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._consumer = consumer
        self._model = model
        self._sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self._has_context = has_context
        self._on_settled = on_settled
        self._concurrency = concurrency
        self._running: set[asyncio.Task[None]] = set()

    @property
    def num_described(self) -> int:
        """Descriptions made."""
        return self.outcomes["described"]

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
            return []
        try:
            return await self._consumer.take(self._concurrency - len(self._running), TAKE_BLOCK_MS)
        except QueueError as error:
            logger.error("no jobs can be taken: %s", error)
            await asyncio.sleep(ENGINE_PAUSE_S)
            return []

    async def _handle(self, delivery: Delivery) -> None:
        try:
            await self._answer(delivery)
        except QueueError as error:
            # why: unanswered jobs come back by themselves once the queue is there again.
            logger.error("job=%s could not be settled: %s", delivery.job.job_id, error)

    async def _answer(self, delivery: Delivery) -> None:
        try:
            job = decode_job(delivery.job.body)
        except ValueError as error:
            logger.error("job=%s is not a describe job: %s", delivery.job.job_id, error)
            self.outcomes["invalid"] += 1
            await self._consumer.fail(delivery, f"not a describe job: {error}")
            return
        try:
            description = await self._describe(job, delivery)
        except (DescribeError, EngineError) as error:
            await self._give_up(job, delivery, str(error))
            return
        # why: whoever follows the results must not be told before this listener, who also gets the picture.
        self._on_settled(description, _snapshot(job))
        outcome = "failed" if description.error is not None else "described"
        is_first = await self._consumer.finish(delivery, encode_description(description))
        self.outcomes[outcome if is_first else "duplicate"] += 1

    async def _give_up(self, job: DescribeJob, delivery: Delivery, error: str) -> None:
        logger.warning("camera=%s job=%s was not described: %s", job.camera, job.job_id, error)
        is_last = delivery.times_delivered >= self._consumer.config.max_deliveries
        is_retried = await self._consumer.fail(delivery, error)
        self.outcomes["retried" if is_retried else "dead"] += 1
        if not is_retried and is_last:
            description = Description.of(job, prompt=job.prompt, described_at=time.time(), error=error)
            self._on_settled(description, _snapshot(job))

    async def _describe(self, job: DescribeJob, delivery: Delivery) -> Description:
        """The answer, with an error in place of the text when trying again cannot help."""
        try:
            *earlier, image = await asyncio.to_thread(_pictures, job)
        except ImageError as broken:
            return Description.of(job, prompt=job.prompt, described_at=time.time(), error=str(broken))
        messages = prompt_of(job, image, earlier=earlier, has_context=self._has_context)
        text, error, timings = None, None, Timings(queue_ms=delivery.queue_ms)
        try:
            text, last = await self._generate(delivery, messages)
            error = _refusal(text, last)
            timings = _timings(delivery, last)
        except RequestError as refused:
            error = str(refused)
        return Description.of(
            job,
            prompt=prompt_text(messages),
            described_at=time.time(),
            text=None if error else text,
            error=error,
            model=self._model.model_name,
            timings=timings,
        )

    async def _generate(self, delivery: Delivery, messages: list[dict[str, Any]]) -> tuple[str, TokenEvent]:
        job = delivery.job
        request = GenerationRequest(
            request_id=f"describe-{job.job_id}-{delivery.times_delivered}",
            messages=messages,
            sampling=self._sampling,
            priority="background",
            tenant=job.key,
            expires_at=None if job.expires_at is None else time.monotonic() + job.expires_at - time.time(),
        )
        pieces = []
        async for event in self._model.generate(request):
            pieces.append(event.text)
            if event.finish_reason is not None:
                return "".join(pieces).strip(), event
        raise DescribeError("the engine ended without a last event")


def _pictures(job: DescribeJob) -> list[Image.Image]:
    return [image_from_bytes(jpeg) for jpeg in (*job.earlier, job.image)]


def _snapshot(job: DescribeJob) -> bytes:
    return job.image if job.has_snapshot else b""


def _refusal(text: str, last: TokenEvent) -> str | None:
    """Why `text` is no description, None when it is one; raises `DescribeError` when another try may help."""
    if last.finish_reason in {"error", "cancelled"}:
        raise DescribeError(last.error or f"the engine ended with {last.finish_reason}")
    if last.finish_reason == "expired":
        return "expired before the engine could start"
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
