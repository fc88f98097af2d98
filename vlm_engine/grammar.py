"""Output that keeps to a JSON schema, a regular expression, a list of choices or a grammar.

`llguidance` says before each token which ones may come. It was chosen over xgrammar by measuring
(`benchmarks/structured_output.py`): both need far less than a millisecond a token at a vocabulary of 150,000,
but it compiles in one millisecond instead of forty, and refuses what it cannot enforce.
"""

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vlm_engine.errors import RequestError
from vlm_engine.sampling_params import StructuredOutput
from vlm_engine.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions
    from transformers import PreTrainedTokenizerBase

NUM_CACHED = 32
# why: some models would write spaces until their tokens are used up; a schema's own `x-guidance` goes before
JSON_OPTIONS: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


def check_grammar(wanted: StructuredOutput) -> None:
    """Refuse what cannot be compiled; needs no tokenizer.

    Raises:
        RequestError: It names the field of the request.
    """
    from llguidance import LLMatcher

    try:
        message = LLMatcher.validate_grammar(_grammar(wanted))
    except ValueError as error:
        message = str(error)
    if message:
        raise _refused(wanted, message)


class Grammars:
    """Compiled grammars of one vocabulary; safe from any thread.

    Args:
        tokenizer: The checkpoint's tokenizer.
        vocab_size: Width of the model's logits.
        stop_token_ids: Ids that end an answer.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", vocab_size: int, stop_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = sorted(each for each in stop_token_ids if each < vocab_size)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()

    def load(self) -> None:
        """Read the vocabulary, which takes about a second at 150,000 tokens; else the first use does."""
        with self._lock:
            self._load()

    def compile(self, wanted: StructuredOutput) -> None:
        """Compile and keep a grammar, so that `matcher` need not.

        Raises:
            RequestError: It cannot be compiled; names the field of the request.
        """
        with self._lock:
            self._compile(wanted)

    def matcher(self, wanted: StructuredOutput) -> "GrammarMatcher":
        """A matcher at the start of its text; raises as `compile`."""
        with self._lock:
            return GrammarMatcher(self._compile(wanted).deep_copy())

    def _compile(self, wanted: StructuredOutput) -> "LLMatcher":
        from llguidance import LLMatcher

        matcher = self._compiled.pop(wanted, None)
        if matcher is None:
            try:
                matcher = LLMatcher(self._load(), _grammar(wanted), log_level=0)
            except ValueError as error:
                raise _refused(wanted, str(error)) from None
            if matcher.is_error():
                raise _refused(wanted, matcher.get_error())
        self._compiled[wanted] = matcher
        if len(self._compiled) > NUM_CACHED:
            self._compiled.popitem(last=False)
        return matcher

    def _load(self) -> "LLTokenizer":
        if self._vocabulary is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            words = TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size))
            self._vocabulary = LLTokenizer(words, eos_token=self._stop_token_ids)
        return self._vocabulary


class GrammarMatcher:
    """Where one answer stands in its grammar.

    Args:
        matcher: llguidance's own.
    """

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    def edit(self, row: Tensor) -> None:
        """Set the logits of tokens that may not come, float ``[vocab_size]``, to minus infinity.

        Raises:
            GrammarError: The grammar has become too large to go on.
        """
        allowed = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        if self._matcher.is_error():
            raise GrammarError(_shortened(self._matcher.get_error()))
        is_out = torch.from_numpy(allowed[: len(row)]).view(torch.bool).logical_not_()
        row[: len(is_out)].masked_fill_(is_out.to(row.device), -torch.inf)
        row[len(is_out) :] = -torch.inf

    def accept(self, token_id: int) -> bool:
        """Take the token that was drawn; returns whether the text is complete and nothing can follow."""
        self._matcher.consume_token(token_id)
        return self._matcher.is_stopped()


class GrammarError(Exception):
    """A grammar that cannot be followed any further."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """A tokenizer as llguidance reads it."""

    tokenizer: Any
    vocab_size: int

    @property
    def tokens(self) -> list[bytes]:
        return list(map(TokenBytes(self.tokenizer), range(self.vocab_size)))

    @property
    def special_token_ids(self) -> list[int]:
        return [i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special]

    @property
    def eos_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def bos_token_id(self) -> int | None:
        return self.tokenizer.bos_token_id  # type: ignore[no-any-return]

    def __call__(self, text: bytes) -> list[int]:
        ids = self.tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"]
        return list(ids)


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


def _refused(wanted: StructuredOutput, message: str) -> RequestError:
    return RequestError(
        f"{wanted.field} cannot be compiled: {_shortened(message)}; change it or leave it out",
        field=wanted.field,
    )


def _shortened(message: str) -> str:
    return " ".join(message.partition("<state>")[0].split())[:300]
