"""Scores of the demo model's answers, beside what always saying the most frequent one is worth."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from appliance.demo.questions import LABELS, NUMBERS, plural
from vision.scenes import Scene

_NUMBER = {word: i for i, word in enumerate(NUMBERS)} | {"nobody": 0, "a": 1, "an": 1}
_COUNT = re.compile(r"\b(nobody|" + "|".join(NUMBERS) + r")\b", re.IGNORECASE)


def parse_count(answer: str) -> int | None:
    """Read the first number word of an answer; ``nobody`` is 0, None without any."""
    found = _COUNT.search(answer)
    return _NUMBER[found.group(1).lower()] if found else None


def parse_description(text: str) -> dict[str, int]:
    """Read how many of each label the first sentence of a description tells; labels not told are left out."""
    sentence = text.split(".", maxsplit=1)[0].lower()
    counts = {}
    for label in LABELS:
        found = re.search(rf"\b({'|'.join(NUMBERS)}|an|a) (?:{label}|{plural(label)})\b", sentence)
        if found and _NUMBER[found.group(1)]:
            counts[label] = _NUMBER[found.group(1)]
    return counts


def says(kind: str, answer: str) -> str:
    """Reduce an answer to the fact that ``truth_of`` states for its kind."""
    words = re.findall(r"[a-z]+", answer.lower())
    if kind == "count":
        return str(parse_count(answer))
    if kind == "anybody":
        return {"yes": "yes", "no": "no"}.get(words[0] if words else "", "?")
    if {"no", "nobody"} & set(words):
        return "absent"
    return words[-1] if words else "?"


@dataclass(slots=True)
class Score:
    """Right answers of one kind; ``share`` and ``majority`` are fractions."""

    right: int = 0
    truths: list[str] = field(default_factory=list)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, question: str, answer: str, truth: str, said: str) -> None:
        """Count one answer; what was wrong is kept to be looked at."""
        self.truths.append(truth)
        if said == truth:
            self.right += 1
        else:
            self.wrong.append((question, answer, truth))

    @property
    def share(self) -> float:
        """Fraction of right answers."""
        return self.right / max(1, len(self.truths))

    @property
    def majority(self) -> float:
        """Fraction that the most frequent truth alone would get right."""
        return max(Counter(self.truths).values(), default=0) / max(1, len(self.truths))

    def report(self) -> dict[str, float | int]:
        """Figures for the report."""
        return {"right": round(self.share, 4), "majority": round(self.majority, 4), "asked": len(self.truths)}


def score_descriptions(scenes: Sequence[Scene], texts: Sequence[str]) -> dict[str, float]:
    """Class recall and precision, and exact counts, of descriptions; all fractions."""
    pairs = [
        (Counter(o.label for o in scene.objects), parse_description(text))
        for scene, text in zip(scenes, texts, strict=True)
    ]
    hits = sum(len(true.keys() & told.keys()) for true, told in pairs)
    people = Counter(true["person"] for true, _ in pairs)
    return {
        "class_recall": round(hits / max(1, sum(len(true) for true, _ in pairs)), 4),
        "class_precision": round(hits / max(1, sum(len(told) for _, told in pairs)), 4),
        "people_exact": round(sum(t["person"] == p.get("person", 0) for t, p in pairs) / len(pairs), 4),
        "people_majority": round(max(people.values()) / len(pairs), 4),
        "all_counts_exact": round(sum(dict(t) == p for t, p in pairs) / len(pairs), 4),
    }
