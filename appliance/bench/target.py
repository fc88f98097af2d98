"""The server that is measured, as a client sees it."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import msgspec

from appliance.bench.errors import BenchError
from appliance.bench.exposition import Exposition
from vlm_engine.trace import StepTrace

REQUEST_TIMEOUT_S = 300.0
_CONNECT_TIMEOUT_S = 5.0
_SHOWN_CHARACTERS = 300


@dataclass(slots=True)
class Exchange:
    """One request and how its answer came, in seconds of `time.perf_counter`.

    `due_at` is when it had to be sent, `chunks` are (time, new tokens) of those that brought tokens.
    """

    due_at: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    ended_at: float | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    num_tokens: int = 0
    has_counts: bool = False
    timings: dict[str, float] | None = None
    answer_id: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether the whole answer came."""
        return self.ended_at is not None and self.error is None

    def read(self, message: dict[str, Any], now: float) -> None:
        """Takes one message of the stream into account."""
        if problem := message.get("error"):
            self.error = _message_of(problem)
            return
        self.timings = message.get("timings") or self.timings
        self.answer_id = message.get("id") or self.answer_id
        usage, choices = message.get("usage"), message.get("choices")
        if usage:
            self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        if choices:
            self._count(choices[0].get("delta") or {}, usage, now)

    def _count(self, delta: dict[str, Any], usage: dict[str, Any] | None, now: float) -> None:
        """New tokens by the server's own count where it tells one, else one a chunk with text."""
        if usage and usage.get("completion_tokens") is not None:
            num_new = usage["completion_tokens"] - self.num_tokens
            self.has_counts = True
        else:
            num_new = int(any(delta.get(name) for name in ("content", "reasoning", "reasoning_content")))
        if num_new > 0:
            self.num_tokens += num_new
            self.chunks.append((now, num_new))


class Target:
    """An OpenAI-compatible server at `url` (with or without `/v1`); used inside one event loop."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parsed = httpx.URL(url.rstrip("/").removesuffix("/v1"))
            self.shown_url = str(parsed.copy_with(userinfo=b""))
            self._http = httpx.AsyncClient(
                base_url=parsed,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=httpx.Timeout(REQUEST_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise BenchError(f"{url}: {error}: check --url") from None

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def model_name(self, wanted: str | None) -> str:
        """`wanted` if it is served, without it the first served model; raises `BenchError`."""
        try:
            response = await self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code == httpx.codes.NOT_FOUND and wanted:
            return wanted
        names = self._names(response)
        if wanted and wanted not in names:
            raise BenchError(f"--model {wanted}: not served at {self.shown_url}; there is {', '.join(names)}")
        return wanted or names[0]

    async def ask(self, body: bytes, exchange: Exchange) -> None:
        """Sends a chat completion and reads its stream into `exchange`; failures are told there too."""
        try:
            async with self._stream(body) as response:
                await _read(response, exchange)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError) as error:
            exchange.error = f"{type(error).__name__}: {error}"[:_SHOWN_CHARACTERS]
        exchange.ended_at = time.perf_counter()

    async def check(self, body: bytes, what: str) -> None:
        """Asks once before the run; raises `BenchError` with what the server says against it."""
        exchange = Exchange(time.perf_counter())
        await self.ask(body, exchange)
        if exchange.error:
            raise BenchError(f"{self.shown_url} does not answer a {what}: {exchange.error}")
        if not exchange.num_tokens:
            raise BenchError(f"{self.shown_url} answers a {what} without a token: is it a chat model?")

    async def exposition(self) -> Exposition | None:
        """The server's `/metrics` as they are now; None when it has none that are known here."""
        try:
            response = await self._http.get("/metrics", timeout=_CONNECT_TIMEOUT_S)
        except httpx.HTTPError:
            return None
        return Exposition.parse(response.text) if response.is_success else None

    async def steps(self) -> "list[StepTrace] | None":
        """The steps that the server recorded, on the clock of `time.perf_counter`; None: it does not."""
        steps: list[StepTrace] = []
        while True:
            first = steps[-1].number + 1 if steps else 0
            try:
                asked_at = time.perf_counter()
                response = await self._http.get("/v1/trace", params={"first": first})
                told = msgspec.json.decode(response.content, type=_Trace) if response.is_success else None
            except (httpx.HTTPError, msgspec.MsgspecError):
                return None
            if told is None:
                return None
            if not told.steps:
                return steps
            offset_s = (asked_at + time.perf_counter()) / 2 - told.now_s
            steps += [_moved(step, offset_s) for step in told.steps]

    @asynccontextmanager
    async def _stream(self, body: bytes) -> AsyncIterator[httpx.Response]:
        headers = {"Content-Type": "application/json"}
        async with self._http.stream(
            "POST", "/v1/chat/completions", content=body, headers=headers
        ) as response:
            yield response

    def _names(self, response: httpx.Response) -> list[str]:
        try:
            content = response.json()
            if response.is_error:
                raise BenchError(f"{self.shown_url} answered {response.status_code}: {_message_of(content)}")
            return [str(model["id"]) for model in content["data"]] or [""]
        except (ValueError, KeyError, TypeError):
            status = response.status_code
            raise BenchError(
                f"{self.shown_url}/v1/models answered {status} and lists no models: is it OpenAI-compatible?"
            ) from None

    def _unreachable(self, error: Exception) -> BenchError:
        reason = str(error) or type(error).__name__
        return BenchError(f"no server answers at {self.shown_url} ({reason}): check --url")


class _Trace(msgspec.Struct):
    """The answer of `/v1/trace`; `now_s` is when it was made, on the clock of the steps."""

    now_s: float
    steps: list[StepTrace]


def _moved(step: StepTrace, by_s: float) -> StepTrace:
    times = step.times
    return replace(
        step,
        times=replace(
            times,
            start_s=times.start_s + by_s,
            planned_s=times.planned_s + by_s,
            lent_s=times.lent_s + by_s,
            end_s=times.end_s + by_s,
        ),
    )


async def _read(response: httpx.Response, exchange: Exchange) -> None:
    if response.is_error:
        text = (await response.aread()).decode(errors="replace")
        exchange.error = f"{response.status_code} {_message_of(text)}"
        return
    is_complete = False
    async for line in response.aiter_lines():
        data = line[5:].strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            is_complete = True
        elif data:
            exchange.read(json.loads(data), time.perf_counter())
    if not is_complete and exchange.error is None:
        exchange.error = "the stream ended before its [DONE]"


def _message_of(problem: object) -> str:
    """The words for people in an error of whatever shape, in one line."""
    if isinstance(problem, str):
        try:
            problem = json.loads(problem)
        except ValueError:
            return " ".join(str(problem).split())[:_SHOWN_CHARACTERS]
    while isinstance(problem, dict):
        problem = problem.get("error") or problem.get("message") or problem.get("detail") or str(problem)
    return " ".join(str(problem).split())[:_SHOWN_CHARACTERS]
