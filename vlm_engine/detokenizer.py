"""Token ids to text while they come, with no broken character and no part of a stop string."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
# why: the last incomplete character has at most 3 bytes, so that it begins within the last 3 tokens; one more
# token gives the context that decides on a leading space. More than that only makes shifting rarer.
NUM_KEPT = 6
MAX_WINDOW = 18


class Detokenizer:
    """Text of one growing token sequence.

    Args:
        tokenizer: Byte-level (Qwen, GPT-2) or with byte fallback (Llama, Gemma).
        stop: Strings that end the text.
        min_tokens: Stop strings in the text of so many first tokens do not count.

    Deltas joined equal the decode of all tokens without special ones, cut before the stop string that
    is complete first (of those that are complete at the same character, before the longest). One
    difference is on purpose: in a run of byte-fallback tokens that is not valid UTF-8 as a whole, the
    valid characters are kept, where a decode of the whole run would drop them all.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", stop: tuple[str, ...] = (), min_tokens: int = 0
    ) -> None:
        self._text = _IncrementalText(tokenizer)
        self._filter = _StopFilter(stop)
        self._num_free = min_tokens

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; no text follows."""
        return self._filter.is_stopped

    def push(self, token_ids: "list[int] | tuple[int, ...]") -> str:
        """The new text that is safe to send, often empty."""
        return "".join(map(self._push, token_ids))

    def _push(self, token_id: int) -> str:
        text = self._text.push(token_id)
        if self._num_free:
            self._num_free -= 1
            return text
        return self._filter.push(text)

    def finish(self) -> str:
        """What was held back; call it once, after the last token."""
        return self._filter.push(self._text.flush()) + self._filter.flush()


class _IncrementalText:
    """Decodes a short window of the newest tokens, of whose text `_num_sent` characters are sent."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._vocabulary = _vocabulary(tokenizer)
        self._window: list[int] = []
        self._num_sent = 0
        self._byte_ids: list[int] = []

    def push(self, token_id: int) -> str:
        if not self._vocabulary.has_text(token_id):
            return ""
        if token_id in self._vocabulary.byte_values:
            return self._push_byte(token_id)
        broken = self._flush_bytes()
        if len(self._window) >= MAX_WINDOW:
            self._restart(self._window[-NUM_KEPT:])
        self._window.append(token_id)
        text = self._decode()
        end = self._settled(text)
        delta, self._num_sent = text[self._num_sent : end], max(end, self._num_sent)
        return broken + delta

    def flush(self) -> str:
        return self._flush_bytes() + self._decode()[self._num_sent :]

    def _push_byte(self, token_id: int) -> str:
        self._byte_ids.append(token_id)
        values = bytes(self._vocabulary.byte_values[each] for each in self._byte_ids)
        num_broken = _num_broken(values)
        broken = self._flush_bytes(num_broken)
        try:
            char = values[num_broken:].decode()
        except UnicodeDecodeError:
            return broken
        is_first = not self._window
        self._restart([*self._window, *self._byte_ids][-NUM_KEPT:])
        self._byte_ids = []
        # why: a space that begins the text may be dropped by the tokenizer, also as a byte.
        return broken + (self._decode() if is_first else char)

    def _flush_bytes(self, num_bytes: int | None = None) -> str:
        """Give up on waiting bytes, the first `num_bytes` of them or all: one replacement for each."""
        ids = self._byte_ids[:num_bytes]
        if ids:
            self._restart([*self._window, *ids][-NUM_KEPT:])
            self._byte_ids = self._byte_ids[len(ids) :]
        return REPLACEMENT * len(ids)

    def _restart(self, window: list[int]) -> None:
        # invariant: whatever a cut through a character does to the text of the window's front, it does to
        # every later decode of this window too, so that counting the sent characters anew stays right.
        self._window = window
        self._num_sent = self._settled(self._decode())

    def _settled(self, text: str) -> int:
        """Number of characters that no later token can change."""
        may_grow = text.endswith(REPLACEMENT) and not self._vocabulary.byte_values
        return len(text) - may_grow

    def _decode(self) -> str:
        text = self._tokenizer.decode(
            self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)


def _num_broken(values: bytes) -> int:
    """How many bytes at the front can never become a character."""
    start = 0
    while start < len(values):
        try:
            values[start:].decode()
        except UnicodeDecodeError as error:
            # why: an error that reaches the end is a character whose last bytes may still come.
            if error.reason == "unexpected end of data":
                return start
            start += 1
        else:
            return start
    return start


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What the detokenizer must know of a tokenizer; `byte_values` is empty without byte fallback."""

    size: int
    special_ids: frozenset[int]
    byte_values: dict[int, int]

    def has_text(self, token_id: int) -> bool:
        # why: models pad their vocabulary, so that an id may have no token at all.
        return 0 <= token_id < self.size and token_id not in self.special_ids


@functools.lru_cache(maxsize=4)
def _vocabulary(tokenizer: "PreTrainedTokenizerBase") -> _Vocabulary:
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    special_ids = frozenset(added | set(tokenizer.all_special_ids))
    vocab = tokenizer.get_vocab()
    values = {vocab[name]: value for value in range(256) if (name := f"<0x{value:02X}>") in vocab}
    euro = [token_id for byte in "€".encode() for token_id, value in values.items() if value == byte]
    has_fallback = len(values) == 256 and tokenizer.decode(euro).strip() == "€"
    return _Vocabulary(max(vocab.values()) + 1, special_ids, values if has_fallback else {})


class _StopFilter:
    """Passes text on, but for what may still become a stop string."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.is_stopped = False
        self._matchers = [_Matcher(text) for text in stop]
        self._held = ""

    def push(self, text: str) -> str:
        if self.is_stopped or not self._matchers:
            return "" if self.is_stopped else text
        start = len(self._held)
        self._held += text
        for index, char in enumerate(text, start + 1):
            matched = max((each.length for each in self._matchers if each.advance(char)), default=0)
            if matched:
                self.is_stopped = True
                return self._release(index - matched)
        return self._release(len(self._held) - max(each.num_matched for each in self._matchers))

    def flush(self) -> str:
        return "" if self.is_stopped else self._release(len(self._held))

    def _release(self, end: int) -> str:
        released, self._held = self._held[:end], self._held[end:]
        return released


class _Matcher:
    """How much of a stop string the text so far ends with (Knuth-Morris-Pratt)."""

    def __init__(self, text: str) -> None:
        self.length = len(text)
        self.num_matched = 0
        self._text = text
        self._borders = _borders(text)

    def advance(self, char: str) -> bool:
        """Take the next character; returns whether the stop string is complete."""
        while self.num_matched and self._text[self.num_matched] != char:
            self.num_matched = self._borders[self.num_matched - 1]
        self.num_matched += self._text[self.num_matched] == char
        return self.num_matched == self.length


def _borders(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is its suffix too."""
    borders = [0]
    for char in text[1:]:
        length = borders[-1]
        while length and text[length] != char:
            length = borders[length - 1]
        borders.append(length + (text[length] == char))
    return borders
