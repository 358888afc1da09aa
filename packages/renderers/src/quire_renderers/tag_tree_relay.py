"""Passes arguments on as JSON that a model writes as tags named after their parameters, nested for objects and lists.

A tag with text in it is a value, of the type of the tool's schema; a tag with tags in it is an object, or a list if
they are its items. What was given out at any time can be closed with brackets alone (`closers`): a value is given out
when it is whole. Ends before the tag that ends the call. Everything else ends in `failed`; the relay never raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_renderers.literal_relay import json_string
from quire_renderers.tool_schemas import ToolSchemas, value_as_json

__all__ = ["TagTree", "TagTreeRelay"]

_MAX_DEPTH = 64
_MAX_KEY_CHARS = 256
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class TagTree:
    """How such arguments are written."""

    mark: str
    """What stands before each tag."""
    end: str
    """The name of the tag that ends the call."""
    item: str
    """The name of the tags in a list."""


@dataclass(slots=True)
class _Element:
    """A tag that is open."""

    key: str
    schema: Mapping[str, Any]
    pending: str
    """What is to be given out before anything in it."""
    closer: str = ""
    """What ends it; empty while it may still be a value."""
    keys: set[str] = field(default_factory=set)
    """Of an object, those that came so far."""
    is_empty: bool = True
    text: list[str] = field(default_factory=list)


class TagTreeRelay:
    """Relays the arguments of one call.

    Args:
        tree: How they are written.
        tools: The tools that were offered.
        tool: Name of the one that is called.
    """

    def __init__(self, tree: TagTree, tools: ToolSchemas, tool: str) -> None:
        self._tree = tree
        self._tools = tools
        self._tool = tool
        self._stack = [_Element("", tools.parameters(tool), "{", "}")]
        self._out: list[str] = []
        self._has_started = False
        self.failed = False
        self.done = False
        """Whether all arguments were read."""

    @property
    def closers(self) -> str:
        """What makes valid JSON of all that was given out; empty before anything was."""
        if not self._has_started or self.done:
            return ""
        return "".join(element.closer for element in reversed(self._stack) if not element.pending)

    def feed(self, text: str) -> tuple[str, int, int]:
        """Take in text.

        Returns:
            What can be given out; how far the text was read; and up to where it is represented by what was given out.
        """
        self._out, position, safe = [], 0, 0
        mark = self._tree.mark
        while not self.failed and not self.done:
            begin = text.find(mark, position)
            plain_end = begin if begin >= 0 else _held_from(text, mark, position)
            self._take_text(text[position:plain_end])
            position = plain_end
            if begin < 0 or self.failed:
                break
            end = text.find(">", begin + len(mark))
            if end < 0:
                self.failed = len(text) - begin - len(mark) > _MAX_KEY_CHARS
                break
            num_given = len(self._out)
            self._take_tag(text[begin + len(mark) : end + 1])
            if not self.done and not self.failed:
                position = end + 1
            if len(self._out) > num_given:
                safe = position
        return "".join(self._out), position, safe

    def finish(self) -> str:
        """No more text: nothing becomes whole by that."""
        return ""

    def _take_text(self, text: str) -> None:
        element = self._stack[-1]
        if not element.closer:
            element.text.append(text)
        elif text.strip(_SPACE):
            self.failed = True

    def _take_tag(self, tag: str) -> None:
        element = self._stack[-1]
        if tag.startswith("</"):
            name = tag[2:-1]
            if len(self._stack) == 1 and name == self._tree.end:
                self._give("}")
                self.done = True
            elif len(self._stack) > 1 and name == element.key:
                self._close(element)
            else:
                self.failed = True
        elif tag.startswith("<") and 2 < len(tag) < _MAX_KEY_CHARS and len(self._stack) < _MAX_DEPTH:
            self._open(element, tag[1:-1])
        else:
            self.failed = True

    def _open(self, parent: _Element, key: str) -> None:
        if not parent.closer:
            if "".join(parent.text).strip(_SPACE):
                self.failed = True
                return
            types = self._tools.types_of(self._tool, parent.schema)
            is_list = key == self._tree.item and (not types or "array" in types)
            parent.closer = "]" if is_list else "}"
            self._give("[" if is_list else "{")
        is_item = parent.closer == "]"
        if not is_item and key in parent.keys:
            self.failed = True
            return
        parent.keys.add(key)
        separator = "" if parent.is_empty else ", "
        parent.is_empty = False
        name = "" if is_item else f"{json_string(key)}: "
        schema = self._tools.child(self._tool, parent.schema, None if is_item else key)
        self._stack.append(_Element(key, schema, separator + name))

    def _close(self, element: _Element) -> None:
        if element.closer:
            self._give(element.closer)
        else:
            text, types = "".join(element.text), self._tools.types_of(self._tool, element.schema)
            empty = {frozenset({"object"}): "{}", frozenset({"array"}): "[]"}.get(types - {"null"})
            is_empty = empty is not None and not text.strip(_SPACE)
            self._give(empty if is_empty and empty else value_as_json(text, types, untyped="json"))
        self._stack.pop()

    def _give(self, text: str) -> None:
        for element in self._stack:
            self._out.append(element.pending)
            element.pending = ""
        self._out.append(text)
        self._has_started = True


def _held_from(text: str, mark: str, start: int) -> int:
    """Where the end of a text begins that may still become the mark."""
    for size in range(min(len(mark) - 1, len(text) - start), 0, -1):
        if mark.startswith(text[-size:]):
            return len(text) - size
    return len(text)
