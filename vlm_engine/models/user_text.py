"""Special tokens are the chat template's own; what people write is text, whatever it looks like.

A message that holds ``<|im_end|>`` would otherwise end its turn and could begin one of the system's.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from vlm_engine.errors import RequestError
from vlm_engine.models.messages import walk_parts
from vlm_engine.request import Message

MARKS = (range(0xE000, 0xF8FF), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Unicode's characters for private use."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as one text.

    Args:
        text: As the chat template writes it.
        marks: Characters that stand in it for others of what people wrote; mostly none.
    """

    text: str
    marks: Mapping[str, str] = field(default_factory=dict)


class UserText:
    """Renders conversations so that no text of a message becomes a special token.

    Args:
        processor: A processor or tokenizer with a chat template.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._tokenizer = getattr(processor, "tokenizer", processor)
        added = self._tokenizer.added_tokens_decoder
        self._special_ids = {i for i, token in added.items() if token.special}
        names = {str(added[i].content) for i in self._special_ids}
        self._first_chars = sorted({name[0] for name in names})
        longest_first = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def render(self, messages: Sequence[Message]) -> Rendered:
        """The text for the tokenizer; `restored` must follow if it has marks.

        # invariant: a conversation without special tokens in its messages is rendered as it always was.

        Raises:
            RequestError: The template cannot take the messages.
        """
        text = self._apply(messages)
        marks = self._marks("".join(part.get("text", "") for _, part in walk_parts(messages)))
        if not marks:
            return Rendered(text)
        marked = self._apply([_marked(message, marks) for message in messages])
        if len(self._pattern.findall(marked)) == len(self._pattern.findall(text)):
            return Rendered(text)
        return Rendered(marked, {mark: char for char, mark in marks.items()})

    def restored(self, token_ids: list[int], rendered: Rendered) -> list[int]:
        """The tokens of a marked text with what people wrote in place, none of it a special token.

        Between two special tokens of the template all text is tokenized at once, as it is without marks.
        """
        if not rendered.marks:
            return token_ids
        result: list[int] = []
        run: list[int] = []
        for token_id in token_ids:
            if token_id in self._special_ids:
                result += [*self._plain(run, rendered.marks), token_id]
                run = []
            else:
                run.append(token_id)
        return result + self._plain(run, rendered.marks)

    def _plain(self, token_ids: list[int], marks: Mapping[str, str]) -> list[int]:
        if not token_ids:
            return []
        text = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        if not any(mark in text for mark in marks):
            return token_ids
        text = text.translate(str.maketrans(dict(marks)))
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)[
            "input_ids"
        ]
        if self._special_ids.intersection(ids):
            raise RequestError("text must not contain the model's special tokens", field="messages")
        return list(ids)

    def _marks(self, text: str) -> dict[str, str]:
        """A character that the text does not have for each that begins a special token."""
        used = set(text)
        free = (chr(code) for code in chain(*MARKS) if chr(code) not in used)
        marks = dict(zip((char for char in self._first_chars if char in used), free, strict=False))
        if len(marks) < len(used.intersection(self._first_chars)):
            raise RequestError("text must not contain all characters for private use", field="messages")
        return marks

    def _apply(self, messages: Sequence[Message]) -> str:
        try:
            text = self._processor.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            raise RequestError(f"the model's chat template refuses it: {error}", field="messages") from error
        return str(text)


def _marked(message: Message, marks: Mapping[str, str]) -> Message:
    table = str.maketrans(dict(marks))
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content.translate(table)}
    parts = [
        {**part, "text": part["text"].translate(table)} if part["type"] == "text" else part
        for part in content
    ]
    return {**message, "content": parts}
