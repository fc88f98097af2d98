"""A chat's answer in OpenAI's JSON, streamed or whole, of one choice or several."""

import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any

from appliance.api.errors import ApiError, engine_error, unavailable
from appliance.api.schemas import ChatRequest
from appliance.api.streams import ClientGoneError, event_bytes
from vlm_engine import EngineError, TokenEvent, Usage
from vlm_engine.request import PositionLogprobs, TokenLogprob

logger = logging.getLogger(__name__)

# why: JSON has no infinity; OpenAI sends this for what is as good as impossible
LEAST_LOGPROB = -9999.0


@dataclass(slots=True)
class _Choice:
    """What has come of one choice."""

    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    num_tokens: int = 0

    @property
    def num_completion_tokens(self) -> int:
        return self.usage.completion_tokens or self.num_tokens


class ChatAnswer:
    """One answer in the making, and its JSON.

    Args:
        chat: The request.
        answer_id: The answer's id.
    """

    def __init__(self, chat: ChatRequest, answer_id: str) -> None:
        self.answer_id = answer_id
        self._chat = chat
        self._created = int(time.time())
        self._choices = [_Choice() for _ in range(chat.n or 1)]

    def check(self, event: TokenEvent) -> None:
        """Raises `ApiError` when the engine gave up on the request."""
        if not event.is_failure:
            return
        logger.error("request=%s ended: %s %s", self.answer_id, event.finish_reason, event.error)
        if event.is_unanswered:
            raise unavailable(f"the engine does not answer: {event.error}", code="engine_unavailable")
        if event.finish_reason == "error":
            message = "the engine failed on this request; the server's log tells why"
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="engine_error")
        raise unavailable(f"the request was {event.finish_reason}", code=str(event.finish_reason))

    async def whole(self, events: AsyncIterator[TokenEvent]) -> dict[str, Any]:
        """The JSON of an answer that is not streamed; raises `ApiError` and `ClientGoneError`."""
        async for event in events:
            self._take(event)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.pieces), "refusal": None},
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        return self._head("chat.completion", choices) | {"usage": self._usage()} | _timings(event)

    async def stream(self, events: AsyncIterator[TokenEvent]) -> AsyncIterator[bytes]:
        """The events of a streamed answer; a failure becomes an error event that no [DONE] follows."""
        for index in range(len(self._choices)):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        try:
            async for event in events:
                self._take(event)
                if event.text or event.is_last or event.logprobs or self._chat.is_usage_continuous:
                    yield self._chunk(event.index, {"content": event.text} if event.text else {}, event)
        except ClientGoneError:
            return
        except Exception as error:
            yield _json_event(_in_stream(error).body)
            return
        if self._chat.is_usage_wanted:
            yield _json_event(self._head("chat.completion.chunk", []) | {"usage": self._usage()})
        yield event_bytes(b"[DONE]")

    def _take(self, event: TokenEvent) -> None:
        self.check(event)
        choice = self._choices[event.index]
        choice.num_tokens += len(event.token_ids)
        choice.usage = event.usage or choice.usage
        choice.finish_reason = event.finish_reason
        if not self._chat.stream:
            choice.pieces.append(event.text)
            choice.logprobs += _entries(event.logprobs)

    def _chunk(self, index: int, delta: dict[str, str], event: TokenEvent | None = None) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(_entries(event.logprobs)) if event and event.logprobs else None,
            "finish_reason": event.finish_reason if event else None,
        }
        chunk = self._head("chat.completion.chunk", [choice])
        if self._chat.is_usage_wanted:
            chunk["usage"] = self._usage() if self._chat.is_usage_continuous else None
        return _json_event(chunk | _timings(event))

    def _logprobs(self, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
        return {"content": entries, "refusal": None} if self._chat.logprobs else None

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.answer_id, "object": kind, "created": self._created, "model": self._chat.model}
        return head | {"choices": choices}

    def _usage(self) -> dict[str, Any]:
        """The prompt once, since all choices share it, and the tokens of every choice."""
        first = self._choices[0].usage
        num_tokens = sum(choice.num_completion_tokens for choice in self._choices)
        return {
            "prompt_tokens": first.prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": first.prompt_tokens + num_tokens,
            "prompt_tokens_details": {
                "cached_tokens": first.cached_tokens,
                "image_tokens": first.image_tokens,
            },
        }


def _entries(logprobs: Sequence[PositionLogprobs]) -> list[dict[str, Any]]:
    return [_entry(each.taken) | {"top_logprobs": [_entry(token) for token in each.top]} for each in logprobs]


def _entry(token: TokenLogprob) -> dict[str, Any]:
    logprob = max(token.logprob, LEAST_LOGPROB)
    return {"token": token.text, "logprob": logprob, "bytes": list(token.data)}


def _in_stream(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return engine_error(error)
    logger.exception("a stream failed", exc_info=error)
    message = "internal error, which the server's log explains"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="internal_error")


def _timings(event: TokenEvent | None) -> dict[str, Any]:
    """Our extension: where the time of a finished answer went, in milliseconds."""
    return {"timings": asdict(event.timings)} if event and event.timings else {}


def _json_event(content: dict[str, Any]) -> bytes:
    return event_bytes(json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode())
