"""Names that are no UTF-8 in texts."""

import os
import pickle

import pytest

from vision.errors import SourceUnreadable
from vision.readable import readable


@pytest.mark.parametrize(
    ("text", "shown"),
    [("café", "café"), (os.fsdecode(b"caf\xe9/\xff.mp4"), r"caf\xe9/\xff.mp4"), ("\ud83d", r"\ud83d")],
)
def test_half_characters_are_shown_as_what_they_are(text: str, shown: str) -> None:
    assert readable(text) == shown


def test_the_text_of_an_error_can_be_written() -> None:
    error = SourceUnreadable(f"{os.fsdecode(bytes([0xE9]))}: damaged")
    assert str(error).encode() == rb"\xe9: damaged"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
