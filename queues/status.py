"""The queue's state, read by one script and put into words."""

from typing import Any

from queues.types import QueueStatus

_DROPPED = "dropped:"


def parse_status(reply: list[Any]) -> QueueStatus:
    """A `QueueStatus` of the STATUS script's reply."""
    length, pending, dead, oldest_age_ms, flat, waiting, refusal = reply
    counts = {name.decode(): int(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}
    return QueueStatus(
        depth=max(0, length - pending),
        pending=pending,
        dead=dead,
        num_bytes=counts.get("bytes", 0) if length else 0,
        num_put=counts.get("put", 0),
        num_done=counts.get("done", 0),
        num_retried=counts.get("retried", 0),
        num_duplicates=counts.get("duplicates", 0),
        oldest_age_s=max(0.0, oldest_age_ms / 1000),
        dropped={k.removeprefix(_DROPPED): n for k, n in counts.items() if k.startswith(_DROPPED)},
        waiting={key.decode(): number for key, number, _ in waiting},
        longest_wait_s=max((wait_ms for _, _, wait_ms in waiting), default=0) / 1000,
        refusal=refusal.decode() or None,
    )
