"""The form an answer must have, as the text routes are asked for it: OpenAI's `response_format`, vLLM's
`structured_outputs`, and the older `guided_...` fields.

Translates field names and shapes; what a schema or pattern means is decided by the engine's grammar backend. Also says
where in a chat answer a constraint begins, and which constraint a call of a tool is held to.
"""

from __future__ import annotations

import asyncio
import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from quire_interfaces import (
    ReasoningSpan,
    RenderedPrompt,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
    Tokenizer,
)
from quire_renderers import ChatFormat
from quire_server.client_tools import INPUT, InputGrammar
from quire_server.request_warnings import free_text
from quire_server.schema_text import SchemaText
from quire_server.tool_choice import ToolUse
from quire_structured_output import check_text_grammar, text_content

__all__ = ["check_grammars", "constraint_names", "structured_outputs_of", "thinking_first", "with_calls"]


class ConstraintFields(Protocol):
    """The fields of a request's body that constrain its output, the older ones of `_GUIDED` aside."""

    response_format: dict[str, Any] | None
    structured_outputs: dict[str, Any] | None


_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""Older name of vLLM -> field of `structured_outputs`."""

_FIELDS = frozenset(spec.name for spec in dataclasses.fields(StructuredOutputsParams)) - {"reasoning"}


def structured_outputs_of(body: ConstraintFields) -> StructuredOutputsParams | None:
    """The one constraint that a request asks for, in whatever field; None for none.

    Raises:
        RequestError: naming the field at fault, or the two that contradict each other.
    """
    forms: dict[str, dict[str, Any]] = {}
    if (values := _of_response_format(body.response_format)) is not None:
        forms["response_format"] = values
    if body.structured_outputs is not None:
        unknown = sorted(set(body.structured_outputs) - _FIELDS)
        if unknown:
            raise RequestError(
                f"structured_outputs has no field {unknown[0][:64]!r}; it has {', '.join(sorted(_FIELDS))}",
                param="structured_outputs",
            )
        given = {
            name: str(value) if isinstance(value, SchemaText) else value
            for name, value in body.structured_outputs.items()
            if value is not None
        }
        if given:
            forms["structured_outputs"] = given
    guided = {_GUIDED[name]: value for name in _GUIDED if (value := getattr(body, name)) is not None}
    if guided:
        forms["the guided_ fields"] = guided
    if len(forms) > 1:
        raise RequestError(
            f"{' and '.join(forms)} exclude each other; ask for the form of the output in one place",
            param="structured_outputs",
        )
    return StructuredOutputsParams(**next(iter(forms.values()))) if forms else None


def _of_response_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    kind = (value or {}).get("type", "text")
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": {key: each for key, each in value.items() if key != "type"}}
    if kind != "json_schema":
        raise RequestError(
            f"response_format.type must be 'text', 'json_object', 'json_schema' or 'structural_tag', got "
            f"{reprlib.repr(kind)}",
            param="response_format.type",
        )
    holder = value.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, (dict, SchemaText)):
        raise RequestError(
            f"response_format.json_schema.schema must be a JSON schema, an object, got {reprlib.repr(schema)}",
            param="response_format.json_schema.schema",
        )
    return {"json": str(schema) if isinstance(schema, SchemaText) else schema}


def constraint_names(body: ConstraintFields) -> dict[str, str]:
    """Name the engine gives the constraint -> the request's field, for errors."""
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        names = dict.fromkeys(("structured_outputs", "structured_outputs.json"), "response_format")
        names["structured_outputs.structural_tag"] = "response_format"
        if kind == "json_schema":
            names["structured_outputs.json"] = "response_format.json_schema.schema"
        return names
    names = {f"structured_outputs.{new}": old for old, new in _GUIDED.items() if getattr(body, old) is not None}
    return {**names, "structured_outputs": next(iter(names.values()))} if names else {}


def thinking_first(
    params: SamplingParams,
    form: ChatFormat,
    tokenizer: Tokenizer,
    prompt: RenderedPrompt,
    *,
    continued: str | None,
    template_kwargs: Mapping[str, Any] | None,
) -> SamplingParams:
    """The same, with the constraint beginning after the model's thinking.

    An answer may think where `ChatFormat.may_think` says so. Otherwise the constraint begins at once.

    Args:
        params: With or without a constraint.
        form: How the model marks its thinking.
        tokenizer: For the markers.
        prompt: What the model goes on from.
        continued: Text of an answer that it goes on with.
        template_kwargs: What the request told the template.
    """
    constraint, reasoning = params.structured_outputs, form.reasoning
    if constraint is None or reasoning is None or not reasoning.end:
        return params
    is_open = form.opens_thinking(prompt.text, continued, template_kwargs)
    if not form.may_think(prompt.text, continued, template_kwargs):
        return params
    start = () if is_open else reasoning.start[:1]
    span = ReasoningSpan(
        start_token_ids=tuple(tokenizer.encode(start[0], add_special_tokens=False)) if start else (),
        end_token_ids=tuple(tokenizer.encode(reasoning.end[0], add_special_tokens=False)),
        is_open=is_open,
    )
    return dataclasses.replace(params, structured_outputs=dataclasses.replace(constraint, reasoning=span))


