"""Which events are wanted, and a person's search words as a query that SQLite's full-text search accepts."""

import re
from dataclasses import dataclass, fields
from typing import Any

MAX_TERMS = 32

_PARTS = re.compile(r'"([^"]*)"?|([^\s"]+)')
_TESTS = {
    "camera": "camera = :camera",
    "label": "label = :label",
    "zone": "EXISTS (SELECT 1 FROM json_each(zones) WHERE value = :zone)",
    "since": "captured_at >= :since",
    "until": "captured_at < :until",
    "is_described": "is_described = :is_described",
    "q": "seq IN (SELECT rowid FROM event_texts WHERE event_texts MATCH :q)",
}


class SearchError(ValueError):
    """Search words that cannot be looked for."""


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events are wanted; None wants all.

    `since` (inclusive) and `until` (exclusive) are capture times in unix seconds. `q` is what a person types:
    all words must be there, in any form (`walks` finds `walking`), "several words" next to each other, `bus*`
    also `buses`. `zone` is one that the object was in.
    """

    camera: str | None = None
    label: str | None = None
    since: float | None = None
    until: float | None = None
    zone: str | None = None
    q: str | None = None
    is_described: bool | None = None

    def where(self) -> tuple[str, dict[str, Any]]:
        """SQL that follows a condition on the table `events`, and its values; raises `SearchError`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {name: value for name, value in values.items() if value is not None}
        if self.q is not None:
            values["q"] = match_query(self.q)
            if not values["q"]:
                return " AND 0", {}
        return "".join(f" AND {_TESTS[name]}" for name in values), values


def match_query(words: str) -> str:
    """The FTS5 query for what a person typed, "" when there is no letter or digit in it.

    Every operator of FTS5 is an ordinary word here. Raises `SearchError` for more than `MAX_TERMS` words.
    """
    terms = [_term(phrase, word) for phrase, word in _PARTS.findall(words.replace("\0", " "))]
    terms = [term for term in terms if term]
    if len(terms) > MAX_TERMS:
        raise SearchError(f"at most {MAX_TERMS} words can be looked for at once, not {len(terms)}")
    return " ".join(terms)


def _term(phrase: str, word: str) -> str:
    text = phrase or word
    if not any(character.isalnum() for character in text):
        return ""
    # invariant: inside quotes nothing but the quote itself has a meaning, and no part has one
    return f'"{text}"' + (" *" if word.endswith("*") else "")
