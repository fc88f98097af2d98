"""Limits and names of one queue."""

import re
from dataclasses import dataclass
from typing import Literal

_NAME = re.compile(r"[A-Za-z0-9_.:-]+")


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """All that producers, workers and readers of one queue must agree on.

    `when_full` says what `put` does at `max_len` jobs or `max_bytes` of bodies: drop the oldest waiting
    job (live cameras, where the newest matters) or wait for room (recorded video, where nothing may be lost).
    Of the jobs with the same `slot` only the newest `max_per_slot` wait; a newer one replaces the oldest.
    A worker that is silent for `visibility_s` loses its jobs to another one. A job is delivered at most
    `max_deliveries` times and then goes to the dead-letter stream.
    """

    stream: str = "appliance:jobs"
    group: str = "describers"
    when_full: Literal["drop_oldest", "wait"] = "drop_oldest"
    max_len: int = 256
    max_bytes: int = 128 * 2**20
    max_body_bytes: int = 16 * 2**20
    max_per_slot: int = 1
    max_deliveries: int = 3
    visibility_s: float = 60.0
    retry_delay_s: float = 1.0
    max_hold_s: float = 600.0
    result_max_len: int = 1000
    dead_max_len: int = 64
    dedup_ttl_s: float = 3600.0
    max_block_s: float = 5.0
    read_margin_s: float = 5.0
    command_timeout_s: float = 5.0
    outage_patience_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("stream", "group"):
            if not _NAME.fullmatch(getattr(self, name)):
                raise ValueError(f"{name} must be letters, digits and _ . : -, not {getattr(self, name)!r}")
        for name in self.__slots__:
            value = getattr(self, name)
            if not isinstance(value, str) and value <= 0:
                raise ValueError(f"{name} must be greater than 0, not {value!r}")
        if self.when_full not in ("drop_oldest", "wait"):
            raise ValueError(f"when_full must be drop_oldest or wait, not {self.when_full!r}")

    @property
    def results(self) -> str:
        """Name of the stream of results."""
        return self.key("results")

    @property
    def told(self) -> str:
        """Name of the stream of what producers tell, besides jobs."""
        return self.key("told")

    @property
    def dropped(self) -> str:
        """Name of the stream that tells which jobs get no result, and why."""
        return self.key("dropped")

    @property
    def dead(self) -> str:
        """Name of the dead-letter stream."""
        return self.key("dead")

    @property
    def keys(self) -> list[str]:
        """The keys that every script takes: stream, counts, dead letters, results."""
        return [self.stream, self.key("counts"), self.dead, self.results]

    def key(self, name: str) -> str:
        """A key that lives on the same Redis Cluster node as the stream, by its hash tag."""
        return f"{{{self.stream}}}:{name}"
