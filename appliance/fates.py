"""Why an event has no description, in words: what became of its job in the queue."""

LOST_AFTER_S = 900.0
"""Far longer than a live frame may wait, be worked on, and come again after its workers died."""

LOST = "lost: nothing was heard of its job for a quarter of an hour"

_WORDS = {
    "replaced": "a newer frame took its place in the queue (describe.replace)",
    "expired": "it was too old before its turn came (describe.max_age_s)",
    "overflow": "the queue was full",
    "withdrawn": "its camera was masked, paused or removed meanwhile",
    "refused": "the queue did not take it",
}


def why_dropped(reason: str) -> str:
    """The `error` of an event: the reason as the queue counts it, then what that means."""
    words = _WORDS.get(reason)
    return reason if words is None else f"{reason}: {words}"
