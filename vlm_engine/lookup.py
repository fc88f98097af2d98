"""Where a text said its last words before, and what came then; pure Python on runs of bytes."""

from array import array
from collections import deque
from collections.abc import Iterable

TOKEN = array("i").itemsize
# why: no token has that id, so that no run of tokens goes from one text into the next
BETWEEN = -(2**31)


def as_bytes(token_ids: Iterable[int]) -> bytes:
    """Token ids, `TOKEN` bytes each."""
    return array("i", token_ids).tobytes()


class Lookup:
    """Finds the newest place at which the last tokens of a growing text stood before, in it or in others.

    Args:
        shortest: Fewest last tokens to look for.
        longest: Most last tokens to look for; where most of them are found counts.
        others: Texts that are looked in as well, None for none.
    """

    def __init__(self, shortest: int, longest: int, others: "Earlier | None" = None) -> None:
        self._shortest, self._longest = shortest, longest
        self._others = others
        self._text = bytearray()

    def find(self, token_ids: list[int], most: int) -> tuple[int, tuple[int, ...]]:
        """How many last tokens were found (0: too few), and what followed there, at most `most` tokens.

        Args:
            token_ids: The text, of which the calls before had the beginning.
            most: How many tokens to give.
        """
        self._text += as_bytes(token_ids[len(self._text) // TOKEN :])
        end = bytes(self._text[-self._longest * TOKEN :])
        found, place = newest(self._text, len(self._text) - TOKEN, end, self._shortest)
        if self._others is not None:
            elsewhere, followed = self._others.find(end, max(self._shortest, found + 1), most)
            if followed:
                return elsewhere, followed
        # why: where the text repeats itself up to its end, it goes on as it began
        period = len(token_ids) - place
        return found, tuple(token_ids[place + index % period] for index in range(most * bool(found)))


class Earlier:
    """The newest of some texts, to be looked in.

    Args:
        num_kept: How many.
    """

    def __init__(self, num_kept: int) -> None:
        self._texts: deque[bytes] = deque(maxlen=num_kept)
        self._all = bytearray()

    def add(self, token_ids: Iterable[int]) -> None:
        """Take in one more text, and drop the oldest where there are too many."""
        text = as_bytes((*token_ids, BETWEEN))
        if len(self._texts) == self._texts.maxlen:
            del self._all[: len(self._texts[0])]
        self._texts.append(text)
        self._all += text

    def find(self, end: bytes, shortest: int, most: int) -> tuple[int, tuple[int, ...]]:
        """As `Lookup.find`, for the last tokens of another text."""
        found, place = newest(self._all, len(self._all), end, shortest)
        followed = array("i", bytes(self._all[place * TOKEN : (place + most) * TOKEN * bool(found)]))
        tokens = followed.tolist()
        return found, tuple(tokens[: tokens.index(BETWEEN)] if BETWEEN in tokens else tokens)


def newest(text: bytearray, size: int, end: bytes, shortest: int) -> tuple[int, int]:
    """The newest place of the longest run of last tokens that stands in a text.

    Args:
        text: To be looked in.
        size: How many bytes of it.
        end: The last tokens of some text.
        shortest: Fewest tokens of a run.

    Returns:
        How many last tokens stand there, and the index of the token behind them; 0 and 0 for nowhere.
    """
    found = place = 0
    length = shortest
    while length * TOKEN <= len(end):
        at = _aligned(text, size, end[-length * TOKEN :])
        if at < 0:
            break
        place = at // TOKEN + length
        found = length = _reach(text, end, at, length)
        length += 1
    return found, place


def _aligned(text: bytearray, size: int, wanted: bytes) -> int:
    """Where a run of tokens begins in a text for the last time, in bytes; -1 if it is not there."""
    at = text.rfind(wanted, 0, size)
    while at > 0 and at % TOKEN:
        at = text.rfind(wanted, 0, at + len(wanted) - 1)
    return at


def _reach(text: bytearray, end: bytes, at: int, length: int) -> int:
    """How many last tokens of `end` stand in front of byte ``at + length * TOKEN``, where `length` do."""
    while length * TOKEN < len(end) and at >= TOKEN:
        at -= TOKEN
        if text[at : at + TOKEN] != end[-(length + 1) * TOKEN :][:TOKEN]:
            break
        length += 1
    return length
