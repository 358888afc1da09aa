"""What form one request wants its output to have. Field names follow vLLM's `structured_outputs`.

Knows which fields exclude each other and what is JSON at all; knows no grammar library and no tokenizer, so it cannot
tell whether a schema or pattern is one that a backend understands.
"""

from __future__ import annotations

import json as json_library
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from quire_interfaces.errors import RequestError, wrong_value

__all__ = ["KINDS", "GrammarSpec", "ReasoningSpan", "StructuredOutputsParams"]

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The fields of `StructuredOutputsParams` of which exactly one must be given."""


class GrammarSpec(NamedTuple):
    """The content of a constraint: hashable, so that equal ones are compiled once."""

    kind: str
    """"json", "regex", "choice", "grammar" or "structural_tag" (a JSON object is the schema {"type": "object"})."""
    text: str
    """The schema as compact JSON, the pattern, the choices as a JSON list, the grammar, or the tag as compact JSON."""
    whitespace_pattern: str | None = None
    """Pattern of what may stand between the tokens of JSON; "" for nothing, None for the backend's default."""
    additional_properties: bool = True
    """Whether an object schema that says nothing about it takes properties that it does not name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningSpan:
    """Where the model thinks before it answers; the constraint applies to what follows.

    Raises:
        RequestError: there is no way out of the span.
    """

    end_token_ids: tuple[int, ...]
    """The tokens that end the thinking."""
    start_token_ids: tuple[int, ...] = ()
    """The tokens that begin it, if the output itself may begin with them; empty if it never does."""
    is_open: bool = False
    """Whether the prompt has begun the thinking already."""

    def __post_init__(self) -> None:
        for name in ("start_token_ids", "end_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            for token_id in getattr(self, name):
                if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                    raise wrong_value(f"structured_outputs.reasoning.{name}", token_id, "hold token ids")
        if not self.end_token_ids:
            raise wrong_value("structured_outputs.reasoning.end_token_ids", [], "name the tokens that end the thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the output of one request: exactly one of the first six fields, and its options.

    JSON given as text is looked into by `normalized` only, so that making and decoding these objects stays cheap.

    Raises:
        RequestError: with `param` set, when none or several of them are given, or one is not what it must be.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema (draft 2020-12), as an object or as text."""
    regex: str | None = None
    """A regular expression that the whole output matches (the syntax of Rust's `regex`; no look-around)."""
    choice: tuple[str, ...] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A context-free grammar in Lark's or in GBNF's notation."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with tagged, constrained parts, as an object or as text."""
    disable_any_whitespace: bool = False
    """JSON without white space between its tokens."""
    disable_additional_properties: bool = False
    """Objects hold no properties but those their schema names, unless it says otherwise itself."""
    whitespace_pattern: str | None = None
    """Pattern of the white space that may stand between the tokens of JSON."""
    reasoning: ReasoningSpan | None = None
    """The constraint begins after this; None constrains the output from its first token on."""

    def __post_init__(self) -> None:
        kinds = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(kinds) != 1:
            named = f"got {' and '.join(kinds)}" if kinds else "got none"
            raise RequestError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}, {named}",
                param="structured_outputs",
            )
        _CHECKS[kinds[0]](self, kinds[0])
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise wrong_value(f"structured_outputs.{name}", getattr(self, name), "be true or false")
        if self.whitespace_pattern is not None:
            if not isinstance(self.whitespace_pattern, str):
                raise wrong_value("structured_outputs.whitespace_pattern", self.whitespace_pattern, "be text")
            if self.disable_any_whitespace:
                raise RequestError(
                    "whitespace_pattern and disable_any_whitespace exclude each other; leave one of them out",
                    param="structured_outputs.whitespace_pattern",
                )

    @property
    def kind(self) -> str:
        """The one of `KINDS` that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def num_characters(self) -> int:
        """Size of the content; of a text that is not parsed yet, its length."""
        value = getattr(self, self.kind)
        return len(value) if isinstance(value, str) else len(self.spec().text)

    def normalized(self) -> StructuredOutputsParams:
        """The constraint with its JSON as text: cheap to send, and to compare.

        Raises:
            RequestError: the text is no JSON object.
        """
        if self.json is not None:
            return replace(self, json=_json_text("json", self.json))
        if self.structural_tag is not None:
            return replace(self, structural_tag=_json_text("structural_tag", self.structural_tag))
        return self

    def spec(self) -> GrammarSpec:
        """The content, without where it begins."""
        kind, value = self.kind, getattr(self, self.kind)
        if kind == "json_object":
            kind, value = "json", '{"type":"object"}'
        elif kind == "choice":
            value = _compact(list(value))
        elif not isinstance(value, str):
            value = _compact(value)
        if kind != "json":
            return GrammarSpec(kind, value)
        pattern = "" if self.disable_any_whitespace else self.whitespace_pattern
        return GrammarSpec(kind, value, pattern, not self.disable_additional_properties)

    def _check_text(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or value == "":
            raise wrong_value(f"structured_outputs.{name}", value, "be text and not empty")

    def _check_json(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (dict, str)) or value == "":
            raise wrong_value(f"structured_outputs.{name}", value, "be a JSON object, or JSON text of one")

    def _check_json_object(self, name: str) -> None:
        if self.json_object is not True:
            raise wrong_value("structured_outputs.json_object", self.json_object, "be true or left out")

    def _check_choice(self, name: str) -> None:
        if not isinstance(self.choice, (tuple, list)) or not self.choice:
            raise wrong_value("structured_outputs.choice", self.choice, "be a list of at least one text")
        for text in self.choice:
            if not isinstance(text, str) or text == "":
                raise wrong_value("structured_outputs.choice", text, "hold non-empty texts only")
        object.__setattr__(self, "choice", tuple(self.choice))


_CHECKS: dict[str, Callable[[StructuredOutputsParams, str], None]] = {
    "json": StructuredOutputsParams._check_json,
    "regex": StructuredOutputsParams._check_text,
    "choice": StructuredOutputsParams._check_choice,
    "grammar": StructuredOutputsParams._check_text,
    "json_object": StructuredOutputsParams._check_json_object,
    "structural_tag": StructuredOutputsParams._check_json,
}


def _compact(value: Any) -> str:
    try:
        return json_library.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"structured_outputs cannot be written as JSON: {error}", param="structured_outputs"
        ) from None


def _json_text(name: str, value: str | dict[str, Any]) -> str:
    if not isinstance(value, str):
        return _compact(value)
    try:
        parsed = json_library.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"structured_outputs.{name} is not JSON: {error or 'nested too deeply'}", param=f"structured_outputs.{name}"
        ) from None
    if not isinstance(parsed, (dict, bool)):
        raise wrong_value(f"structured_outputs.{name}", value, "be a JSON object, or JSON text of one")
    return value
