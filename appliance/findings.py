"""What a look at settings finds, beside what their form alone tells."""

from dataclasses import dataclass
from typing import Literal

Weight = Literal["problem", "awaited", "warning", "unchecked"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about the setting at `path`.

    Attributes:
        path: of the key, as `cameras.gate.source`.
        text: what is so, and what to do about it.
        weight: a ``problem`` ends the start; what is ``awaited`` may yet come, such as a file; a ``warning``
            is for people to judge; ``unchecked`` could not be looked at.
    """

    path: str
    text: str
    weight: Weight = "problem"

    def __str__(self) -> str:
        """One line."""
        return f"{self.path}: {self.text}"
