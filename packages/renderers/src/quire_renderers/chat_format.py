"""How one model marks its thinking and its tool calls: chosen by name or recognised from its chat template.

Joins a reasoning format and a tool format into one table for the parser, and answers what a server must know about
them: which special tokens have to stay in the text, how a call is forced, what ids look like.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from quire_interfaces import ConfigError
from quire_interfaces.plugins import OneOfOrPlugin, installed_plugins
from quire_renderers.format_families import with_prefix
from quire_renderers.format_names import REASONING_ALIASES, TOOL_ALIASES
from quire_renderers.format_states import CompiledExits, Expect, FormatTable, Go, Literal, Sink, State, Until
from quire_renderers.output_parser import OutputParser
from quire_renderers.reasoning_formats import REASONING_FORMATS, ReasoningFormat
from quire_renderers.tool_formats import TOOL_FORMATS, ToolFormat
from quire_renderers.tool_schemas import ToolSchemas

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "ChatFormat",
    "detect_reasoning_format",
    "detect_tool_format",
    "reasoning_format_names",
    "tool_format_names",
]

TOOL_PARSERS = "quire.tool_parsers"
"""Group of the entry points of other packages' tool formats: name -> `ToolFormat`."""
REASONING_PARSERS = "quire.reasoning_parsers"
"""Group of the entry points of other packages' reasoning formats: name -> `ReasoningFormat`."""

Format = TypeVar("Format", ToolFormat, ReasoningFormat)

_random = random.SystemRandom()


def tool_format_names() -> tuple[str, ...]:
    """Everything --tool-call-parser may say."""
    return ("auto", "none", *TOOL_FORMATS, *TOOL_ALIASES)


def reasoning_format_names() -> tuple[str, ...]:
    """Everything --reasoning-parser may say."""
    return ("auto", "none", *REASONING_FORMATS, *REASONING_ALIASES)


def detect_tool_format(chat_template: str) -> str | None:
    """The name of the tool format that a chat template speaks, None when it speaks none we know."""
    return _detect(chat_template, TOOL_FORMATS)


def detect_reasoning_format(chat_template: str) -> str | None:
    """The name of the reasoning format that a chat template speaks, None when it speaks none we know."""
    return _detect(chat_template, REASONING_FORMATS)


def _detect(chat_template: str, formats: Mapping[str, ToolFormat] | Mapping[str, ReasoningFormat]) -> str | None:
    for name, each in formats.items():
        for texts in each.fingerprints:
            if all(text in chat_template for text in texts):
                return name
    return None


@dataclass(frozen=True, slots=True)
class _Special:
    """What the tokenizer's special tokens mean for a format."""

    must_stay: bool
    """Whether a marker is made of special tokens, so that the detokenizer must not leave them out."""
    dropped: CompiledExits | None
    """All others, to be left out by the parser then."""


