"""Structural tags as a Lark grammar: free text in which tagged parts follow a grammar of their own.

Two notations are understood. vLLM's first one: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}. And the
nested one: {"format": {"type": ...}} with the types const_string, json_schema, json_string, regex, grammar, any_text,
sequence, or, tag, triggered_tags and tags_with_separator. Knows JSON, Lark with llguidance's extensions, and the
control tokens that a marker may be made of; knows no other tokens.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from llguidance import regex_to_lark

from quire_interfaces import RequestError
from quire_structured_output.json_quoting import quoted_lark, quoted_pattern
from quire_structured_output.schema_options import json_escapes, to_the_letter

__all__ = ["structural_tag_to_lark"]

_PARAM = "structured_outputs.structural_tag"
_MAX_DEPTH = 32


def structural_tag_to_lark(text: str, whitespace: str, special: Mapping[str, int] | None = None) -> str:
    """Translate.

    Args:
        text: The tag as JSON.
        whitespace: Pattern of white space between the tokens of JSON.
        special: Text of each control token -> its id; in markers they stand for themselves.

    Raises:
        RequestError: a part is missing or not understood; the message has its place.
    """
    tag = json.loads(text)
    if not isinstance(tag, dict):
        raise _wrong("$", tag, "be an object")
    if "format" in tag:
        grammar = _Grammar(whitespace, special or {})
        start = grammar.rule_of(tag["format"], "format", 0)
    elif "structures" in tag:
        grammar = _Grammar(whitespace, special or {})
        start = grammar.rule_of(_nested(tag), "structures", 0)
    else:
        raise _wrong("$", tag, "have 'format', or 'structures' and 'triggers'")
    return "\n".join([f"start: {start}", *grammar.lines]) + "\n"


def _nested(tag: dict[str, Any]) -> dict[str, Any]:
    """The first notation in terms of the second."""
    structures = _list(tag, "structures", "$")
    tags = []
    for index, each in enumerate(structures):
        place = f"structures[{index}]"
        if not isinstance(each, dict):
            raise _wrong(place, each, "be an object with begin, schema and end")
        schema = {"type": "json_schema", "json_schema": each.get("schema", {})}
        tags.append({"begin": _text(each, "begin", place), "content": schema, "end": _text(each, "end", place)})
    return {"type": "triggered_tags", "triggers": _list(tag, "triggers", "$"), "tags": tags}


class _Grammar:
    """Rules in the order they were made."""

    def __init__(self, whitespace: str, special: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self._whitespace = whitespace
        self._special = special
        names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
        self._splitter = re.compile(f"({names})") if names else None

    def rule(self, body: str, *, attributes: str = "") -> str:
        """Add a rule; its name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def rule_of(self, value: Any, place: str, depth: int) -> str:
        """The rule of one format."""
        if not isinstance(value, dict) or not isinstance(value.get("type", "tag"), str):
            raise _wrong(place, value, "be an object with a type")
        if depth > _MAX_DEPTH:
            raise _wrong(place, value, f"be nested at most {_MAX_DEPTH} deep")
        kind = value.get("type", "tag")
        make = getattr(self, f"_{kind}", None) if kind in _TYPES else None
        if make is None:
            raise _wrong(f"{place}.type", kind, f"be one of {', '.join(_TYPES)}")
        rule: str = make(value, place, depth)
        return rule

    def _const_string(self, value: dict[str, Any], place: str, depth: int) -> str:
        return self.rule(self._literal(_text(value, "value", place)))

    def _json_schema(self, value: dict[str, Any], place: str, depth: int) -> str:
        schema = value.get("json_schema", {})
        if not isinstance(schema, (dict, bool)):
            raise _wrong(f"{place}.json_schema", schema, "be a schema")
        is_lenient = _is_lenient(schema)
        schema = to_the_letter(schema, is_lenient=is_lenient)
        if isinstance(schema, dict):
            options = schema.get("x-guidance") if isinstance(schema.get("x-guidance"), dict) else {}
            if escapes := json_escapes(json.dumps(schema, ensure_ascii=False)):
                options = {"json_allowed_escapes": escapes, **(options or {})}
            schema = {**schema, "x-guidance": {"whitespace_pattern": self._whitespace, **(options or {})}}
        return self.rule(f"%json {json.dumps(schema)}")

    def _regex(self, value: dict[str, Any], place: str, depth: int) -> str:
        return self.rule(f"/{regex_to_lark(_text(value, 'pattern', place))}/")

    def _grammar(self, value: dict[str, Any], place: str, depth: int) -> str:
        return self.rule(f"%lark {{\n{_text(value, 'grammar', place)}\n}}")

    def _json_string(self, value: dict[str, Any], place: str, depth: int) -> str:
        """A JSON string whose text follows `content`, a regex or a grammar."""
        content = value.get("content")
        kind = content.get("type") if isinstance(content, dict) else None
        if kind == "regex":
            inner = self.rule(f"/{regex_to_lark(quoted_pattern(_text(content, 'pattern', f'{place}.content')))}/")
        elif kind == "grammar":
            inner = self.rule(f"%lark {{\n{quoted_lark(_text(content, 'grammar', f'{place}.content'))}\n}}")
        else:
            raise _wrong(f"{place}.content.type", kind, "be regex or grammar")
        return self.rule(f'"\\"" {inner} "\\""')

    def _any_text(self, value: dict[str, Any], place: str, depth: int) -> str:
        return self.rule(r"/(.|\n)*/")

    def _sequence(self, value: dict[str, Any], place: str, depth: int) -> str:
        elements = _list(value, "elements", place)
        return self.rule(" ".join(self._rules(elements, f"{place}.elements", depth)))

    def _or(self, value: dict[str, Any], place: str, depth: int) -> str:
        elements = _list(value, "elements", place)
        return self.rule(" | ".join(self._rules(elements, f"{place}.elements", depth)))

    def _tag(self, value: dict[str, Any], place: str, depth: int) -> str:
        return self._tag_after("", value, place, depth)

    def _tag_after(self, trigger: str, value: Any, place: str, depth: int) -> str:
        """A tag whose first part, `trigger`, is there already."""
        if not isinstance(value, dict):
            raise _wrong(place, value, "be a tag")
        begin, end = _text(value, "begin", place), _text(value, "end", place)
        content = self.rule_of(value.get("content"), f"{place}.content", depth + 1)
        return self.rule(f"{self._literal(begin[len(trigger) :])} {content} {self._literal(end)}".strip())

    def _triggered_tags(self, value: dict[str, Any], place: str, depth: int) -> str:
        triggers, tags = _list(value, "triggers", place), _list(value, "tags", place)
        options: dict[str, list[str]] = {}
        for index, trigger in enumerate(triggers):
            if not isinstance(trigger, str) or not trigger:
                raise _wrong(f"{place}.triggers[{index}]", trigger, "be text and not empty")
            options[trigger] = []
        for index, tag in enumerate(tags):
            begin = _text(tag, "begin", f"{place}.tags[{index}]")
            matching = [each for each in options if begin.startswith(each)]
            if not matching:
                raise _wrong(f"{place}.tags[{index}].begin", begin, f"start with one of the triggers {list(options)}")
            trigger = max(matching, key=len)
            options[trigger].append(self._tag_after(trigger, tag, f"{place}.tags[{index}]", depth))
        blocks = []
        for trigger, rules in options.items():
            if rules:
                # A control token is no text, so that the text before it ends there by itself.
                attributes = "" if trigger in self._special else "[lazy]"
                head = self.rule(f"/(.|\\n)*/ {self._literal(trigger)}", attributes=attributes)
                blocks.append(self.rule(f"{head} ({' | '.join(rules)})"))
        block = self.rule(" | ".join(blocks))
        text = self.rule(r"/(.|\n)*/")
        if value.get("stop_after_first"):
            return self.rule(block if value.get("at_least_one") else f"{block} | {text}")
        return self.rule(f"{block}{'+' if value.get('at_least_one') else '*'} {text}")

    def _tags_with_separator(self, value: dict[str, Any], place: str, depth: int) -> str:
        tags = self._rules(_list(value, "tags", place), f"{place}.tags", depth)
        separator = _text(value, "separator", place)
        one = self.rule(" | ".join(tags))
        if value.get("stop_after_first"):
            return self.rule(one if value.get("at_least_one") else f"{one}?")
        more = self.rule(f"{one} ({self._literal(separator)} {one})*" if separator else f"{one}+")
        return self.rule(more if value.get("at_least_one") else f"{more}?")

    def _literal(self, text: str) -> str:
        """A marker: its text, and control tokens by id."""
        pieces = self._splitter.split(text) if self._splitter else [text]
        written = [
            f"<[{self._special[each]}]>" if each in self._special else json.dumps(each) for each in pieces if each
        ]
        return " ".join(written)

    def _rules(self, elements: list[Any], place: str, depth: int) -> list[str]:
        return [self.rule_of(each, f"{place}[{index}]", depth + 1) for index, each in enumerate(elements)]


_TYPES = (
    "const_string", "json_schema", "json_string", "regex", "grammar", "any_text", "sequence", "or", "tag",
    "triggered_tags", "tags_with_separator",
)  # fmt: skip


def _text(value: Any, key: str, place: str) -> str:
    content = value.get(key) if isinstance(value, dict) else None
    if not isinstance(content, str):
        raise _wrong(f"{place}.{key}", content, "be text")
    return content


def _list(value: dict[str, Any], key: str, place: str) -> list[Any]:
    content = value.get(key)
    if not isinstance(content, list) or not content:
        raise _wrong(f"{place}.{key}", content, "be a list of at least one element")
    return content


def _wrong(place: str, value: Any, must: str) -> RequestError:
    return RequestError(
        f"{_PARAM}: {place} must {must}, got {reprlib.repr(value)}", param=_PARAM, code="invalid_grammar"
    )


def _is_lenient(schema: Any) -> bool:
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    return isinstance(options, dict) and options.get("lenient") is True
