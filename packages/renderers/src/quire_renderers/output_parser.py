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

from quire_renderers.call_attempt import CallAttempt
from quire_renderers.call_writer import CallWriter, ParsedCall
from quire_renderers.format_states import CompiledExits, Expect, FormatTable, Go, Literal, Role, Sink, Tag, Until
from quire_renderers.literal_relay import LiteralRelay
from quire_renderers.output_events import ContentDelta, OutputEvent, ReasoningDelta
from quire_renderers.tag_tree_relay import TagTreeRelay
from quire_renderers.tagged_values import TaggedValue
from quire_renderers.thinking_spans import SourceText, ThinkingSpan, ThinkingSpans
from quire_renderers.tool_schemas import ToolSchemas

__all__ = ["OutputParser"]

_MAX_CAPTURED_CHARS = 256
_NOT_IN = {
    Sink.NAME: re.compile(r"[^\w.:/\-\s]"),
    Sink.KEY: re.compile(r"[\n<>]"),
    Sink.IDENTIFIER: re.compile(r"[^\w\s]"),
}
_SPACES = " \t\r\n"
_SPACE = re.compile(f"[{_SPACES}]*")
_CAPTURED = (Sink.NAME, Sink.NAME_AGAIN, Sink.ID, Sink.KEY, Sink.IDENTIFIER)
_VALUES = (Sink.VALUE, Sink.VALUE_TEXT, Sink.VALUE_JSON)


_QUOTES = {"`": "`", '"': '"', "'": "'", "“": "”", "‘": "’", "«": "»", "「": "」", "『": "』"}
_NO_QUOTE_BEHIND = re.compile(r"[0-9A-Za-z_)\]}.!?;%]")
_MAX_LONG_ATTEMPTS = 16
_LONG_ATTEMPT_CHARS = 1000


