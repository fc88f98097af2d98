"""The reader's side: follow the stream of results."""

from typing import Any, Self

from queues.config import QueueConfig
from queues.link import Link
from queues.outage import Outage
from queues.types import Result


class ResultReader:
    """Follows the results of one queue; any number of readers see all of them.

    The server keeps about the newest `result_max_len`. `async with ResultReader(url) as reader`, or `start`
    and `close`. With `stream=config.told` it follows what producers tell instead, with `config.dropped`
    which jobs get no result: the body is the reason as `QueueStatus.dropped` counts it, or `dead: ` and more.
    """

    def __init__(self, url: str, config: QueueConfig | None = None, *, stream: str | None = None) -> None:
        self.config = config or QueueConfig()
        self.stream = stream or self.config.results
        self._link = Link(url, self.config)

    @property
    def outage(self) -> Outage:
        """The connection's health."""
        return self._link.outage

    async def start(self) -> None:
        """Connect; raises `QueueUnavailable`, `ServerTooOld` or another `ServerError`."""
        await self._link.open()

    async def last_id(self) -> str:
        """The newest result's entry id, to read only what comes after it; "0-0" when there is none."""
        newest: Any = await self._link.ask(lambda: self._link.commands.xrevrange(self.stream, count=1))
        return str(newest[0][0].decode()) if newest else "0-0"

    async def first_id(self) -> str:
        """The oldest result's entry id that is kept; "0-0" when there is none."""
        oldest: Any = await self._link.ask(lambda: self._link.commands.xrange(self.stream, count=1))
        return str(oldest[0][0].decode()) if oldest else "0-0"

    async def read(self, after_id: str, block_ms: float = 1000, max_results: int = 64) -> list[Result]:
        """Results after the entry `after_id` ("0-0": all that are kept), waiting up to `block_ms` for one.

        Never raises for an outage: it returns nothing, and `outage.silent_s` grows.
        """

        async def attempt(left_s: float) -> list[Result]:
            return await self._read(after_id, left_s, max_results)

        return await self._link.poll(attempt, block_ms)

    async def close(self) -> None:
        """Disconnect."""
        await self._link.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _read(self, after_id: str, left_s: float, max_results: int) -> list[Result]:
        block_ms = max(1, round(min(left_s, self.config.max_block_s) * 1000)) if left_s else None
        reply: Any = await self._link.ask(
            lambda: self._link.reads.xread({self.stream: after_id}, count=max_results, block=block_ms)
        )
        entries = reply[0][1] if reply else []
        return [
            Result(entry_id.decode(), fields[b"job_id"].decode(), fields[b"key"].decode(), fields[b"body"])
            for entry_id, fields in entries
        ]
