"""From parser events to the messages and deltas of chat completions, with calls in the shape of the client's tools.

Knows no HTTP and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire_renderers import CallArguments, CallEnd, CallStart, ContentDelta, OutputEvent, ParsedCall, ReasoningDelta
from quire_server.call_input import CallInput, input_of
from quire_server.responses import ChatMessage, CustomCall, Delta, FunctionCall, ToolCall, ToolCallDelta
from quire_server.turn import TurnChoice

__all__ = ["ChatDeltas", "whole_message"]


def whole_message(choice: TurnChoice) -> ChatMessage:
    """The answer as a message."""
    parsed = choice.message()
    is_text = not (parsed.calls or parsed.reasoning)
    text = parsed.text or ("" if is_text or choice.is_forced else None)
    message = ChatMessage(content=text)
    if parsed.reasoning:
        message.reasoning = message.reasoning_content = parsed.reasoning
    if parsed.calls:
        message.tool_calls = [_whole_call(choice, index, call) for index, call in enumerate(parsed.calls)]
    return message


def _whole_call(choice: TurnChoice, index: int, call: ParsedCall) -> ToolCall:
    name = choice.call_id(index, call.id)
    tool = choice.client_tool(call.name)
    if tool is not None and tool.kind == "custom":
        return ToolCall(id=name, type="custom", custom=CustomCall(name=tool.name, input=input_of(call.arguments)))
    return ToolCall(id=name, function=FunctionCall(name=call.name, arguments=call.arguments))


class ChatDeltas:
    """The events of one answer as deltas, the way clients put messages together."""

    def __init__(self, choice: TurnChoice) -> None:
        self._choice = choice
        self._inputs: dict[int, CallInput] = {}
        """Index of a call -> its text, for custom tools."""

    def delta_of(self, events: Sequence[OutputEvent]) -> Delta:
        """The events of one step as one delta."""
        text, reasoning = [], []
        calls: dict[int, ToolCallDelta] = {}
        for event in events:
            match event:
                case ContentDelta(piece):
                    text.append(piece)
                case ReasoningDelta(piece):
                    reasoning.append(piece)
                case CallStart():
                    calls[event.index] = self._begin(event)
                case CallArguments(index, piece):
                    self._add(calls, index, self._inputs[index].feed(piece) if index in self._inputs else piece)
                case CallEnd(index, _) if index in self._inputs:
                    self._add(calls, index, self._inputs[index].finish())
        delta = Delta()
        if text:
            delta.content = "".join(text)
        if reasoning:
            delta.reasoning = delta.reasoning_content = "".join(reasoning)
        if calls:
            delta.tool_calls = list(calls.values())
        return delta

    def _begin(self, event: CallStart) -> ToolCallDelta:
        tool = self._choice.client_tool(event.name)
        call = ToolCallDelta(index=event.index, id=self._choice.call_id(event.index, event.id), type="function")
        if tool is not None and tool.kind == "custom":
            self._inputs[event.index] = CallInput()
            call.type, call.custom = "custom", CustomCall(name=tool.name, input="")
        else:
            call.function = FunctionCall(name=event.name, arguments="")
        return call

    def _add(self, calls: dict[int, ToolCallDelta], index: int, piece: str) -> None:
        if not piece:
            return
        call = calls.setdefault(index, ToolCallDelta(index=index))
        if index in self._inputs:
            before = call.custom if isinstance(call.custom, CustomCall) else CustomCall(input="")
            before.input = f"{before.input}{piece}"
            call.custom = before
        else:
            function = call.function if isinstance(call.function, FunctionCall) else FunctionCall(arguments="")
            function.arguments = f"{function.arguments}{piece}"
            call.function = function
