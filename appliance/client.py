"""A small HTTP client of a running appliance: streamed chat, newest frames, events.

It is for the terminal; programs use any OpenAI client against the same server.
"""

import base64
import itertools
import json
import mimetypes
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

Message = Mapping[str, Any]


class ClientError(Exception):
    """The appliance cannot be reached or refused; the message has one line that says what to do."""


@dataclass(slots=True)
class ChatTimes:
    """When the pieces of one answer arrived, in seconds of a monotonic clock; filled while it streams."""

    asked_at: float = 0.0
    piece_times: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        """Time to the first piece of text in milliseconds; 0 before there is one."""
        return 1000 * (self.piece_times[0] - self.asked_at) if self.piece_times else 0.0

    @property
    def itl_ms(self) -> list[float]:
        """The gaps between pieces in milliseconds."""
        times = self.piece_times
        return [1000 * (after - before) for before, after in itertools.pairwise(times)]


def percentile(values: Sequence[float], share: float) -> float:
    """The value at `share` (0..1) of the sorted `values`, by nearest rank; 0 when there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def user_message(text: str, image: tuple[str, bytes] | None = None) -> Message:
    """A user's message in OpenAI's form; `image` is (media type, encoded bytes) and goes before the text."""
    if image is None:
        return {"role": "user", "content": text}
    media_type, data = image
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
    }


def read_image(path: Path) -> tuple[str, bytes]:
    """Media type and bytes of an image file; raises `ClientError` when it cannot be read."""
    try:
        return mimetypes.guess_type(path.name)[0] or "image/jpeg", path.read_bytes()
    except OSError as error:
        raise ClientError(f"{path}: {error.strerror or error}: check --image") from None


class ApplianceClient:
    """One connection pool to the server at `url`; every method raises `ClientError`."""

    def __init__(self, url: str, api_key: str | None = None, *, timeout_s: float = 120.0) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(
                base_url=self._url, headers=headers, timeout=httpx.Timeout(timeout_s, connect=5.0)
            )
        except httpx.InvalidURL as error:
            raise ClientError(f"{url}: {error}: check --url") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def model_name(self) -> str:
        """The id of the model that the appliance serves."""
        models = self._get("/v1/models").json()["data"]
        return str(models[0]["id"])

    def health(self) -> dict[str, Any]:
        """What `/health` says, whatever its status code is."""
        try:
            return dict(self._http.get("/health").json())
        except (httpx.HTTPError, ValueError) as error:
            raise self._unreachable(error) from None

    def cameras(self) -> list[dict[str, Any]]:
        """The state of every configured camera."""
        return list(self._get("/v1/cameras").json()["data"])

    def newest_frame(self, camera: str) -> bytes:
        """A camera's newest frame as JPEG."""
        return self._get(f"/v1/cameras/{camera}/frame.jpg").content

    def stream_chat(
        self, messages: Sequence[Message], *, model: str, max_tokens: int, times: ChatTimes | None = None
    ) -> Iterator[str]:
        """The answer piece by piece; `times` is filled on the way."""
        body = {
            "model": model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        times = times or ChatTimes()
        times.asked_at = time.monotonic()
        for chunk in self._stream("POST", "/v1/chat/completions", json=body):
            for choice in chunk.get("choices", ()):
                if text := choice["delta"].get("content"):
                    times.piece_times.append(time.monotonic())
                    yield text

    def events(self) -> Iterator[dict[str, Any]]:
        """Descriptions as they are made, until the server stops."""
        return self._stream("GET", "/v1/events", headers={"Accept": "text/event-stream"}, timeout=None)

    def _stream(self, method: str, path: str, **options: Any) -> Iterator[dict[str, Any]]:
        try:
            with self._http.stream(method, path, **options) as response:
                if response.is_error:
                    response.read()
                self._check(response)
                for line in response.iter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        yield _checked_chunk(json.loads(data))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _get(self, path: str) -> httpx.Response:
        try:
            response = self._http.get(path)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        self._check(response)
        return response

    def _check(self, response: httpx.Response) -> None:
        if not response.is_error:
            return
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"{response.request.url} answered {response.status_code}: is this an appliance?"
        raise ClientError(message)

    def _unreachable(self, error: Exception) -> ClientError:
        return ClientError(
            f"no appliance answers at {self._url} ({error}): start one with 'appliance serve', or give --url"
        )


def _checked_chunk(chunk: dict[str, Any]) -> dict[str, Any]:
    if isinstance(problem := chunk.get("error"), dict):
        raise ClientError(str(problem.get("message", problem)))
    return chunk
