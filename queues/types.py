"""What passes through the queue: a job, its delivery to a worker, its result; and the queue's state."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Job:
    """One piece of work; `body` is opaque to the queue.

    `job_id` makes every step idempotent: one id is queued once and answered once. `key` is the camera: keys
    take turns. Of the waiting jobs of a key with the same `slot` the queue keeps only the newest; None is
    never replaced. Times are unix seconds; `expires_at=None` never expires. Once the queue was told another
    `permit` for the key, the job is dropped as `withdrawn`.
    """

    job_id: str
    key: str
    body: bytes
    created_at: float
    expires_at: float | None = None
    slot: str | None = None
    permit: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A job in the hands of one worker, which owes the queue a `finish` or a `fail`.

    `times_delivered` counts this delivery too (1 is the first). `queue_ms` is the time from the
    producer's `put` to this delivery, by the server's clock, `waited_ms` that from when its place in the
    line was taken: the job itself may be newer, it has replaced `num_replaced` others.
    """

    job: Job
    entry_id: str
    times_delivered: int
    queue_ms: float
    waited_ms: float = 0.0
    num_replaced: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """One finished job as readers see it; `entry_id` is where the next `read` continues."""

    entry_id: str
    job_id: str
    key: str
    body: bytes


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """A snapshot of the queue, the same from every process; counts are since the server's start.

    `depth` jobs wait, `pending` are with workers, `dead` lie in the dead-letter stream, `num_bytes` is the
    size of all bodies that wait or are pending. `dropped` maps a reason to a count: `overflow`, `replaced`,
    `expired`, `withdrawn`, `dead`, and the reasons that producers and workers add themselves. `waiting` has
    the depth by key, `longest_wait_s` is how long the most patient of these waits for its turn. `refusal` is
    why the server takes no jobs now, as when its memory is full; None when it does.
    """

    depth: int
    pending: int
    dead: int
    num_bytes: int
    num_put: int
    num_done: int
    num_retried: int
    num_duplicates: int
    oldest_age_s: float
    dropped: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)
    longest_wait_s: float = 0.0
    refusal: str | None = None

    @property
    def num_dropped(self) -> int:
        """All drops together."""
        return sum(self.dropped.values())

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing is being worked on."""
        return self.depth == 0 and self.pending == 0
