"""Texts of messages cannot write control tokens: what looks like one in them is ordinary text.

A user's text, a tool's result or a document that holds `<|im_end|>` must not end its turn. Before a conversation goes
through the chat template, a mark is put into each place of its texts that would be read as a control token, alone or
together with text beside it; behind the template, whole control tokens are the template's own, and the marks say which
parts are to be tokenized as plain text (literal_text.py). Texts without such places, nearly all, are not touched.

Knows texts and the shapes of messages; knows no template and no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from quire_renderers.literal_text import unguessable
from quire_renderers.segments import any_of

__all__ = ["ControlTokens"]

_ANSWER_FIELDS = ("content", "reasoning_content", "reasoning", "thinking")


class ControlTokens:
    """Marks what looks like control tokens in the parts of a conversation.

    Args:
        contents: Texts of the control tokens.
        output_markers: Those of them that the model's answers hold rightly (calls, channels) and that templates read in
            earlier answers; there they stay what they are.
        normalize: What the tokenizer makes of a text before it looks for some of the tokens; None where it looks for
            all of them in the text as it is.
    """

    def __init__(
        self,
        contents: Collection[str],
        output_markers: Collection[str] = (),
        normalize: Callable[[str], str] | None = None,
    ) -> None:
        self.mark = unguessable(0xFDD0, 0xFDDF)
        self.contents = tuple(sorted(set(contents)))
        self._escaped_mark = json.dumps(self.mark)[1:-1]
        self._all = _Marker(self.contents, self.mark, normalize)
        self._answers = _Marker([text for text in self.contents if text not in output_markers], self.mark, normalize)

    def marked_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The prepared messages, marked."""
        return [self._marked_message(message) for message in messages]

    def marked(self, value: Any) -> Any:
        """Tools, documents or other values, marked in all of their texts."""
        return self._all.value(value)

    def unmarked(self, text: str) -> str:
        """The text without marks."""
        return text.replace(self.mark, "")

    def rendered(self, text: str) -> str:
        """What a template wrote, with the marks that it escaped as JSON put back."""
        return text.replace(self._escaped_mark, self.mark)

    def _marked_message(self, message: dict[str, Any]) -> dict[str, Any]:
        is_answer = message["role"] == "assistant"
        result: dict[str, Any] = {}
        for key, value in message.items():
            marker = self._answers if is_answer and key in _ANSWER_FIELDS else self._all
            if key == "role":
                result[key] = value
            elif key == "content" and isinstance(value, str):
                result[key] = marker.content(value)
            elif key == "content" and isinstance(value, list):
                result[key] = [
                    {**part, "text": marker.content(part["text"])} if part["type"] == "text" else part for part in value
                ]
            else:
                result[key] = marker.value(value)
        return result


class _Marker:
    """Marks the texts of one set of control tokens."""

    def __init__(self, contents: Collection[str], mark: str, normalize: Callable[[str], str] | None) -> None:
        self._contents = tuple(text for text in contents if len(text) > 1)
        self._mark = mark
        self._normalize = normalize
        self._starts = {text[:2] for text in self._contents}
        self._longest = max(map(len, self._contents), default=0)
        self._prefixes = {text[:length] for text in self._contents for length in range(1, len(text))}
        self._suffixes = {text[-length:] for text in self._contents for length in range(1, len(text))}
        self._pattern = any_of(self._contents)
        self._anywhere = re.compile(f"(?={self._pattern.pattern})")

    def content(self, text: str) -> str:
        """The content of a message, which a template may write between two parts of a token."""
        bare = text.strip()
        is_inside = 0 < len(bare) < self._longest and any(bare in each for each in self._contents)
        return self._with_marks(text, {text.index(bare)} if is_inside else set())

    def value(self, value: Any) -> Any:
        """All texts inside a value, keys of objects too."""
        if not self._contents:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(key): self.value(item) for key, item in value.items()}
        return list(map(self.value, value)) if isinstance(value, list) else value

    def text(self, text: str) -> str:
        """The text with a mark inside of each token, and at its ends where one could be made with text beside it."""
        return self._with_marks(text, set())

    def _with_marks(self, text: str, places: set[int]) -> str:
        if self._may_hold(text):
            places |= {match.start() + 1 for match in self._anywhere.finditer(text)}
        places |= self._ends(text)
        if self._normalize is not None and not places and self._pattern.search(self._normalize(text)):
            places = set(range(1, len(text)))
        if not places:
            return text
        cuts = sorted(places)
        return self._mark.join(text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True))

    def _may_hold(self, text: str) -> bool:
        """Two quick looks: most texts hold no token, and not even its beginning."""
        if len(self._starts) < 8 and not any(start in text for start in self._starts):
            return False
        return self._pattern.search(text) is not None

    def _ends(self, text: str) -> set[int]:
        """Where the text begins with the end of a token, or ends with its beginning; templates may strip blanks."""
        places: set[int] = set()
        head, tail = text.lstrip()[: self._longest], text.rstrip()
        for length in range(1, min(self._longest, len(tail) + 1)):
            if head[:length] in self._suffixes:
                places.add(len(text) - len(text.lstrip()))
            if tail[-length:] in self._prefixes:
                places.add(len(tail) - length + 1)
        return places