# Many attributes: the state of one way through a text, of which each handler changes several.
class OutputParser:
    """Parses one output.

    Args:
        table: The format.
        tools: The tools that were offered.
        thinking: Whether the prompt has opened the thinking.
        dropped: Texts that are no text: special tokens that the detokenizer had to keep for the format's sake.
        must_call: Whether the output is certain to be a call: what has a name is one then, whatever follows.
        shown_as: Text that comes before the output's.

    Attributes:
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
        shown_as: str | None = None,
    ) -> None:
        self._table = table
        self._must_call = must_call
        self._tools = tools or ToolSchemas()
        self._source = SourceText(dropped)
        self._events: list[OutputEvent] = [ContentDelta(shown_as)] if shown_as else []
        self._buffer = ""
        self._raw: list[str] = []
        self._space = ""
        self._is_fresh = False
        self._calls = CallWriter(table, self._tools, self._raw, lambda event: self._events.append(event))
        self._attempt: CallAttempt | None = None
        self._num_long_attempts = 0
        self._undecided: list[str] | None = None
        """Text behind a call inside the thinking, None before one: the answer's, if nothing ends the thinking."""
        self._last_chars = ""
        self._is_in_mention = False
        self._stopped = False
        self._relay: LiteralRelay | TagTreeRelay | None = None
        self._marker_begin = 0
        self._spans = ThinkingSpans()
        self.has_begun = False
        self._state = ""
        if thinking and table.start_thinking is not None:
            self._is_fresh = True
            self._go_to(table.start_thinking)
        else:
            self._go_to(table.start)

    @property
    def num_calls(self) -> int:
        """Number of tool calls given out so far."""
        return self._calls.num_calls

    @property
    def thinking_spans(self) -> list[ThinkingSpan]:
        """Where the model thought so far, in order."""
        return self._spans.spans

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
        return self._source.place(len(self._buffer))

    def feed(self, text: str) -> list[OutputEvent]:
        """Take in more output; what it says."""
        text = self._source.feed(text)
        self._buffer += text
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
        rest = self._source.feed("", final=True)
        self._buffer += rest
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
        if (
            self._must_call
            and isinstance(state, Until)
            and state.sink is Sink.NAME
            and rest.strip() in self._calls.names
        ):
            self._calls.take_name(rest.strip())
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
            self._calls.end_value(state.sink)
            self._end_call()

    def _note_thinking(self) -> None:
        """A state was entered: thinking begins, ends, or neither."""
        self.has_begun = self.has_begun or self._state not in self._table.opening
        if self._attempt is not None:
            return
        if not self.is_thinking:
            self._spans.close(self._marker_begin, self.num_read)
        elif self._undecided is not None:
            self._spans.begin_undecided(self.num_read)
        else:
            self._spans.begin(self.num_read)

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
            if self._calls.tagged is not None:
                return self._read_tagged(state, self._calls.tagged, final=final)
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
            self._calls.add_value(text)
        if marker is None:
            return False
        if state.tags is not None and state.tags.kinds[marker] is Tag.END and not self._table.strips_newline:
            self._calls.end_newline()  # that before another tag belongs to the tag
        self._calls.tagged = None
        self._calls.current().in_doubt = value.in_doubt
        self._leave(state, self._table.exits[self._state].go[marker], marker)
        return True

    def _take_text(self, sink: Sink, text: str) -> None:
        if sink in _VALUES:
            self._calls.add_value(text)
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
            is_cut = not self._stopped and exits.may_begin_at(self._buffer, 0)
            self._give_up(is_whole=state.is_whole and not is_cut)
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
            self._calls.key, self._calls.has_key = text, False
            return bool(text)
        if sink is Sink.ID:
            call = self._calls.current()
            call.id = call.id or text or None
        if sink is Sink.NAME_AGAIN:
            return text == self._calls.current().name
        return sink is not Sink.NAME or self._calls.take_name(text)

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
                self._calls.end_value(state.sink, continues=go.continues)
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
            self._spans.restart(behind)

    def _go_to(self, name: str) -> None:
        self._state = name
        state = self._table.states[name]
        if self._table.is_text(name):
            self._attempt = None
        self._note_thinking()
        if isinstance(state, Literal):
            needs_object = state.role is Role.ARGUMENTS
            if needs_object and self._calls.current().arguments_done:
                self._give_up(is_whole=True)  # arguments given twice: the second are no part of the call
                return
            tool = self._calls.current().name or ""
            self._relay = (
                TagTreeRelay(state.tree, self._tools, tool)
                if state.tree is not None
                else LiteralRelay(state.dialect, needs_object=needs_object)
            )
        elif isinstance(state, Until):
            if state.sink in (Sink.CONTENT, Sink.REASONING):
                self._last_chars = ""
                if state.sink is Sink.CONTENT:
                    self._end_thinking()
                self._put_raw()
                if self._table.exits[name].begin_lines and self._is_fresh:
                    # It begins a line, too. White space is left out there, so nobody sees it.
                    self._source.insert(len(self._buffer))
                    self._buffer = "\n" + self._buffer
            elif state.sink in _VALUES:
                if state.key:
                    self._calls.key, self._calls.has_key = state.key, False
                if state.tags is not None:
                    tool, tools = self._calls.current().name or "", self._tools
                    has_parameter = functools.partial(tools.has_parameter, tool)
                    exits = self._table.exits[name]
                    self._calls.tagged = TaggedValue(state.tags, exits, has_parameter, self._calls.names.__contains__)
                self._calls.begin_value(state.sink)

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
        call, self._calls.call = self._calls.call, None
        if self._must_call and call is not None and call.name is not None:
            self._calls.begin_call(call)
            self._raw.clear()
        if call is not None and call.index >= 0:
            is_whole = is_whole and call.has_arguments and not call.in_doubt
            self._calls.close_call(call, self._closers(call), complete=call.arguments_done or is_whole)
        self._relay = None
        self._calls.abandon_value()
        self._state = self._table.recover if self._undecided is None else self._table.recover_thinking
        self._note_thinking()
        self._put_raw()

    def _closers(self, call: ParsedCall) -> str:
        """What ends the value that is being read."""
        state = self._table.states[self._state]
        if isinstance(state, Literal):
            is_argument = state.role is not Role.IGNORED and not call.arguments_done
            return self._relay.closers if self._relay is not None and is_argument else ""
        is_streaming = isinstance(state, Until) and state.sink in _VALUES and self._calls.is_open_text
        return '"' if is_streaming else ""

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
        if state.role is Role.PARAMETER and not self._calls.has_key and given:
            self._calls.has_key = True
            given = self._calls.key_text() + given
        if given:
            self._calls.emit(given)
        if self._calls.current().index >= 0:
            self._raw.clear()
        else:
            self._raw.append(read)

    def _end_literal(self, state: Literal) -> None:
        if state.role is Role.ARGUMENTS:
            self._calls.current().arguments_done = True
        self._relay = None
        if state.ends_call and not self._end_call():
            self._give_up()
            return
        self._go_to(state.then)

    def _end_call(self) -> bool:
        """The call ends as it should; False when it has no name."""
        call = self._calls.call
        if call is None or call.name is None or (self._attempt is not None and call.in_doubt):
            return False
        self._calls.call = None
        self._calls.begin_call(call)
        self._calls.close_call(call, "", complete=not call.in_doubt)
        self._commit()
        if self._attempt is not None:
            self._accept_attempt(self._attempt)
        return True

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
            self._attempt = CallAttempt(
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

    def _accept_attempt(self, attempt: CallAttempt) -> None:
        """It is a call, and what stood before it is reasoning."""
        if self._undecided:
            self._events.insert(attempt.num_events, ReasoningDelta("".join(self._undecided)))
        self._spans.close(attempt.begin, attempt.begin)
        self._attempt, self._undecided = None, []

    def _fail_attempt(self, attempt: CallAttempt) -> None:
        """It is no call: its marker was a mention, and the thinking goes on behind it."""
        text = "".join(attempt.parts)
        # Each is read again from its marker on: a thinking full of them must not take time without end.
        if len(text) - len(self._buffer) > _LONG_ATTEMPT_CHARS:
            self._num_long_attempts += 1
        self._attempt, self._calls.call, self._relay = None, None, None
        self._calls.abandon_value()
        del self._events[attempt.num_events :]
        self._raw.clear()
        self._calls.num_calls, self._state = attempt.num_calls, attempt.state
        self._space, self._is_fresh = attempt.space, attempt.is_fresh
        self._buffer = text[len(attempt.marker) :]
        self._put_trimmed(attempt.marker)
        self._last_chars = attempt.marker[-2:]

    def _is_cut_call(self, attempt: CallAttempt) -> bool:
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
