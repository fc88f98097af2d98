"""The producer's side: put jobs, from a process that must never hang on the queue."""

import itertools
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import redis

from queues import scripts, upkeep
from queues.config import QueueConfig
from queues.connection import CURABLE, check_server, connect, translate
from queues.errors import JobTooLarge, QueueFull, QueueUnavailable
from queues.outage import Outage
from queues.permissions import CHECK, COMMANDS, check_permissions
from queues.pipe import Argument, Pipe
from queues.status import parse_status
from queues.types import Job, QueueStatus

_POLL_S = 0.02


class JobProducer:
    """Puts jobs into one queue; blocking calls, one thread at a time.

    Raises `QueueUnavailable` or a `ServerError` when the server cannot be used at the start.
    """

    def __init__(self, url: str, config: QueueConfig | None = None) -> None:
        self.config = config or QueueConfig()
        self.outage = Outage(url)
        self._url = url
        self._drops: Counter[str] = Counter()
        self._client = connect(url, self.config)
        self._pipe = Pipe(self._client)
        self._put = self._client.register_script(scripts.PUT)
        self._permit = self._client.register_script(upkeep.PERMIT)
        self._status = self._client.register_script(upkeep.STATUS)
        self._keys = self.config.keys
        self._name, self._numbers = uuid.uuid4().hex, itertools.count()
        self._limits = self._limit_arguments()
        try:
            check_server(self._client.info("everything"), url)
            check = self._client.register_script(CHECK)
            check_permissions(check([], [self.config.stream, *COMMANDS]), url)
        except (redis.RedisError, OSError) as error:
            self.close()
            raise translate(error, url) from error
        except BaseException:
            self.close()
            raise

    def put(self, job: Job, timeout_s: float | None = None) -> bool:
        """Queue a job; False when its id is known already.

        With `when_full="wait"` it waits up to `timeout_s` (None: for ever) for room, then raises `QueueFull`.
        Raises `JobTooLarge`, and `QueueUnavailable`: at once if nobody listens or the last failure is fresh,
        after `command_timeout_s` when the server falls silent. A put that fails may be repeated: it never
        queues twice.
        """
        if len(job.body) > self.config.max_body_bytes:
            raise JobTooLarge(
                f"job {job.job_id} has {len(job.body)} bytes, the limit is {self.config.max_body_bytes}"
            )
        deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        # invariant: no two puts of any producer have the same.
        token = f"{self._name}:{next(self._numbers)}"
        while (answer := self._try_put(job, token)) < 0:
            if time.monotonic() >= deadline:
                raise QueueFull(f"no room for job {job.job_id} within {timeout_s} s")
            time.sleep(_POLL_S)
        return answer == 1

    def tell(self, about: str, key: str, body: bytes) -> None:
        """Append to the stream `config.told`, which `ResultReader` follows too; the newest are kept.

        Raises `QueueUnavailable`; what was told twice is there twice.
        """
        entry = {"job_id": about, "key": key, "body": body}
        told, most = self.config.told, self.config.result_max_len

        def append(*_: object) -> Any:
            return self._client.xadd(told, entry, maxlen=most, approximate=True)  # type: ignore[arg-type]

        self._call(append, [])

    def permit(self, key: str, permit: str, *, is_again: bool = False) -> int:
        """From now on only jobs of `key` with this permit are worked on; how many that waited were dropped.

        What is said `is_again` holds only where the server knows of no permit. Raises `QueueUnavailable`, and
        may be repeated.
        """
        return int(self._call(self._permit, [key, permit, int(is_again)]))

    def count_drop(self, reason: str, number: int = 1) -> None:
        """Count jobs that this producer gave up by itself; all processes see them after its next `put`."""
        self._drops[reason] += number

    def status(self) -> QueueStatus:
        """The queue's state; raises `QueueUnavailable`."""
        return parse_status(self._call(self._status, []))

    def close(self) -> None:
        """Close the connection; queued jobs stay."""
        self._pipe.close()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try_put(self, job: Job, token: str) -> int:
        self._pipe.begin()
        drops = dict(self._drops)
        arguments = self._put_arguments(job, token, drops)
        answer = self._call(lambda keys, given: self._put_at_once(job.body, token, keys, given), arguments)
        if answer >= 0:
            self._drops.subtract(drops)
        return int(answer)

    def _put_at_once(self, body: bytes, token: str, keys: list[str], arguments: list[Argument]) -> Any:
        """The script's answer; the body comes before it, and is gone after it unless the script took it."""
        sent = self.config.key(f"put:{token}")
        call = ("EVALSHA", self._put.sha, len(keys), *keys, *arguments)
        commands = [("SET", sent, body), call, ("DEL", sent)]
        try:
            return self._pipe.transaction(commands)[1]
        except redis.exceptions.NoScriptError:
            self._client.script_load(scripts.PUT)
            return self._pipe.transaction(commands)[1]

    def _put_arguments(self, job: Job, token: str, drops: dict[str, int]) -> list[Argument]:
        ttl_ms: int | str = "" if job.expires_at is None else round((job.expires_at - time.time()) * 1000)
        return [
            token,
            job.job_id,
            job.key,
            job.slot or "",
            repr(job.created_at),
            "" if job.expires_at is None else repr(job.expires_at),
            ttl_ms,
            len(job.body),
            *self._limits,
            job.permit,
            *(item for drop in drops.items() if drop[1] for item in drop),
        ]

    def _limit_arguments(self) -> list[int]:
        config = self.config
        dedup_ttl_ms, may_drop = round(config.dedup_ttl_s * 1000), int(config.when_full == "drop_oldest")
        return [dedup_ttl_ms, config.max_len, config.max_bytes, config.max_per_slot, may_drop]

    def _call(self, script: Callable[..., Any], arguments: list[Argument]) -> Any:
        if self.outage.delay_s:
            raise QueueUnavailable(
                f"the queue at {self.outage.url} failed a moment ago: {self.outage.reason}"
            )
        started = time.monotonic()
        try:
            answer = script(self._keys, [self.config.group, "", *arguments])
        except (redis.RedisError, OSError) as error:
            failed = translate(error, self._url)
            if isinstance(failed, CURABLE) and not isinstance(failed, QueueFull):
                self.outage.bad(error, cost_s=time.monotonic() - started)
            raise failed from error
        self.outage.good()
        return answer
