"""The tools that a request's client runs, whatever their shape: shown to the model as functions, told to the client as
calls of the shape that it asked for.

`function` and `custom` tools, alone or in a namespace, and the built-in ones of `builtin_tools.py`. A tool of a
namespace is shown under both names; a custom tool has one parameter of text, `input`. Knows no protocol's answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire_interfaces import wrong_value
from quire_server.request_warnings import RequestWarning, duplicate_tool

__all__ = ["ClientTool", "ClientTools", "InputGrammar", "check_function", "custom_tool", "is_name"]

SEPARATOR = "__"
"""Between the name of a namespace and that of its tool, as MCP's clients join theirs."""
INPUT = "input"
"""The parameter of a custom tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGrammar:
    """The form that the text of a custom tool must have."""

    syntax: str
    """"lark" or "regex"."""
    definition: str
    param: str
    """The field that holds the definition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTool:
    """One tool."""

    function: dict[str, Any]
    """What the model is shown: name, description, parameters, strict."""
    kind: str = "function"
    """The type that the client gave it."""
    name: str
    """The client's name for it."""
    namespace: str | None = None
    grammar: InputGrammar | None = None
    parameters_at: str = ""
    """The field that holds the schema of its parameters."""


@dataclass(slots=True)
class ClientTools:
    """All of one request, by the names that the model is shown."""

    warnings: list[RequestWarning] = field(default_factory=list)
    _by_shown_name: dict[str, ClientTool] = field(default_factory=dict)
    _shown_names: dict[tuple[str | None, str], str] = field(default_factory=dict)

    def add(self, tool: ClientTool, at: str) -> None:
        """Offer one more, unless there is one of its name."""
        if (tool.namespace, tool.name) in self._shown_names:
            self.warnings.append(duplicate_tool(tool.name, at))
            return
        joined = tool.name if tool.namespace is None else f"{tool.namespace}{SEPARATOR}{tool.name}"
        shown_name, number = joined, 1
        while shown_name in self._by_shown_name:  # "a" of "b__c", and "c__a" of "b"
            number += 1
            shown_name = f"{joined}_{number}"
        self._by_shown_name[shown_name] = replace(
            tool,
            function={**tool.function, "name": shown_name},
            parameters_at=tool.parameters_at or f"{at}.parameters",
        )
        self._shown_names[tool.namespace, tool.name] = shown_name

    def warn(self, warning: RequestWarning) -> None:
        """Tell of it, once."""
        if warning not in self.warnings:
            self.warnings.append(warning)

    def chat_tools(self) -> list[dict[str, Any]]:
        """As the chat API spells functions."""
        return [{"type": "function", "function": tool.function} for tool in self._by_shown_name.values()]

    def grammars(self) -> dict[str, InputGrammar]:
        """Shown name -> the form of the text, for custom tools that have one."""
        return {name: tool.grammar for name, tool in self._by_shown_name.items() if tool.grammar is not None}

    def shown_names(self) -> list[str]:
        """What the model can call."""
        return list(self._by_shown_name)

    def get(self, shown_name: str) -> ClientTool | None:
        """The tool that a model calls by this name."""
        return self._by_shown_name.get(shown_name)

    def shown_name(self, name: str, namespace: str | None = None) -> str:
        """How the model knows a client's tool, also one that is not offered (any more)."""
        joined = name if namespace is None else f"{namespace}{SEPARATOR}{name}"
        return self._shown_names.get((namespace, name), joined)

    def find(self, name: Any, namespace: Any = None, kinds: Sequence[str] = ()) -> str | None:
        """The shown name of a tool that a client names; None for none.

        Args:
            name: The client's name, or the shown one; None with `kinds` for the first tool of such a kind.
            namespace: The tool's, where the client says it.
            kinds: Types that the tool may have; empty for any.
        """
        for shown_name, tool in self._by_shown_name.items():
            is_named = name is None or (name == tool.name and namespace == tool.namespace)
            is_shown = namespace is None and name == shown_name
            if (is_named or is_shown) and (not kinds or tool.kind in kinds):
                return shown_name
        return None

    def of_namespace(self, namespace: Any) -> list[str]:
        """Shown names of all tools of a namespace."""
        return [shown_name for shown_name, tool in self._by_shown_name.items() if tool.namespace == namespace]


def custom_tool(
    value: dict[str, Any], form: Any, at: str, *, namespace: str | None = None, grammar_at: str
) -> ClientTool:
    """A custom tool.

    Args:
        value: Holds `name` and `description`.
        form: `format` with syntax and definition beside its type, None for any text.
        at: The place of `value`.
        namespace: Of the tool.
        grammar_at: The place of syntax and definition.

    Raises:
        RequestError: naming the field at fault.
    """
    name, description = value.get("name"), value.get("description")
    check_name(name, at)
    grammar = _grammar(form, at, grammar_at)
    parameter: dict[str, Any] = {"type": "string"}
    if grammar is not None:
        what = "follows this Lark grammar" if grammar.syntax == "lark" else "matches this regular expression"
        parameter["description"] = f"Text that {what}:\n{grammar.definition}"
    parameters = {
        "type": "object", "properties": {INPUT: parameter}, "required": [INPUT], "additionalProperties": False,
    }  # fmt: skip
    function = {"name": name, "description": str(description or ""), "parameters": parameters}
    return ClientTool(function=function, kind="custom", name=str(name), namespace=namespace, grammar=grammar)


def _grammar(form: Any, at: str, grammar_at: str) -> InputGrammar | None:
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or kind == "text":
        return None
    if kind != "grammar":
        raise wrong_value(f"{at}.format", form, "be of type text or grammar")
    syntax, definition = form.get("syntax"), form.get("definition")
    if syntax not in ("lark", "regex"):
        raise wrong_value(f"{grammar_at}.syntax", syntax, "be lark or regex")
    if not isinstance(definition, str) or not definition.strip():
        raise wrong_value(f"{grammar_at}.definition", definition, "be the text of a grammar")
    return InputGrammar(syntax=syntax, definition=definition, param=f"{grammar_at}.definition")


def check_function(function: dict[str, Any], at: str) -> None:
    """Check one function's name and parameters. Raises RequestError naming the field, which begins with `at`."""
    check_name(function.get("name"), at)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong_value(f"{at}.parameters", parameters, "be a JSON schema, an object")


def check_name(name: Any, at: str) -> None:
    """Check the name of a tool or a namespace. Raises RequestError."""
    if not isinstance(name, str) or not is_name(name):
        raise wrong_value(f"{at}.name", name, "be 1 to 256 letters, digits, '_', '-', '.', ':' or '/'")


def is_name(name: str) -> bool:
    """Whether a tool may have this name."""
    return 0 < len(name) <= 256 and all(char.isalnum() or char in "_-.:/" for char in name)
