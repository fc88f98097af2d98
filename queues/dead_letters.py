"""The operator's side: look at jobs that were given up, put them back, or forget them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import redis

from queues import upkeep
from queues.config import QueueConfig
from queues.connection import check_server, connect, translate
from queues.errors import QueueError, QueueFull
from queues.permissions import CHECK, COMMANDS, check_permissions
from queues.status import parse_status
from queues.types import QueueStatus


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job that was given up after `times_delivered` deliveries; `died_at` is in unix seconds."""

    entry_id: str
    job_id: str
    key: str
    times_delivered: int
    reason: str
    died_at: float
    num_bytes: int


class DeadLetters:
    """The dead letters of one queue; blocking calls, a context manager.

    Every call raises `QueueUnavailable` or another `QueueError` when the server does not do it.
    """

    def __init__(self, url: str, config: QueueConfig | None = None) -> None:
        self.config = config or QueueConfig()
        self._url = url
        self._client = connect(url, self.config)
        try:
            check_server(self._ask(lambda: self._client.info("everything")), url)
            check = self._client.register_script(CHECK)
            check_permissions(self._ask(lambda: check([], [self.config.stream, *COMMANDS])), url)
        except BaseException:
            self.close()
            raise

    def newest(self, limit: int = 100) -> list[DeadLetter]:
        """The dead letters, newest first."""
        rows: Any = self._ask(lambda: self._client.xrevrange(self.config.dead, count=limit))
        return [_letter(entry_id.decode(), fields) for entry_id, fields in rows]

    def retry(self, entry_id: str) -> bool:
        """Put one back in the queue, as new and without a deadline; False when there is no such letter.

        It is gone too when the job has a result by now. Raises `QueueFull` when there is no room for it, and
        `QueueError` for what is no ID.
        """
        _check_id(entry_id)
        config = self.config
        limits = (config.max_len, config.max_bytes, round(config.dedup_ttl_s * 1000))
        answer = self._run(upkeep.REVIVE, entry_id, *limits)
        if answer < 0:
            raise QueueFull(f"no room for the dead letter {entry_id}: the queue is full")
        return bool(answer)

    def drop(self, entry_id: str) -> bool:
        """Forget one; False when there is no such letter. Raises `QueueError` for what is no ID."""
        _check_id(entry_id)
        return bool(self._ask(lambda: self._client.xdel(self.config.dead, entry_id)))

    def status(self) -> QueueStatus:
        """The queue's state."""
        return parse_status(self._run(upkeep.STATUS))

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, script: str, *arguments: str | int) -> Any:
        call = self._client.register_script(script)
        return self._ask(lambda: call(self.config.keys, [self.config.group, "", *arguments]))

    def _ask(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (redis.RedisError, OSError) as error:
            raise translate(error, self._url) from error


def _letter(entry_id: str, fields: dict[bytes, bytes]) -> DeadLetter:
    return DeadLetter(
        entry_id=entry_id,
        job_id=fields[b"job_id"].decode(errors="replace"),
        key=fields[b"key"].decode(errors="replace"),
        times_delivered=int(fields[b"times_delivered"]),
        reason=fields[b"reason"].decode(errors="replace"),
        died_at=int(entry_id.partition("-")[0]) / 1000,
        num_bytes=len(fields[b"body"]),
    )


def _check_id(entry_id: str) -> None:
    # why: the server looks at it only where there are dead letters
    if not re.fullmatch(r"\d+-\d+", entry_id):
        raise QueueError(f"{entry_id!r} is no ID of a dead letter; they look like 1764500000000-0")
