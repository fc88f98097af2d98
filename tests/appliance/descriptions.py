"""Descriptions for tests."""

from typing import Any

import msgspec

from appliance.jobs import Description, EventChange


def description(job_id: str, **changes: Any) -> Description:
    """A complete description of one walking person; `changes` replace its fields."""
    box = {"x1": 1.0, "y1": 2.0, "x2": 30.0, "y2": 40.0}
    fields = {
        "camera": "street",
        "source": "synthetic://street",
        "frame_index": 12,
        "time_s": 2.4,
        "captured_at": 1_700_000_000.0,
        "described_at": 1_700_000_001.0,
        "track_id": 3,
        "label": "person",
        "reason": "new_track",
        "detections": [{"name": "person", "class": 0, "confidence": 0.9, "box": box, "track_id": 3}],
        "prompt": "Describe this camera frame.",
        "text": "A person walks.",
    }
    return Description(job_id=job_id, **(fields | changes))


def begun(event_id: str, captured_at: float = 1_700_000_000.0, **changes: Any) -> EventChange:
    """The first change of the same event; `changes` replace its fields."""
    fields = msgspec.to_builtins(description(event_id))
    fields |= {"event_id": event_id, "num": 0, "state": "new", "captured_at": captured_at}
    return msgspec.convert(fields | {"changed_at": captured_at} | changes, EventChange)
