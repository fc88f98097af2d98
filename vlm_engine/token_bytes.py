"""The bytes that one token stands for, whatever its tokenizer makes of bytes."""

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE_OF_BYTES = "Ġ"
SPACE_OF_PIECES = "▁"


class TokenBytes:
    """Bytes of the tokens of one vocabulary: byte-level (Qwen, GPT-2), pieces (Llama, Gemma), or plain.

    Args:
        tokenizer: The checkpoint's tokenizer.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._added = {i: str(token.content) for i, token in tokenizer.added_tokens_decoder.items()}
        vocab = tokenizer.get_vocab()
        self._is_byte_level = SPACE_OF_BYTES in vocab
        self._fallback = {vocab[name]: value for value in range(256) if (name := f"<0x{value:02X}>") in vocab}

    def __call__(self, token_id: int) -> bytes:
        """Its bytes; a special token is its name, an id without a token is nothing."""
        if token_id in self._added:
            return self._added[token_id].encode()
        if token_id in self._fallback:
            return bytes([self._fallback[token_id]])
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if name is None:
            return b""
        if not self._is_byte_level:
            return str(name).replace(SPACE_OF_PIECES, " ").encode()
        values = _byte_of_char()
        return bytes(values[char] for char in name) if values.keys() >= set(name) else str(name).encode()


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """The characters in which byte-level tokenizers write bytes: printable ones are themselves (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in set(printable)]
    return {chr(value): value for value in printable} | {chr(256 + i): v for i, v in enumerate(others)}
