"""Forms in llguidance's words, and how much of the machine one may take."""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vlm_engine.sampling_params import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

# why: some models would write spaces until their tokens are used up; a schema's own `x-guidance` goes before
JSON_OPTIONS: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
MAX_LEXER_STATES = 50_000
"""Up to two kilobytes each, of every form that is kept."""
STEP_LEXER_FUEL = 50_000
STEP_MAX_ITEMS = 20_000
"""A quarter and two fifths of llguidance's own limits for one token: chats wait for it."""


class FormError(ValueError):
    """A form that cannot be compiled or followed; the text says why."""


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary as llguidance reads it.

    Args:
        tokens: The bytes of each token id.
        special_token_ids: Ids that no text of an answer has.
        stop_token_ids: Ids that end an answer.
        bos_token_id: The id that begins a text, if one does.
    """

    tokens: list[bytes]
    special_token_ids: list[int]
    stop_token_ids: list[int]
    bos_token_id: int | None = None

    @property
    def eos_token_id(self) -> int:
        """One of the ids that end an answer."""
        return self.stop_token_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        """The ids of a text in tokens of one byte each, as far as there are such."""
        return [self._singles[value] for value in text if value in self._singles]

    @cached_property
    def _singles(self) -> dict[int, int]:
        return {token[0]: token_id for token_id, token in enumerate(self.tokens) if len(token) == 1}


BYTES = Vocabulary([bytes([value]) for value in range(256)] + [b"<end>"], [256], [256])
"""A token for each byte, for checks without a model."""


def new_matcher(tokenizer: "LLTokenizer", wanted: StructuredOutput) -> "LLMatcher":
    """A form compiled for a vocabulary.

    Raises:
        FormError: It cannot be compiled.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES, step_lexer_fuel=STEP_LEXER_FUEL, step_max_items=STEP_MAX_ITEMS
    )
    try:
        matcher = LLMatcher(tokenizer, _grammar(wanted), log_level=0, limits=limits)
    except ValueError as error:
        raise FormError(shortened(str(error))) from None
    if matcher.is_error():
        raise FormError(shortened(matcher.get_error()))
    return matcher


def new_tokenizer(vocabulary: Vocabulary, words: Any = None) -> "LLTokenizer":
    """A vocabulary in llguidance's own shape; takes about a second for 150,000 tokens.

    Args:
        vocabulary: What the model can say.
        words: The same, but splits a text as the model's own tokenizer does; None for one that need not.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(words or vocabulary), eos_token=vocabulary.stop_token_ids)


def shortened(message: str) -> str:
    """What llguidance says, in one line and without its state."""
    return " ".join(message.partition("<state>")[0].split())[:300]


def _grammar(wanted: StructuredOutput) -> str:
    """What llguidance compiles; raises ValueError when it is not even JSON."""
    from llguidance import LLMatcher

    if wanted.kind == "json":
        return LLMatcher.grammar_from_json_schema(wanted.value, defaults=JSON_OPTIONS)
    if wanted.kind == "regex":
        return LLMatcher.grammar_from_regex(wanted.value)
    if wanted.kind == "choice":
        # why: a string of the grammar's language is written as one of JSON
        words = " | ".join(json.dumps(word, ensure_ascii=False) for word in json.loads(wanted.value))
        return LLMatcher.grammar_from_lark(f"start: {words}")
    return LLMatcher.grammar_from_lark(wanted.value)
