"""The call that an output parser is reading: its name, its arguments as JSON, its events.

Values that a format writes as plain text become JSON here, by the types of the tool's schema. What was read but can
still turn out to be no call stays in `raw`, to be given back as text. Knows no markers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire_renderers.format_states import FormatTable, Sink
from quire_renderers.literal_relay import json_string
from quire_renderers.output_events import CallArguments, CallEnd, CallStart, OutputEvent
from quire_renderers.tagged_values import TaggedValue
from quire_renderers.tool_schemas import ToolSchemas, value_as_json

__all__ = ["CallWriter", "ParsedCall"]


@dataclass(slots=True)
class ParsedCall:
    """A call being read."""

    name: str | None = None
    id: str | None = None
    index: int = -1
    """Its place in the message once it was given out, else -1: until then it can still become text again."""
    arguments_done: bool = False
    has_arguments: bool = False
    """Whether anything of them was given out."""
    is_open: bool = False
    """Whether the object of parameters is open."""
    in_value: bool = False
    """Whether a value was left that goes on in the next state."""
    in_doubt: bool = False
    """Whether the output may have been cut inside it: where it ends is a guess."""
    waiting: list[str] = field(default_factory=list)
    """Arguments that came before the name."""


class CallWriter:
    """Writes the events of one call after the other.

    Args:
        table: The format.
        tools: The tools that were offered.
        raw: Text that was read since the last marker that did its work; shared with the parser.
        put: Takes an event.
    """

    def __init__(
        self, table: FormatTable, tools: ToolSchemas, raw: list[str], put: Callable[[OutputEvent], None]
    ) -> None:
        self._table = table
        self._tools = tools
        self.names = frozenset(tools.names)
        """Names of the tools that were offered."""
        self._raw = raw
        self._put = put
        self.call: ParsedCall | None = None
        """The call being read; None between calls."""
        self.num_calls = 0
        """Number of calls given out."""
        self.key = ""
        """Name of the parameter being read."""
        self.has_key = False
        """Whether that name was given out."""
        self.tagged: TaggedValue | None = None
        """What finds the end of a value that its own tag may not end."""
        self._value: list[str] | None = None
        self._newline = ""
        self._skips_newline = False

    def current(self) -> ParsedCall:
        """The call being read, begun now if there is none."""
        if self.call is None:
            self.call = ParsedCall()
        return self.call

    def take_name(self, text: str) -> bool:
        """Name the call. Returns whether the text can be its name."""
        match = self._table.name_pattern.fullmatch(text)
        call = self.current()
        if match is None or call.name is not None:
            return False
        name = match["name"]
        if self._table.known_names_only and name not in self.names:
            return False
        call.name = name
        if match.groupdict().get("id"):
            call.id = text
        if call.waiting:
            waiting, call.waiting = "".join(call.waiting), []
            self.emit(waiting)
            self._raw.clear()
        return True

    def emit(self, text: str) -> None:
        """Give out a piece of the arguments, or keep it until the name is known."""
        call = self.current()
        if call.name is None:
            call.waiting.append(text)
            return
        self.begin_call(call)
        call.has_arguments = True
        self._put(CallArguments(call.index, text))

    def begin_call(self, call: ParsedCall) -> None:
        """From here on it is a call for good."""
        if call.index < 0:
            assert call.name is not None
            call.index = self.num_calls
            self.num_calls += 1
            self._put(CallStart(call.index, call.name, call.id))

    def key_text(self) -> str:
        """The beginning of a parameter inside the object of arguments."""
        call = self.current()
        opening = ", " if call.is_open else "{"
        call.is_open = True
        return f"{opening}{json_string(self.key)}: "

    def begin_value(self, sink: Sink) -> None:
        """A value of the parameter `key` begins, or goes on."""
        call = self.current()
        if call.in_value:
            call.in_value = False
            if self._value is None:
                self._raw.clear()
            return
        self._newline, self._skips_newline = "", self._table.strips_newline
        if self._streams(sink) and call.name is not None:
            self._value = None
            self.emit(self.key_text() + '"')
            self._raw.clear()
        else:
            self._value = []

    def add_value(self, text: str) -> None:
        """The value goes on with `text`."""
        if self._skips_newline:
            self._skips_newline = False
            whole, text = text, text.removeprefix("\n")
            if self._value is not None:
                self._raw.append(whole[: len(whole) - len(text)])
        if not text:
            return
        if self._table.strips_newline or self.tagged is not None:
            text = self._newline + text
            self._newline = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if self._value is not None:
            self._value.append(text)
            self._raw.append(text)
        elif text:
            self.emit(json_string(text)[1:-1])

    def end_newline(self) -> None:
        """The value's own end tag follows: the newline before it belongs to the value."""
        newline, self._newline, self.tagged = self._newline, "", None
        self.add_value(newline)

    def end_value(self, sink: Sink, *, continues: bool = False) -> None:
        """The value ends, or `continues` in the next state."""
        if continues:
            self.current().in_value = True
            return
        if self._value is None:
            self.emit('"')
        else:
            text = "".join(self._value)
            types, untyped = self._types(), self._table.untyped_values
            if sink is Sink.VALUE_JSON:
                types, untyped = frozenset(), "json"
            self.emit(self.key_text() + value_as_json(text, types, untyped=untyped))
        self._value, self._newline = None, ""
        self._raw.clear()

    def close_call(self, call: ParsedCall, closers: str, *, complete: bool) -> None:
        """End a call that was begun.

        Args:
            call: Which one.
            closers: What ends the value inside its arguments that is open.
            complete: Whether the model ended it.
        """
        if call.is_open:
            closers += "}"
        elif not call.has_arguments:
            closers = "{}"
        if closers:
            self._put(CallArguments(call.index, closers))
        self._put(CallEnd(call.index, complete))

    def abandon_value(self) -> None:
        """Forget the value that is being read."""
        self._value, self.tagged, self._newline = None, None, ""

    @property
    def is_open_text(self) -> bool:
        """Whether a string that is given out as it comes is not closed."""
        return self._value is None

    def _streams(self, sink: Sink) -> bool:
        """Whether a plain-text value is given out as it comes: when it can only be a string."""
        if sink is not Sink.VALUE:
            return sink is Sink.VALUE_TEXT
        types = self._types()
        return types == {"string"} or (not types and self._table.untyped_values == "text")

    def _types(self) -> frozenset[str]:
        call = self.current()
        return self._tools.types(call.name or "", self.key)
