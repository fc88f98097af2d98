"""Output that keeps to a JSON schema, a regular expression, a list of choices or a grammar.

`llguidance` says before each token which ones may come. It was chosen over xgrammar by measuring
(`benchmarks/structured_output.py`): both need far less than a millisecond a token at a vocabulary of 150,000,
but it compiles in one millisecond instead of forty, and refuses what it cannot enforce.
"""

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vlm_engine.errors import EngineBusy, EngineError
from vlm_engine.forms import FormError, Vocabulary, new_matcher, new_tokenizer, shortened
from vlm_engine.sampling_params import StructuredOutput
from vlm_engine.token_bytes import TokenBytes
from vlm_engine.trial import FormTrial, refused

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

NUM_CACHED = 32
NICENESS = 10
NUM_REFUSED = 64
MAX_COMPILING = 16
"""Forms that wait for their turn: each takes some seconds at most, one after the other."""


@dataclass(frozen=True, slots=True)
class CompiledForm:
    """A form that answers can keep to.

    Args:
        matcher: llguidance's own at the start of a text; never moved.
    """

    matcher: "LLMatcher"

    def start(self) -> "GrammarMatcher":
        """Where a new answer stands in it."""
        return GrammarMatcher(self.matcher.deep_copy())


Compiling = Future[CompiledForm | str]
"""What becomes of a form: compiled, or the reason why not."""


class Grammars:
    """Compiled forms of one vocabulary; safe from any thread.

    A form that was not seen before is tried out in another process (`FormTrial`), then compiled on a thread
    beside all others, one form at a time; nobody else waits for it.

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
        self._compiler = ThreadPoolExecutor(1, "compile", _give_way)
        self._parts: tuple[LLTokenizer, FormTrial] | None = None
        self._compiled: OrderedDict[StructuredOutput, Compiling] = OrderedDict()
        self._refused: OrderedDict[StructuredOutput, Compiling] = OrderedDict()

    def load(self) -> None:
        """Get ready for forms, which takes some seconds at 150,000 tokens; else the first use does."""
        _, trial = self._compiler.submit(self._load).result()
        # why: there may be a process when the first form comes, and then it tells
        with suppress(OSError):
            trial.start()

    def close(self) -> None:
        """End the process in which forms are tried out; what waits for it is given up."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        if self._parts is not None:
            self._parts[1].close()

    def begin(self, wanted: StructuredOutput) -> Compiling:
        """Have a form compiled and return at once; its end is read by `compiled`.

        # invariant: equal forms share one future, which is not to be cancelled.

        Raises:
            EngineBusy: Too many others wait for their turn.
        """
        with self._lock:
            known = self._refused if wanted in self._refused else self._compiled
            if wanted not in known:
                if sum(not each.done() for each in self._compiled.values()) >= MAX_COMPILING:
                    raise EngineBusy("too many new forms wait to be compiled; send it again later")
                self._compiled[wanted] = self._compiler.submit(self._compile, wanted)
            known.move_to_end(wanted)
            return known[wanted]

    def compiled(self, wanted: StructuredOutput, compiling: Compiling) -> CompiledForm:
        """What became of a form; waits for it if need be.

        Raises:
            RequestError: It cannot be compiled, or not in time; names the field of the request.
            EngineStopped: It could not be tried out.
        """
        form = compiling.result()
        if isinstance(form, str):
            raise refused(wanted, form)
        return form

    def compile(self, wanted: StructuredOutput) -> CompiledForm:
        """`begin` and `compiled` in one."""
        return self.compiled(wanted, self.begin(wanted))

    def _compile(self, wanted: StructuredOutput) -> CompiledForm | str:
        tokenizer, trial = self._load()
        try:
            trial.check(wanted)
            matcher = new_matcher(tokenizer, wanted)
            # why: copies find it computed, which takes long for some forms
            matcher.compute_bitmask()
        except FormError as error:
            self._settle(wanted, is_refused=True)
            return str(error)
        except BaseException as error:
            with self._lock:
                self._compiled.pop(wanted, None)
            if isinstance(error, EngineError):
                raise
            # why: what llguidance raises when it panics is no Exception, and would end who waits for it
            raise EngineError(f"a form could not be compiled: {error!r}") from error
        self._settle(wanted)
        return CompiledForm(matcher)

    def _settle(self, wanted: StructuredOutput, *, is_refused: bool = False) -> None:
        """Keep the newest of each kind, so that bad forms push no good ones out."""
        with self._lock:
            if is_refused and wanted in self._compiled:
                self._refused[wanted] = self._compiled.pop(wanted)
            for kept, most in ((self._compiled, NUM_CACHED), (self._refused, NUM_REFUSED)):
                while len(kept) > most:
                    kept.popitem(last=False)

    def _load(self) -> "tuple[LLTokenizer, FormTrial]":
        if self._parts is None:
            words = _Words(self._tokenizer, self._vocabulary())
            self._parts = new_tokenizer(words.vocabulary, words), FormTrial(words.vocabulary)
        return self._parts

    def _vocabulary(self) -> Vocabulary:
        added = self._tokenizer.added_tokens_decoder.items()
        return Vocabulary(
            list(map(TokenBytes(self._tokenizer), range(self._vocab_size))),
            [token_id for token_id, token in added if token.special],
            self._stop_token_ids or [self._tokenizer.eos_token_id],
            self._tokenizer.bos_token_id,
        )


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
            raise GrammarError(shortened(self._matcher.get_error()))
        is_out = torch.from_numpy(allowed[: len(row)]).view(torch.bool).logical_not_()
        row[: len(is_out)].masked_fill_(is_out.to(row.device), -torch.inf)
        row[len(is_out) :] = -torch.inf

    def start_over(self, token_ids: Sequence[int]) -> None:
        """Stand behind `token_ids`, which were accepted before, from the start."""
        self._matcher.reset()
        self._matcher.consume_tokens(list(token_ids))

    def accept(self, token_id: int) -> bool:
        """Take the token that was drawn; returns whether the text is complete and nothing can follow."""
        self._matcher.consume_token(token_id)
        return self._matcher.is_stopped()


class GrammarError(Exception):
    """A grammar that cannot be followed any further."""


class _Words:
    """A vocabulary that splits texts as the checkpoint's tokenizer does, in llguidance's words."""

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_token_ids
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_id = int(tokenizer.eos_token_id)

    def __call__(self, text: bytes) -> list[int]:
        ids = self._tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"]
        return list(ids)


def _give_way() -> None:
    """Leave the cores to the steps where both want them."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
