"""Contents of messages in the form that a chat template takes: text, or a list of parts.

Templates of models that take media write a placeholder where a part of a content is an image, and some read lists
alone: text that is no list is left out in silence. Others read text alone, and the placeholder has to be in it. Which
it is, is found once by rendering small conversations.

Knows prepared messages (messages.py); knows neither jinja2 nor tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from quire_renderers.messages import joined_text

__all__ = ["PAIR_ROLES", "TemplateContent"]

Messages = list[dict[str, Any]]

PAIR_ROLES = ("query", "document")
"""Roles of the messages that a pair of texts is to a chat template, as sentence-transformers names them."""
_WORD = "marble"
_TEXT_PART = {"type": "text", "text": _WORD}


class TemplateContent:
    """What one template takes as the content of a message.

    Args:
        render: A small conversation as text; None where the template refuses or fails.
        placeholders: Token that stands for an item in a prompt, by modality.
    """

    roles: tuple[str, ...] = ("user",)
    """Of the messages of the small conversations."""

    def __init__(self, render: Callable[[Messages], str | None], placeholders: Mapping[str, str]) -> None:
        self._render = render
        self._placeholders = placeholders

    def formed(self, messages: Messages) -> Messages:
        """The messages as the template takes them; the same list where it takes them as they are."""
        if self.takes_text and not any(isinstance(each.get("content"), list) for each in messages):
            return messages
        return [
            {**message, "content": self._content(message["content"])} if "content" in message else message
            for message in messages
        ]

    @functools.cached_property
    def takes_text(self) -> bool:
        """Whether a content that is text is written. True also where nothing that was tried is."""
        return self._writes(_WORD) or not self.takes_parts

    @functools.cached_property
    def of_pairs(self) -> TemplateContent:
        """What the template takes in messages with the roles of a pair."""
        return _PairContent(self._render, self._placeholders)

    @functools.cached_property
    def takes_parts(self) -> bool:
        """Whether the text of a content's parts is written, and not the list."""
        return self._writes([_TEXT_PART])

    @functools.cached_property
    def written_modalities(self) -> frozenset[str]:
        """Modalities of whose parts the template writes the placeholder."""
        return frozenset(
            modality
            for modality, placeholder in self._placeholders.items()
            if self._writes([{"type": modality}, _TEXT_PART], placeholder)
        )

    def _writes(self, content: Any, placeholder: str = "") -> bool:
        text = self._render([{"role": role, "content": content} for role in self.roles])
        return text is not None and _WORD in text and placeholder in text and not _shows_list(text)

    def _content(self, content: str | list[dict[str, Any]]) -> Any:
        if isinstance(content, str):
            return content if self.takes_text else [{"type": "text", "text": content}]
        if not self.takes_parts:
            texts = [self._part_text(part) for part in content]
            return joined_text(texts, [place for place, part in enumerate(content) if part["type"] != "text"])
        return [
            part
            if part["type"] == "text" or part["type"] in self.written_modalities
            else {"type": "text", "text": self._part_text(part)}
            for part in content
        ]

    def _part_text(self, part: dict[str, Any]) -> str:
        return str(part["text"]) if part["type"] == "text" else self._placeholders[part["type"]]


class _PairContent(TemplateContent):
    """What one template takes as the contents of a query and a document."""

    roles = PAIR_ROLES


def _shows_list(text: str) -> bool:
    """Whether a template wrote a list as Python or JSON shows it."""
    return "'type':" in text or '"type":' in text
