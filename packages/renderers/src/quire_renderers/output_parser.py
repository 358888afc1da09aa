"""The one machine that turns model output, as it comes, into text, reasoning and tool calls.

It runs the table of a format (format_states.py) and knows no format itself. Whatever comes and however it is cut, it
gives the same events, never raises, and loses nothing: what begins like a call and turns out to be none is given back
as text; a call that ends or goes wrong in the middle is closed as valid JSON, marked as not complete, and what is left
of it is text. White space next to a marker belongs to the marker.

Inside the thinking, which may well speak of calls, a call is one when it is whole: until then nothing of it is given
out, and when it goes wrong its marker was a mention, and reading goes on behind it. What stands before a call or before
the end of the thinking is reasoning; what follows the last call of a thinking that is never closed is the answer.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

from quire_renderers.format_states import CompiledExits, Expect, FormatTable, Go, Literal, Role, Sink, Tag, Until
from quire_renderers.literal_relay import LiteralRelay, json_string
from quire_renderers.output_events import CallArguments, CallEnd, CallStart, ContentDelta, OutputEvent, ReasoningDelta
from quire_renderers.tagged_values import TaggedValue
from quire_renderers.tool_schemas import ToolSchemas, value_as_json

__all__ = ["OutputParser", "ThinkingSpan"]

_MAX_CAPTURED_CHARS = 256
_NOT_IN = {
    Sink.NAME: re.compile(r"[^\w.:/\-\s]"),
    Sink.KEY: re.compile(r"[\n<>]"),
    Sink.IDENTIFIER: re.compile(r"[^\w\s]"),
}
_SPACES = " \t\r\n"
_SPACE = re.compile(f"[{_SPACES}]*")
_CAPTURED = (Sink.NAME, Sink.ID, Sink.KEY, Sink.IDENTIFIER)
_VALUES = (Sink.VALUE, Sink.VALUE_TEXT, Sink.VALUE_JSON)


_QUOTES = {"`": "`", '"': '"', "'": "'", "“": "”", "‘": "’", "«": "»", "「": "」", "『": "』"}
_NO_QUOTE_BEHIND = re.compile(r"[0-9A-Za-z_)\]}.!?;%]")
_MAX_LONG_ATTEMPTS = 16
_LONG_ATTEMPT_CHARS = 1000


@dataclass(slots=True)
class _Attempt:
    """What begins like a call inside the thinking."""

    state: str
    """Where it began."""
    marker: str
    """With what it began."""
    parts: list[str]
    """All text from the marker on."""
    space: str
    """White space before the marker."""
    is_fresh: bool
    num_calls: int
    num_events: int
    """Events that were there before it: the others are kept back."""
    begin: int
    """Where its marker begins in the text that was fed."""


@dataclass(slots=True)
class _Call:
    """The call being read."""

    name: str | None = None
    id: str | None = None
    index: int = -1
    """Its place in the message once it was given out, else -1: until then it can still become text again."""
    arguments_done: bool = False
    has_arguments: bool = False
    """Whether anything of them was given out."""
    is_open: bool = False
    """Whether the object of parameters is open."""
    in_doubt: bool = False
    """Whether the output may have been cut inside it: where it ends is a guess."""
    waiting: list[str] = field(default_factory=list)
    """Arguments that came before the name."""


@dataclass(slots=True)
class ThinkingSpan:
    """Where in an output the model thinks, in characters of the text that was fed."""

    begin: int
    """Behind the marker that opened it."""
    end: int | None = None
    """Before the marker that closed it; None while it is open."""
    after: int | None = None
    """Behind that marker."""


class OutputParser:
    """Parses one output.

    Args:
        table: The format.
        tools: The tools that were offered.
        thinking: Whether the prompt has opened the thinking.
        dropped: Texts that are no text: special tokens that the detokenizer had to keep for the format's sake.
        must_call: Whether the output is certain to be a call: what has a name is one then, whatever follows.

    Attributes:
        num_calls: Tool calls given out so far.
        thinking_spans: Where the model thought so far, in order.
        has_begun: Whether it is settled if the output begins with thinking.
    """

    def __init__(
        self,
        table: FormatTable,
        tools: ToolSchemas | None = None,
        *,
        thinking: bool = False,
        dropped: CompiledExits | None = None,
        must_call: bool = False,
    ) -> None:
        self._table = table
        self._must_call = must_call
        self._tools = tools or ToolSchemas()
        self._dropped = dropped
        self._undropped = ""
        self._names = frozenset(self._tools.names)
        self._events: list[OutputEvent] = []
        self._buffer = ""
        self._raw: list[str] = []
        self._space = ""
        self._is_fresh = False
        self._call: _Call | None = None
        self._attempt: _Attempt | None = None
        self._num_long_attempts = 0
        self._undecided: list[str] | None = None
        """Text behind a call inside the thinking, None before one: the answer's, if nothing ends the thinking."""
        self._last_chars = ""
        self._is_in_mention = False
        self.num_calls = 0
        self._key = ""
        self._value: list[str] | None = None
        self._newline = ""
        self._skips_newline = False
        self._tagged: TaggedValue | None = None
        self._stopped = False
        self._relay: LiteralRelay | None = None
        self._has_key = False
        self._num_buffered = 0
        self._left_out: list[tuple[int, int]] = []
        """Of each dropped text: how many characters had entered the buffer before it, and its length."""
        self._marker_begin = 0
        self._undecided_begin: int | None = None
        self.thinking_spans: list[ThinkingSpan] = []
        self.has_begun = False
        self._state = ""
        if thinking and table.start_thinking is not None:
            self._is_fresh = True
            self._go_to(table.start_thinking)
        else:
            self._go_to(table.start)

    @property
    def is_thinking(self) -> bool:
        """Whether the text that comes next is reasoning, or what begins like a call inside it."""
        if self._attempt is not None:
            return True
        state = self._table.states[self._state]
        if isinstance(state, Expect) and state.otherwise is not None:
            state = self._table.states[state.otherwise]
        return isinstance(state, Until) and state.sink is Sink.REASONING

    @property
    def num_read(self) -> int:
        """Characters of the text that was fed whose meaning is settled; what may still become a marker is not."""
        if self._attempt is not None:
            return self._attempt.begin
        place = self._num_buffered - len(self._buffer)
        return place + sum(length for before, length in self._left_out if before < place)

    def feed(self, text: str) -> list[OutputEvent]:
        """Take in more output; what it says."""
        if self._dropped is not None:
            text = self._without_dropped(text, self._dropped, final=False)
        self._buffer += text
        self._num_buffered += len(text)
        if self._attempt is not None:
            self._attempt.parts.append(text)
        while self._buffer and self._step(final=False):
            pass
        events = self._events
        if self._attempt is None:
            self._events = []
            return events
        num_given, self._attempt.num_events = self._attempt.num_events, 0
        if not num_given:
            return []
        self._events = events[num_given:]
        return events[:num_given]

    def finish(self, *, stopped: bool = False) -> list[OutputEvent]:
        """The output is over: give out what was held back, and close what is open.

        Args:
            stopped: The model ended it by itself, perhaps with a token that is no part of the text.
        """
        self._stopped = stopped
        if self._dropped is not None:
            rest = self._without_dropped("", self._dropped, final=True)
            self._buffer += rest
            self._num_buffered += len(rest)
            if self._attempt is not None:
                self._attempt.parts.append(rest)
        self._read_rest()
        while self._attempt is not None:
            if self._is_cut_call(self._attempt):
                self._accept_attempt(self._attempt)
            else:
                self._fail_attempt(self._attempt)
                self._read_rest()
        rest, self._buffer = self._buffer, ""
        state = self._table.states[self._state]
        if self._must_call and isinstance(state, Until) and state.sink is Sink.NAME and rest.strip() in self._names:
            self._take_name(rest.strip())
        if not self._table.is_text(self._state):
            self._raw.append(rest)
            self._give_up(is_whole=self._stopped and isinstance(state, Expect) and state.is_whole)
        if self._space:
            self._put_text(self._space)
        self._space = ""
        if self._undecided:
            self._events.append(ContentDelta("".join(self._undecided)))
            self._undecided = None
        events, self._events = self._events, []
        return events

    def _read_rest(self) -> None:
        """Read the buffer to its end, which is that of the output."""
        while self._buffer and self._step(final=True):
            pass
        state = self._table.states[self._state]
        if isinstance(state, Literal) and self._relay is not None:
            rest_of_value = self._relay.finish()
            if rest_of_value:
                self._emit_literal(state, rest_of_value)
            if self._relay.done:
                self._end_literal(state)
        if self._stopped and isinstance(state, Until) and state.key:
            self._end_value(state.sink)
            self._end_call()

    def _without_dropped(self, text: str, dropped: CompiledExits, *, final: bool) -> str:
        self._undropped += text
        kept, num_kept = [], 0
        while self._undropped:
            end, marker = dropped.find(self._undropped, final=final)
            kept.append(self._undropped[:end])
            num_kept += end
            self._undropped = self._undropped[end + len(marker or "") :]
            if marker is None:
                break
            self._left_out.append((self._num_buffered + num_kept, len(marker)))
        return "".join(kept)

    def _note_thinking(self) -> None:
        """A state was entered: thinking begins, ends, or neither."""
        self.has_begun = self.has_begun or self._state not in self._table.opening
        if self._attempt is not None:
            return
        spans, is_thinking = self.thinking_spans, self.is_thinking
        is_open = bool(spans) and spans[-1].end is None
        if is_thinking and self._undecided is not None:
            if self._undecided_begin is None:
                self._undecided_begin = self.num_read
        elif is_thinking and not is_open:
            spans.append(ThinkingSpan(self.num_read))
        elif not is_thinking:
            self._close_span(self._marker_begin, self.num_read)

    def _restart_span(self, begin: int) -> None:
        """A marker stood where the thinking might have gone on: what follows it is the thinking."""
        if self._undecided_begin is not None:
            self._undecided_begin = begin
        elif self.thinking_spans and self.thinking_spans[-1].end is None:
            self.thinking_spans[-1].begin = begin

    def _close_span(self, end: int, after: int) -> None:
        """The thinking ended, if it was one."""
        if self._undecided_begin is not None:
            self.thinking_spans.append(ThinkingSpan(self._undecided_begin))
            self._undecided_begin = None
        if self.thinking_spans and self.thinking_spans[-1].end is None:
            span = self.thinking_spans[-1]
            span.end, span.after = max(end, span.begin), after

    # One step of the machine. Each returns whether to go on at once.

    def _step(self, *, final: bool) -> bool:
        state = self._table.states[self._state]
        if isinstance(state, Until):
            if state.sink is Sink.CONTENT:
                return self._pass_text(state, final=final)
            if state.sink is Sink.REASONING:
                return self._pass_thinking(state, final=final)
            if state.sink in _CAPTURED:
                return self._capture(state, final=final)
            if self._tagged is not None:
                return self._read_tagged(state, self._tagged, final=final)
            return self._pass_text(state, final=final)
        return self._read_literal(state) if isinstance(state, Literal) else self._expect(state, final=final)

    def _pass_text(self, state: Until, *, final: bool) -> bool:
        exits = self._table.exits[self._state]
        end, marker = exits.find(self._buffer, final=final)
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if text:
            self._take_text(state.sink, text)
        if marker is None:
            return False
        self._leave(state, exits.go[marker], marker)
        return True

    def _pass_thinking(self, state: Until, *, final: bool) -> bool:
        exits = self._table.exits[self._state]
        end, marker = exits.find(self._buffer, final=final)
        is_mention: bool | None = False
        if marker is not None:
            is_mention = self._is_mention(end, marker, exits.go[marker], final=final)
            if is_mention:
                end += len(marker)
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if text:
            self._put_trimmed(text)
            self._last_chars = text[-2:] if len(text) > 1 else self._last_chars[-1:] + text
            self._is_in_mention = is_mention or (self._is_in_mention and text.isspace())
        if marker is None or is_mention is None:
            return False
        if not is_mention:
            self._leave(state, exits.go[marker], marker)
        return True

    def _read_tagged(self, state: Until, value: TaggedValue, *, final: bool) -> bool:
        """A value that its own tag may not end."""
        end, marker = value.find(self._buffer, final=final, stopped=self._stopped)
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if text:
            self._add_value(text)
        if marker is None:
            return False
        if state.tags is not None and state.tags.kinds[marker] is Tag.END and not self._table.strips_newline:
            newline, self._newline, self._tagged = self._newline, "", None
            self._add_value(newline)  # that before another tag belongs to the tag
        self._tagged = None
        self._current_call().in_doubt = value.in_doubt
        self._leave(state, self._table.exits[self._state].go[marker], marker)
        return True

    def _take_text(self, sink: Sink, text: str) -> None:
        if sink in _VALUES:
            self._add_value(text)
        else:
            self._put_trimmed(text)

    def _expect(self, state: Expect, *, final: bool) -> bool:
        space = _SPACE.match(self._buffer)
        begin = space.end() if space is not None else 0
        if begin:
            self._raw.append(self._buffer[:begin])
            self._buffer = self._buffer[begin:]
        if not self._buffer:
            return False
        exits = self._table.exits[self._state]
        if not final and exits.may_begin_at(self._buffer, 0):
            return False
        marker = exits.at(self._buffer, 0)
        if marker is not None:
            self._leave(state, exits.go[marker], marker)
            return True
        if state.otherwise is not None:
            self._go_to(state.otherwise)
        else:
            self._give_up(is_whole=state.is_whole)
        return True

    def _capture(self, state: Until, *, final: bool) -> bool:
        exits = self._table.exits[self._state]
        end, marker = exits.find(self._buffer, final=final)
        wrong = self._wrong_at(state.sink, self._buffer[:end])
        if wrong is not None:
            self._raw.append(self._buffer[:wrong])
            self._buffer = self._buffer[wrong:]
            self._give_up()
            return True
        if marker is None:
            return False
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        self._raw.append(text)
        if not self._take_captured(state.sink, text.strip()):
            self._give_up()
            return True
        self._leave(state, exits.go[marker], marker)
        return True

    def _wrong_at(self, sink: Sink, text: str) -> int | None:
        """Where a captured text stops being possible."""
        wrong = _NOT_IN.get(sink)
        match = wrong.search(text.rstrip()) if wrong is not None else None
        if match is not None:
            return min(match.start(), _MAX_CAPTURED_CHARS)
        return _MAX_CAPTURED_CHARS if len(text) > _MAX_CAPTURED_CHARS else None

    def _take_captured(self, sink: Sink, text: str) -> bool:
        """Whether it can be what it should be."""
        if sink in (Sink.KEY, Sink.IDENTIFIER):
            self._key, self._has_key = text, False
            return bool(text)
        if sink is Sink.ID:
            call = self._current_call()
            call.id = call.id or text or None
        return sink is not Sink.NAME or self._take_name(text)

    def _take_name(self, text: str) -> bool:
        match = self._table.name_pattern.fullmatch(text)
        call = self._current_call()
        if match is None or call.name is not None:
            return False
        name = match["name"]
        if self._table.known_names_only and name not in self._names:
            return False
        call.name = name
        if match.groupdict().get("id"):
            call.id = text
        if call.waiting:
            waiting, call.waiting = "".join(call.waiting), []
            self._emit(waiting)
            self._raw.clear()
        return True

    def _current_call(self) -> _Call:
        if self._call is None:
            self._call = _Call()
        return self._call

    def _leave(self, state: Until | Expect, go: Go, marker: str) -> None:
        """A marker was found at the beginning of the buffer."""
        self._marker_begin = self.num_read
        if isinstance(state, Until):
            if state.sink is Sink.REASONING:
                self._leave_thinking(go, marker)
            if state.sink in (Sink.CONTENT, Sink.REASONING):
                self._raw.append(self._space)
                self._space = ""
            elif state.sink in _VALUES:
                self._end_value(state.sink)
        if not go.keeps_marker:
            self._raw.append(marker)
            self._buffer = self._buffer[len(marker) :]
        if go.ends_call and not self._end_call():
            self._give_up()
            return
        if go.commits or self._table.is_text(go.state):
            self._commit()
        behind = self.num_read
        self._go_to(go.state)
        is_before_text = isinstance(state, Expect) or self._undecided == []
        if is_before_text and self._attempt is None and self.is_thinking:
            self._restart_span(behind)

    def _go_to(self, name: str) -> None:
        self._state = name
        state = self._table.states[name]
        if self._table.is_text(name):
            self._attempt = None
        self._note_thinking()
        if isinstance(state, Literal):
            needs_object = state.role is Role.ARGUMENTS
            if needs_object and self._current_call().arguments_done:
                self._give_up(is_whole=True)  # arguments given twice: the second are no part of the call
                return
            self._relay = LiteralRelay(state.dialect, needs_object=needs_object)
        elif isinstance(state, Until):
            if state.sink in (Sink.CONTENT, Sink.REASONING):
                self._last_chars = ""
                if state.sink is Sink.CONTENT:
                    self._end_thinking()
                self._put_raw()
                if self._table.exits[name].begin_lines and self._is_fresh:
                    # It begins a line, too. White space is left out there, so nobody sees it.
                    self._left_out.append((self._num_buffered - len(self._buffer), -1))
                    self._num_buffered += 1
                    self._buffer = "\n" + self._buffer
            elif state.sink in _VALUES:
                if state.key:
                    self._key, self._has_key = state.key, False
                if state.tags is not None:
                    tool, tools = self._current_call().name or "", self._tools
                    has_parameter = functools.partial(tools.has_parameter, tool)
                    exits = self._table.exits[name]
                    self._tagged = TaggedValue(state.tags, exits, has_parameter, self._names.__contains__)
                self._begin_value(state.sink)

    def _commit(self) -> None:
        """What was read so far has done its work."""
        self._raw.clear()
        self._space = ""
        self._is_fresh = True

    def _give_up(self, *, is_whole: bool = False) -> None:
        """What was read is no call, or no more of it: close it and give the rest back as text."""
        if self._attempt is not None:
            self._fail_attempt(self._attempt)
            return
        call, self._call = self._call, None
        if self._must_call and call is not None and call.name is not None:
            self._begin_call(call)
            self._raw.clear()
        if call is not None and call.index >= 0:
            is_whole = is_whole and call.has_arguments and not call.in_doubt
            self._close_call(call, self._closers(call), complete=call.arguments_done or is_whole)
        self._relay, self._value, self._tagged, self._newline = None, None, None, ""
        self._state = self._table.recover if self._undecided is None else self._table.recover_thinking
        self._note_thinking()
        self._put_raw()

    def _closers(self, call: _Call) -> str:
        """What ends the value that is being read."""
        state = self._table.states[self._state]
        if isinstance(state, Literal):
            is_argument = state.role is not Role.IGNORED and not call.arguments_done
            return self._relay.closers if self._relay is not None and is_argument else ""
        is_streaming = isinstance(state, Until) and state.sink in _VALUES and self._value is None
        return '"' if is_streaming else ""

    # Arguments.

    def _emit(self, text: str) -> None:
        """Give out a piece of the arguments, or keep it until the name is known."""
        call = self._current_call()
        if call.name is None:
            call.waiting.append(text)
            return
        self._begin_call(call)
        call.has_arguments = True
        self._events.append(CallArguments(call.index, text))

    def _begin_call(self, call: _Call) -> None:
        """From here on it is a call for good."""
        if call.index < 0:
            assert call.name is not None
            call.index = self.num_calls
            self.num_calls += 1
            self._events.append(CallStart(call.index, call.name, call.id))

    def _read_literal(self, state: Literal) -> bool:
        relay = self._relay
        assert relay is not None
        given, stop, safe = relay.feed(self._buffer)
        if given or safe:
            self._emit_literal(state, given, read=self._buffer[:safe])
        self._raw.append(self._buffer[safe:stop])
        self._buffer = self._buffer[stop:]
        if relay.failed:
            self._give_up()
            return True
        if not relay.done:
            return False
        self._end_literal(state)
        return True

    def _emit_literal(self, state: Literal, given: str, read: str = "") -> None:
        if state.role is Role.IGNORED:
            self._raw.append(read)
            return
        if state.role is Role.PARAMETER and not self._has_key and given:
            self._has_key = True
            given = self._key_text() + given
        if given:
            self._emit(given)
        if self._current_call().index >= 0:
            self._raw.clear()
        else:
            self._raw.append(read)

    def _end_literal(self, state: Literal) -> None:
        if state.role is Role.ARGUMENTS:
            self._current_call().arguments_done = True
        self._relay = None
        if state.ends_call and not self._end_call():
            self._give_up()
            return
        self._go_to(state.then)

    def _key_text(self) -> str:
        """The beginning of a parameter inside the object of arguments."""
        call = self._current_call()
        opening = ", " if call.is_open else "{"
        call.is_open = True
        return f"{opening}{json_string(self._key)}: "

    def _streams(self, sink: Sink) -> bool:
        """Whether a plain-text value is given out as it comes: when it can only be a string."""
        if sink is not Sink.VALUE:
            return sink is Sink.VALUE_TEXT
        types = self._types()
        return types == {"string"} or (not types and self._table.untyped_values == "text")

    def _types(self) -> frozenset[str]:
        call = self._current_call()
        return self._tools.types(call.name or "", self._key)

    def _begin_value(self, sink: Sink) -> None:
        self._newline, self._skips_newline = "", self._table.strips_newline
        if self._streams(sink) and self._current_call().name is not None:
            self._value = None
            self._emit(self._key_text() + '"')
            self._raw.clear()
        else:
            self._value = []

    def _add_value(self, text: str) -> None:
        if self._skips_newline:
            self._skips_newline = False
            whole, text = text, text.removeprefix("\n")
            if self._value is not None:
                self._raw.append(whole[: len(whole) - len(text)])
        if not text:
            return
        if self._table.strips_newline or self._tagged is not None:
            text = self._newline + text
            self._newline = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if self._value is not None:
            self._value.append(text)
            self._raw.append(text)
        elif text:
            self._emit(json_string(text)[1:-1])

    def _end_value(self, sink: Sink) -> None:
        if self._value is None:
            self._emit('"')
        else:
            text = "".join(self._value)
            types, untyped = self._types(), self._table.untyped_values
            if sink is Sink.VALUE_JSON:
                types, untyped = frozenset(), "json"
            self._emit(self._key_text() + value_as_json(text, types, untyped=untyped))
        self._value, self._newline = None, ""
        self._raw.clear()

    def _end_call(self) -> bool:
        """The call ends as it should; False when it has no name."""
        call = self._call
        if call is None or call.name is None or (self._attempt is not None and call.in_doubt):
            return False
        self._call = None
        self._begin_call(call)
        self._close_call(call, "", complete=not call.in_doubt)
        self._commit()
        if self._attempt is not None:
            self._accept_attempt(self._attempt)
        return True

    def _close_call(self, call: _Call, closers: str, *, complete: bool) -> None:
        if call.is_open:
            closers += "}"
        elif not call.has_arguments:
            closers = "{}"
        if closers:
            self._events.append(CallArguments(call.index, closers))
        self._events.append(CallEnd(call.index, complete))

    # Calls inside the thinking.

    def _is_mention(self, begin: int, marker: str, go: Go, *, final: bool) -> bool | None:
        """Whether a marker inside the thinking is only spoken of, because it stands in quotes; None while that is not
        known. Of a call, which is longer than its marker, the opening quote alone says it."""
        before = (self._last_chars + self._buffer[:begin])[-2:]
        may_begin_call = self._may_begin_call(go)
        if may_begin_call and self._is_in_mention and not self._buffer[:begin].strip():
            return True  # the next marker of the same call
        quote = _QUOTES.get(before[-1:])
        if quote is None or (quote == before[-1] and _NO_QUOTE_BEHIND.match(before[:-1])):
            return may_begin_call and self._num_long_attempts >= _MAX_LONG_ATTEMPTS
        behind = self._buffer[begin + len(marker) :][:1]
        if may_begin_call or behind or final:
            return may_begin_call or behind == quote
        return None

    def _may_begin_call(self, go: Go) -> bool:
        return not go.commits and not self._table.is_text(go.state)

    def _leave_thinking(self, go: Go, marker: str) -> None:
        """A marker was found in the thinking, at the beginning of the buffer."""
        if self._may_begin_call(go):
            self._attempt = _Attempt(
                self._state,
                marker,
                [self._buffer],
                self._space,
                self._is_fresh,
                self.num_calls,
                len(self._events),
                self._marker_begin,
            )
        elif not self._is_reasoning(go.state):
            self._end_thinking()

    def _accept_attempt(self, attempt: _Attempt) -> None:
        """It is a call, and what stood before it is reasoning."""
        if self._undecided:
            self._events.insert(attempt.num_events, ReasoningDelta("".join(self._undecided)))
        self._close_span(attempt.begin, attempt.begin)
        self._attempt, self._undecided = None, []

    def _fail_attempt(self, attempt: _Attempt) -> None:
        """It is no call: its marker was a mention, and the thinking goes on behind it."""
        text = "".join(attempt.parts)
        # Each is read again from its marker on: a thinking full of them must not take time without end.
        if len(text) - len(self._buffer) > _LONG_ATTEMPT_CHARS:
            self._num_long_attempts += 1
        self._attempt, self._call, self._relay, self._value, self._tagged = None, None, None, None, None
        del self._events[attempt.num_events :]
        self._raw.clear()
        self.num_calls, self._state, self._newline = attempt.num_calls, attempt.state, ""
        self._space, self._is_fresh = attempt.space, attempt.is_fresh
        self._buffer = text[len(attempt.marker) :]
        self._put_trimmed(attempt.marker)
        self._last_chars = attempt.marker[-2:]

    def _is_cut_call(self, attempt: _Attempt) -> bool:
        """Whether an attempt that the output ended in is a call that was cut short. It is none when the thinking ended
        in what would be its arguments."""
        text = "".join(attempt.parts)
        exits = self._table.exits[attempt.state].go.items()
        ends = (marker for marker, go in exits if go.commits and not self._is_reasoning(go.state))
        return self.num_calls > attempt.num_calls and not any(marker in text for marker in ends)

    def _end_thinking(self) -> None:
        if self._undecided:
            self._events.append(ReasoningDelta("".join(self._undecided)))
        self._undecided = None

    def _is_reasoning(self, name: str) -> bool:
        state = self._table.states[name]
        return isinstance(state, Until) and state.sink is Sink.REASONING

    # Text.

    def _put_raw(self) -> None:
        raw = "".join(self._raw)
        self._raw.clear()
        if raw:
            self._put_trimmed(raw)

    def _put_trimmed(self, text: str) -> None:
        """Text whose white space at both ends may still belong to a marker."""
        body = text.rstrip(_SPACES)
        if not body:
            if not self._is_fresh:
                self._space += text
            return
        end = text[len(body) :]
        if self._is_fresh:
            body = body.lstrip(_SPACES)
            self._is_fresh = False
        given, self._space = self._space + body, end
        self._put_text(given)

    def _put_text(self, text: str) -> None:
        state = self._table.states[self._state]
        if not isinstance(state, Until) or state.sink is not Sink.REASONING:
            self._events.append(ContentDelta(text))
        elif self._undecided is not None:
            self._undecided.append(text)
        else:
            self._events.append(ReasoningDelta(text))
