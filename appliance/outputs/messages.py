"""What a receiver outside is told about one change of one event."""

from datetime import UTC, datetime

import msgspec

from appliance.outputs.outbox import Message


def told(message: Message) -> bytes:
    """JSON: `type` such as `event.described`, `timestamp` of the change, and `data`, the event."""
    moment = datetime.fromtimestamp(message.created_at, UTC).isoformat(timespec="milliseconds")
    fields = {"type": f"event.{message.kind}", "timestamp": moment, "data": msgspec.Raw(message.body)}
    return msgspec.json.encode(fields)
