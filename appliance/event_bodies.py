"""An event as it is told: one JSON object, into which a track's changes and its description are joined.

They come by two ways and in any order; whatever came first, the object has the same keys, and `state` says
how far its track is: `new`, `update` (its zones changed), `end`. While a description is awaited,
`description` and `error` are both null; who gets none has an `error`, whatever the reason.
"""

from typing import Any

import msgspec

from appliance.jobs import Description, EventChange, Quality, Timings
from appliance.model_names import shown_model_name

Body = dict[str, Any]

_ANSWER = (
    "described_at",
    "prompt",
    "description",
    "error",
    "model",
    "timings",
    "quality",
    "num_replaced",
)
_COURSE = ("state", "num_changes", "changed_at", "zones")


def described(body: Body | None, description: Description) -> Body | None:
    """`body` (None: a new one) with the description joined; None when it has one, or an error, already.

    A text replaces an earlier error of the same job. What may hold a password, the source, is left out.
    """
    if body is not None and body["described_at"] and (body["description"] or not description.text):
        return None
    fields: Body = msgspec.to_builtins(description)
    del fields["source"]
    fields["model"] = shown_model_name(description.model)
    if body is not None:
        return body | {name: fields[name] for name in _ANSWER}
    course = {"state": "new", "num_changes": 0, "changed_at": description.captured_at}
    return {"id": fields.pop("job_id"), "object": "event"} | fields | course


def given_up(body: Body, error: str, given_up_at: float) -> Body | None:
    """`body` with the reason why it will have no description; None when it has one, or a reason, already."""
    if body["described_at"]:
        return None
    return body | {"error": error, "described_at": given_up_at}


def ended(body: Body) -> Body | None:
    """`body` at its end, as far as its course is known; None when it has ended already."""
    if body["state"] == "end":
        return None
    return body | {"state": "end", "num_changes": body["num_changes"] + 1}


def changed(body: Body | None, change: EventChange) -> Body | None:
    """`body` (None: a new one) as `change` tells it; None when it has that change, or a later one.

    One that has ended stays as it is, whoever ended it.
    """
    if body is not None and (body["num_changes"] > change.num or body["state"] == "end"):
        return None
    fields: Body = msgspec.to_builtins(change)
    del fields["error"]
    fields["num_changes"] = fields.pop("num") + 1
    if body is not None:
        return body | {name: fields[name] for name in _COURSE}
    answer = dict.fromkeys(_ANSWER) | {"prompt": "", "model": "", "num_replaced": 0}
    answer |= {"timings": msgspec.to_builtins(Timings()), "quality": msgspec.to_builtins(Quality())}
    return {"id": fields.pop("event_id"), "object": "event"} | fields | answer
