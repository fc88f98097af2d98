"""Text while it comes (E21) and stop strings (E22), for byte-level and byte-fallback tokenizers."""

import codecs
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.tiny_tokenizers import qwen_tokenizer
from vlm_engine.detokenizer import MAX_WINDOW, Detokenizer

FFFD = "\ufffd"
HARD_TEXTS = [
    "plain words of a street",
    "Two people are walking on the left.",
    "한글 조합",
    "😀😀 ok 😀",
    "👨‍👩‍👧‍👦 family and 👩🏽‍🚀",
    "🇰🇷🇩🇪 flags",
    "naïve é e\u0301 Ünïcödé",
    "日本語のテキスト",
    "a \ufffd that the model really wrote \ufffd",
    "tabs\tand\nnew\r\nlines   and spaces ",
    " leading space",
    "",
]


@functools.cache
def byte_level() -> PreTrainedTokenizerBase:
    return qwen_tokenizer()


@functools.cache
def byte_fallback() -> PreTrainedTokenizerBase:
    """Like Llama's: a space is U+2581, letters of a few words are merged, all else is `<0x..>` tokens."""
    special = ["<unk>", "<s>", "</s>"]
    names = special + [f"<0x{value:02X}>" for value in range(256)] + list("▁abcdefhilnoprstuw")
    vocab = {name: index for index, name in enumerate(names)}
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("▁", "the"),
        ("▁", "w"),
        ("▁w", "o"),
        ("o", "n"),
        ("p", "e"),
        ("▁", "▁"),
    ]
    vocab |= {left + right: len(vocab) + index for index, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


def full_decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    return str(
        tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return FFFD * (error.end - error.start), error.end


codecs.register_error("replace-each-byte", _replace_each_byte)


def kept_decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The decode of byte-fallback tokens after each byte of no character was made a U+FFFD of its own."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    names = [tokenizer.convert_ids_to_tokens(token_id) for token_id in token_ids]
    names = [name for name in names if name and name not in special]
    tokens: list[str] = []
    run = b""
    for name in [*names, ""]:
        if name.startswith("<0x"):
            run += bytes([int(name[3:5], 16)])
            continue
        valid = run.decode(errors="replace-each-byte").encode()
        tokens += [f"<0x{value:02X}>" for value in valid] + [name] * (name != "")
        run = b""
    return full_decode(tokenizer, tokenizer.convert_tokens_to_ids(tokens))


def stream(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], stop: tuple[str, ...] = (), size: int = 1
) -> tuple[list[str], str, bool]:
    """The deltas of pushes of `size` tokens, the tail, and whether a stop string was found."""
    detokenizer = Detokenizer(tokenizer, stop)
    deltas = [detokenizer.push(token_ids[at : at + size]) for at in range(0, len(token_ids), size)]
    return deltas, detokenizer.finish(), detokenizer.stopped


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """Up to the stop string that ends first, the longest of those that end there."""
    for end in range(len(text) + 1):
        lengths = [len(each) for each in stop if text[:end].endswith(each)]
        if lengths:
            return text[: end - max(lengths)]
    return text


def without_held(text: str, stop: tuple[str, ...]) -> str:
    """Without the longest end that is a proper prefix of a stop string."""
    held = [size for each in stop for size in range(1, len(each)) if text.endswith(each[:size])]
    return text[: len(text) - max(held, default=0)]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_deltas_join_to_the_full_decode(kind: str, text: str, size: int) -> None:
    """E21: emoji, Hangul, ZWJ sequences, flags, combining marks, a U+FFFD of the model's own."""
    tokenizer = TOKENIZERS[kind]()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    deltas, tail, stopped = stream(tokenizer, token_ids, size=size)
    assert "".join(deltas) + tail == full_decode(tokenizer, token_ids)
    assert FFFD in text or FFFD not in "".join(deltas) + tail
    assert not stopped


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_no_character_is_sent_before_it_is_complete(kind: str) -> None:
    """E21: four tokens of one emoji give one delta, at the fourth."""
    tokenizer = TOKENIZERS[kind]()
    token_ids = tokenizer.encode("😀", add_special_tokens=False)[-4:]
    assert stream(tokenizer, token_ids)[:2] == (["", "", "", "😀"], "")
    assert stream(tokenizer, token_ids[:3])[0] == ["", "", ""]
    assert set(stream(tokenizer, token_ids[:3])[1]) == {FFFD}


def any_ids(tokenizer: PreTrainedTokenizerBase, letters: str) -> st.SearchStrategy[list[int]]:
    """Encoded texts between single ids: bytes that break characters, special tokens, ids without a token."""
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    single = st.integers(0, len(tokenizer) + 20).map(lambda token_id: [token_id])
    parts = st.lists(st.text(letters, max_size=8).map(encode) | single, max_size=25)
    return parts.map(lambda lists: list(itertools.chain.from_iterable(lists)))


@given(any_ids(byte_level(), "ab 한😀\u200d\u0301é"))
def test_any_byte_level_tokens(token_ids: list[int]) -> None:
    """E21: all that is settled is sent at once, and nothing else."""
    detokenizer, sent = Detokenizer(byte_level()), ""
    for end, token_id in enumerate(token_ids, 1):
        sent += detokenizer.push((token_id,))
        assert sent == full_decode(byte_level(), token_ids[:end]).removesuffix(FFFD)
    assert sent + detokenizer.finish() == full_decode(byte_level(), token_ids)


@given(any_ids(byte_fallback(), "a the w한😀\u200d\u0301é"))
@example([197, 1, 131, 131])
def test_any_byte_fallback_tokens(token_ids: list[int]) -> None:
    """E21: as above; a broken byte does not take the good characters of its run with it."""
    deltas, tail, _ = stream(byte_fallback(), token_ids)
    whole = full_decode(byte_fallback(), token_ids)
    assert "".join(deltas) + tail == (kept_decode(byte_fallback(), token_ids) if FFFD in whole else whole)


@given(
    st.text("ab😀 ", max_size=40),
    st.lists(st.text("ab😀 ", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
    st.integers(1, 4),
    st.sampled_from(list(TOKENIZERS)),
)
def test_any_stop_strings(text: str, stop: tuple[str, ...], size: int, kind: str) -> None:
    """E22: no part of a stop string leaks, no more than a true prefix waits, the tail comes at the end."""
    tokenizer = TOKENIZERS[kind]()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer, sent = Detokenizer(tokenizer, stop), ""
    for at in range(0, len(token_ids), size):
        sent += detokenizer.push(token_ids[at : at + size])
        decode = kept_decode if kind == "byte_fallback" else full_decode
        so_far = decode(tokenizer, token_ids[: at + size]).rstrip(FFFD)
        kept = cut_at_stop(so_far, stop)
        assert sent == (kept if detokenizer.stopped else without_held(so_far, stop))
        assert detokenizer.stopped == (kept != so_far)
    whole = full_decode(tokenizer, token_ids)
    assert sent + detokenizer.finish() == cut_at_stop(whole, stop)


@pytest.mark.parametrize(
    ("pieces", "stop", "deltas", "tail", "stopped"),
    [
        (["one", " st", "op two"], ("stop",), ["one", " ", ""], "", True),
        (["x<", "e", "nd", ">y"], ("<end>",), ["x", "", "", ""], "", True),
        (["x<", "e", "nt", "er>"], ("<end>",), ["x", "", "<ent", "er>"], "", False),
        (["a sto"], ("stop",), ["a "], "sto", False),
        (["aa", "aa", "ab"], ("aaab",), ["", "a", "a"], "", True),
        (["abc"], ("abcd", "bc"), ["a"], "", True),
        (["END"], ("END",), [""], "", True),
        (["a", "STOP", "b"], ("STOP", "TOP"), ["a", "", ""], "", True),
    ],
)
def test_stop_strings_across_tokens(
    pieces: list[str], stop: tuple[str, ...], deltas: list[str], tail: str, stopped: bool
) -> None:
    """E22: one string over two and three pushes, one that is only begun, a prefix of other text."""
    detokenizer = Detokenizer(byte_level(), stop)
    pushed = [detokenizer.push(byte_level().encode(piece, add_special_tokens=False)) for piece in pieces]
    assert (pushed, detokenizer.stopped) == (deltas, stopped)
    assert detokenizer.finish() == tail


def test_nothing_follows_a_stop_string() -> None:
    """E22: tokens of the same step and of later ones are dropped."""
    detokenizer = Detokenizer(byte_level(), ("!",))
    assert detokenizer.push(byte_level().encode("hi! there", add_special_tokens=False)) == "hi"
    assert detokenizer.push(byte_level().encode(" more", add_special_tokens=False)) == ""
    assert detokenizer.finish() == ""


def test_special_tokens_are_not_text() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("a<|im_end|>b<|image_pad|><|endoftext|>")
    assert stream(tokenizer, token_ids)[:2] == (["a", "", "b", "", ""], "")


class _Counting:
    """A tokenizer that notes how many tokens each decode was asked for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.asked: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.asked.append(len(token_ids))
        return str(self._tokenizer.decode(token_ids, **options))


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", ["the wall of people ", "한", "invalid"])
def test_cost_of_a_token_does_not_grow_with_the_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    encoded = tokenizer.encode(text, add_special_tokens=False)
    broken = tokenizer.encode("한", add_special_tokens=False)[-1:]
    token_ids = (broken if text == "invalid" else encoded) * 300
    counting = _Counting(tokenizer)
    deltas, tail, _ = stream(counting, token_ids)  # type: ignore[arg-type]
    assert "".join(deltas) + tail
    assert max(counting.asked) <= MAX_WINDOW
    assert sum(counting.asked) <= (MAX_WINDOW + 2) * len(token_ids)