def with_calls(params: SamplingParams, form: ChatFormat, use: ToolUse) -> SamplingParams:
    """The same, with calls of tools held to their schemas as far as the request asks for it.

    A call that is forced follows its schema from where `form.forced_call` ends. A call that is not forced does so if
    some tool is strict. Where the answer has a JSON schema of its own, it is either that or a call. Formats whose
    arguments are no JSON stay free.
    """
    constraint = params.structured_outputs
    structures = form.call_grammar(use.callable_tools) if use.is_on else None
    if not structures:
        return params
    beginning = (form.forced_call(use.name) or "") if use.is_forced else ""
    grammars = use.offered.grammars()
    tags = [
        _tag(tool, structure, beginning, use.parameters_at(tool), grammars.get(tool["function"]["name"]))
        for tool, structure in zip(use.callable_tools, structures, strict=True)
    ]
    names = {tool["function"]["name"] for tool in use.callable_tools}
    is_strict = any(tool["function"].get("strict") for tool in use.callable_tools) or not names.isdisjoint(grammars)
    if use.is_forced:
        tag: dict[str, Any] = {"type": "or", "elements": tags}
    elif constraint is not None:
        schema = _schema_of(constraint)
        if schema is None:
            return params
        calls = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
        calls["stop_after_first"] = not use.parallel
        own = {"type": "json_schema", "json_schema": schema, "origin": "structured_outputs.json"}
        tag = {"type": "or", "elements": [own, calls]}
    elif is_strict and form.tools is not None:
        tag = {"type": "triggered_tags", "triggers": [form.tools.trigger], "tags": tags}
    else:
        return params
    return dataclasses.replace(params, structured_outputs=StructuredOutputsParams(structural_tag={"format": tag}))


def _tag(
    tool: dict[str, Any], structure: dict[str, Any], begun: str, origin: str, grammar: InputGrammar | None
) -> dict[str, Any]:
    """A call without the text that is there already; `origin` is the client's field of the schema. With `grammar`, its
    one argument is text of that form."""
    begin = structure["begin"].removeprefix(begun)
    if grammar is not None:
        return {"type": "tag", "begin": begin, "content": _with_text(grammar), "end": structure["end"]}
    schema = structure["schema"]
    if not tool["function"].get("strict"):
        # Not asked to be followed to the letter: keywords that a backend does not know are passed over.
        schema = {**schema, "x-guidance": {"lenient": True, "coerce_one_of": True}}
    content = {"type": "json_schema", "json_schema": schema, "origin": origin}
    return {"type": "tag", "begin": begin, "content": content, "end": structure["end"]}


def _with_text(grammar: InputGrammar) -> dict[str, Any]:
    """Arguments that are one text of a form."""
    text = {"type": "json_string", "content": text_content(grammar.syntax, grammar.definition)}
    begin, end = ({"type": "const_string", "value": value} for value in (f'{{"{INPUT}": ', "}"))
    return {"type": "sequence", "elements": [begin, text, end]}


async def check_grammars(use: ToolUse, form: ChatFormat, *, has_backend: bool) -> None:
    """Check the grammars of custom tools, and warn where calls cannot be held to them.

    Raises:
        RequestError: naming the grammar that cannot be used.
    """
    grammars = use.offered.grammars().values()
    if not grammars:
        return

    def check() -> None:
        for grammar in grammars:
            check_text_grammar(grammar.syntax, grammar.definition, grammar.param)

    await asyncio.to_thread(check)
    if use.is_on and not (has_backend and form.call_grammar(use.callable_tools)):
        for grammar in grammars:
            use.offered.warn(free_text(grammar.param))


def _schema_of(constraint: StructuredOutputsParams) -> dict[str, Any] | None:
    """The JSON schema of a constraint that is one."""
    if constraint.json_object:
        return {"type": "object"}
    if isinstance(constraint.json, str):
        try:
            return msgspec.json.decode(constraint.json, type=dict)
        except (msgspec.DecodeError, RecursionError):
            return None  # the constraint alone is then refused by whoever reads it
    return constraint.json