class ChatFormat:
    """The output format of a model.

    Args:
        tool_parser: Name of a tool format, "auto" or "none".
        reasoning_parser: Name of a reasoning format, "auto" or "none".
        chat_template: The model's template, from which "auto" recognises the formats.
        special_tokens: Texts of the tokenizer's special tokens.

    Raises:
        ConfigError: an unknown name.
    """

    def __init__(
        self,
        *,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        chat_template: str = "",
        special_tokens: Sequence[str] = (),
    ) -> None:
        self.tools = _choose_tools(tool_parser, chat_template)
        self.reasoning = _choose_reasoning(reasoning_parser, chat_template)
        thinks = self.reasoning is not None and self.reasoning.needs_table is not None
        if self.reasoning is not None and self.reasoning.needs_table not in (None, self.tools and self.tools.name):
            # The thinking of such models is marked by the same states as their calls.
            self.tools = _choose_tools(self.reasoning.needs_table or "", "")
        if self.tools is not None and self.tools.thinks and not thinks and reasoning_parser == "auto":
            self.reasoning = _choose_reasoning(self.tools.name, "")
        self._tables = {
            (has_tools, has_reasoning): _make_table(
                self.tools if has_tools else None, self.reasoning if has_reasoning else None
            )
            for has_tools in (False, True)
            for has_reasoning in (False, True)
        }
        self._special = {key: _special(table, special_tokens) for key, table in self._tables.items()}

    @property
    def tool_parser(self) -> str | None:
        """Name of the tool format."""
        return self.tools.name if self.tools is not None else None

    @property
    def reasoning_parser(self) -> str | None:
        """Name of the reasoning format."""
        return self.reasoning.name if self.reasoning is not None else None

    def is_plain(self, *, tools: bool) -> bool:
        """Whether every output is text alone, so that there is nothing to parse."""
        return self._tables[self._key(tools)].is_plain

    def keeps_special_tokens(self, *, tools: bool) -> bool:
        """Whether the parser must see special tokens: request the output with skip_special_tokens=False then."""
        return self._special[self._key(tools)].must_stay

    def is_marker(self, token: str) -> bool:
        """Whether the model's answers hold this token as (part of) a marker of thinking or calls."""
        return any(token in marker for exits in self._tables[True, True].exits.values() for marker in exits.go)

    def parser(
        self,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        prompt: str | None = None,
        continued: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        skip_special_tokens: bool = True,
        must_call: bool = False,
    ) -> OutputParser:
        """A parser for one output.

        Args:
            tools: The tools that were offered; None or empty parses no calls.
            prompt: The rendered prompt, whose end says whether the thinking is open.
            continued: With continue_final_message, the text of the message that is continued.
            chat_template_kwargs: Variables of the template, which may switch the thinking off.
            skip_special_tokens: Whether special tokens are no part of the text.
            must_call: Whether the output is certain to be a call, as where one is forced.
        """
        key = self._key(bool(tools))
        return OutputParser(
            self._tables[key],
            ToolSchemas(tools),
            thinking=self.opens_thinking(prompt, continued, chat_template_kwargs),
            dropped=self._special[key].dropped if skip_special_tokens else None,
            must_call=must_call,
            shown_as=self.reasoning.shown_as if self.reasoning is not None and continued is None else None,
        )

    def opens_thinking(
        self,
        prompt: str | None = None,
        continued: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> bool:
        """Whether an output begins inside the thinking; arguments as for `parser`."""
        form = self.reasoning
        if form is None:
            return False
        if continued is not None:
            opened = max((continued.rfind(marker) for marker in form.start), default=-1)
            return opened > max((continued.rfind(marker) for marker in form.end), default=-1)
        end = (prompt or "").rstrip()
        if end.endswith(form.start) and form.start:
            return True
        if end.endswith(form.end) and form.end:
            return False
        switches = chat_template_kwargs or {}
        if any(switches.get(name) is False for name in form.off_switches):
            return False
        return form.open_by_default

    def thinking_start(self) -> str | None:
        """What opens the thinking, None for a model that does not think."""
        return self.reasoning.start[0] if self.reasoning is not None and self.reasoning.start else None

    def thinking_end(self) -> str | None:
        """What closes the thinking, None for a model that does not think or cannot be told to stop."""
        if self.reasoning is None:
            return None
        return self.reasoning.closing or next(iter(self.reasoning.end), None)

    def thinking_ends(self) -> tuple[str, ...]:
        """All markers with which the model itself closes its thinking."""
        if self.reasoning is None:
            return ()
        return self.reasoning.end or tuple(filter(None, (self.reasoning.closing,)))

    def behind_thinking(self, *, calls: bool) -> str:
        """What stands between the end of the thinking and a call, or the answer."""
        if self.reasoning is None:
            return ""
        return self.reasoning.turn if calls else self.reasoning.answer

    def may_think(
        self,
        prompt: str | None = None,
        continued: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> bool:
        """Whether an output thinks first: the prompt opened the thinking, the request switched it on, or the model
        always does. A model that was not asked to think must not be led to it because little else is allowed.
        Arguments as for `parser`."""
        form = self.reasoning
        if form is None:
            return False
        if self.opens_thinking(prompt, continued, chat_template_kwargs):
            return True
        if continued is not None or (form.end and (prompt or "").rstrip().endswith(form.end)):
            return False
        switches = chat_template_kwargs or {}
        if form.always_on:
            return switches.get("reasoning_effort") != "none"
        return any(switches.get(name) for name in form.off_switches or ("thinking", "enable_thinking"))

    def forced_call(self, name: str | None) -> str | None:
        """How an answer begins that must be a call.

        Args:
            name: The tool to call; None lets the model choose.
        """
        if self.tools is None:
            return None
        return self.tools.prefix.partition("NAME")[0] if name is None else self.tools.prefix.replace("NAME", name)

    def call_grammar(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """What a grammar needs to hold calls to their schemas: per tool, the text before the arguments, their schema,
        and the text behind. None for formats whose arguments are no JSON."""
        if self.tools is None or not self.tools.trigger:
            return None
        structures = []
        for tool in tools:
            function = tool.get("function", tool)
            schema = function.get("parameters") or {"type": "object"}
            begin = self.tools.prefix.replace("NAME", str(function.get("name")))
            structures.append({"begin": begin, "schema": schema, "end": self.tools.suffix})
        return structures

    def new_call_id(self) -> str:
        """An id for a call to which the model gave none, of the form its template takes."""
        letters = string.ascii_letters + string.digits
        if self.tools is not None and self.tools.call_id == "alnum9":
            return "".join(_random.choices(letters, k=9))
        return "call_" + "".join(_random.choices(letters, k=24))

    def _key(self, tools: bool) -> tuple[bool, bool]:
        return tools and self.tools is not None, self.reasoning is not None


def _choose_tools(name: str, chat_template: str) -> ToolFormat | None:
    name = TOOL_ALIASES.get(name, name)
    if name == "auto":
        name = detect_tool_format(chat_template) or "none"
    if name == "none":
        return None
    if name in TOOL_FORMATS:
        return TOOL_FORMATS[name]
    return _of_plugin(TOOL_PARSERS, name, ToolFormat, "tool_call_parser", tool_format_names)


def _choose_reasoning(name: str, chat_template: str) -> ReasoningFormat | None:
    if name == "auto":
        name = detect_reasoning_format(chat_template) or "none"
    if name == "none":
        return None
    name = REASONING_ALIASES.get(name, name)
    if name in REASONING_FORMATS:
        return REASONING_FORMATS[name]
    return _of_plugin(REASONING_PARSERS, name, ReasoningFormat, "reasoning_parser", reasoning_format_names)


def _of_plugin(group: str, name: str, kind: type[Format], field: str, names: Callable[[], tuple[str, ...]]) -> Format:
    complaint = OneOfOrPlugin(names(), group)(name)
    if complaint is not None:
        raise ConfigError(f"{field} must {complaint}, got {name!r}", field=field)
    plugin = installed_plugins(group)[name]
    found: Format = plugin.load(kind, field=field)
    if found.name != name:
        raise plugin.error(f"must have the name of its entry point, and is called {found.name!r}", field=field)
    return found


def _make_table(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> FormatTable:
    """One table of both; either may be missing."""
    if tools is not None and tools.thinks:
        return FormatTable(tools.states(), recover=tools.recover, **tools.options)
    if reasoning is not None and reasoning.needs_table is not None:
        return _make_table(_choose_tools(reasoning.needs_table, ""), None)
    of_calls = tools.states() if tools is not None else {}
    states: dict[str, State] = dict(of_calls)
    content = dict(tools.content) if tools is not None else {}
    silent = reasoning.silent if reasoning is not None else ()
    content |= {marker: Go("content", commits=True) for marker in silent}
    if silent:
        states = {name: _with_silent(state, silent) for name, state in states.items()}
    states["content"] = Until(Sink.CONTENT, content)
    begin = "begin" if "begin" in states else "content"
    options = dict(tools.options) if tools is not None else {}
    if reasoning is not None:
        answering = {marker: Go("answer/content", commits=True) for marker in reasoning.answer_start}
        if answering:
            # The answer and its calls stand between markers of its own, which are no part of it.
            within = with_prefix(states, "answer/", kept=())
            states |= {name: _with_silent(state, reasoning.answer_end) for name, state in within.items()}
            states["begin_answer"] = Expect(answering, otherwise=begin)
        behind = "begin_answer" if answering else begin
        closing: dict[str, Go | str] = {marker: Go(behind, commits=True) for marker in reasoning.end}
        bare = states.get("begin")
        if isinstance(bare, Expect):
            # Calls without a marker begin an answer, and a line of the thinking.
            content |= {f"\n{marker}": go for marker, go in bare.exits.items() if marker not in content}
        opening = {marker: _in_thinking(go) for marker, go in content.items()}
        states["thinking"] = Until(Sink.REASONING, closing | opening)
        if tools is not None:
            states |= _states_in_thinking(of_calls, closing)
            options["recover_thinking"] = _in_thinking(tools.recover).state
        reopened = {marker: Go("thinking", commits=True) for marker in reasoning.start}
        states["start"] = Expect(reopened | answering, otherwise=begin)
        if reasoning.open_by_default:
            # Opened by the prompt, and once more by a model that does not know, or that answers at once.
            states["thinking_again"] = Expect(reopened | answering, otherwise="thinking")
        else:
            states["thinking_again"] = states["thinking"]
        options["start_thinking"] = "thinking_again"
    recover = tools.recover if tools is not None else "content"
    return FormatTable(states, start="start" if reasoning is not None else begin, recover=recover, **options)


def _with_silent(state: State, silent: Sequence[str]) -> State:
    """A state of text with markers that are no text."""
    if not isinstance(state, Until) or state.sink is not Sink.CONTENT:
        return state
    return replace(state, exits={**dict.fromkeys(silent, Go("content", commits=True)), **state.exits})


def _states_in_thinking(states: Mapping[str, State], closing: Mapping[str, Go | str]) -> dict[str, State]:
    """The states of a format's calls once more, for calls inside the thinking: behind them it goes on until its end."""
    copies: dict[str, State] = {}
    for name, state in states.items():
        if name == "begin":
            continue
        if isinstance(state, Literal):
            copy: State = replace(state, then=_in_thinking(state.then).state)
        elif isinstance(state, Expect):
            otherwise = _in_thinking(state.otherwise).state if state.otherwise is not None else None
            copy = Expect({marker: _in_thinking(go) for marker, go in state.exits.items()}, otherwise)
        else:
            exits: dict[str, Go | str] = {marker: _in_thinking(go) for marker, go in state.exits.items()}
            is_text = state.sink is Sink.CONTENT
            sink = Sink.REASONING if is_text else state.sink
            copy = replace(state, sink=sink, exits={**exits, **closing} if is_text else exits)
        copies[_in_thinking(name).state] = copy
    return copies


def _in_thinking(go: Go | str) -> Go:
    """The way to the copy of a state."""
    go = Go(go) if isinstance(go, str) else go
    return replace(go, state="thinking" if go.state == "content" else f"thinking/{go.state}")


def _special(table: FormatTable, special_tokens: Sequence[str]) -> _Special:
    markers = [marker for exits in table.exits.values() for marker in exits.go]
    special_tokens = [token for token in dict.fromkeys(special_tokens) if token]
    kept = {token for token in special_tokens if any(token in marker for marker in markers)}
    dropped = {token: "" for token in special_tokens if token not in kept}
    return _Special(bool(kept), CompiledExits(dropped) if kept and dropped else None)
