"""From parser events to the items and streaming events of the Responses API.

One class makes both: the items of a whole response are those that its events told. Knows no HTTP and no store.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from quire_renderers import CallArguments, CallEnd, CallStart, ContentDelta, OutputEvent, ReasoningDelta
from quire_server.builtin_tools import BUILTIN_BY_ITEM, BUILTIN_TOOLS
from quire_server.call_input import CallInput
from quire_server.client_tools import ClientTool
from quire_server.mcp_tools import MCPTool

__all__ = ["OutputItems", "is_clients_turn"]

Event = dict[str, Any]
CallId = Callable[[int, str | None], str]

INTERPRETER_CALL = "code_interpreter_call"
_STREAMED = ("function_call", "mcp_call")
"""Calls whose arguments are told while they come."""


def is_clients_turn(item: dict[str, Any]) -> bool:
    """Whether a response ends with such an item, for the client has to do something: run a tool, or approve a call."""
    return item["type"] in ("function_call", "custom_tool_call", "mcp_approval_request", *BUILTIN_BY_ITEM)


class OutputItems:
    """The output of one response as it grows.

    Args:
        call_id: Gives a call its id, from its index and the id the model wrote.
        mcp_tool: The MCP tool that the model calls by a name; None for what is the client's to call.
        client_tool: The client's tool that the model calls by a name.
        seal: Makes the opaque form of a thought; None where nobody asked for it.
    """

    def __init__(
        self,
        call_id: CallId,
        mcp_tool: Callable[[str], MCPTool | None] = lambda name: None,
        client_tool: Callable[[str], ClientTool | None] = lambda name: None,
        seal: Callable[[str], str] | None = None,
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self.call_id = call_id
        self._mcp_tool = mcp_tool
        self._client_tool = client_tool
        self._seal = seal
        self._input: CallInput | None = None
        """Reads the text of the call that is open, a custom tool's or the code interpreter's."""
        self._interpreter: MCPTool | None = None
        """What runs the program of the call that is open."""
        self._calls: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._events: list[Event] = []
        self._logprobs: list[dict[str, Any]] = []
        """Of tokens whose text has not come."""

    def take(self, events: Sequence[OutputEvent], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """The streaming events that tell of new output; `logprobs` are those of its text, also of text to come."""
        self._logprobs += logprobs
        for event in events:
            match event:
                case ContentDelta(text):
                    self._text(text, self._logprobs)
                    self._logprobs = []
                case ReasoningDelta(text):
                    self._reasoning(text)
                case CallStart(_, name, _):
                    self._logprobs = []
                    self._begin_call(event, name)
                case CallArguments(_, piece):
                    self._add_arguments(piece)
                case CallEnd(_, complete):
                    self._logprobs = []
                    self._close("completed" if complete else "incomplete")
        return self._taken()

    def finish(self, status: str) -> list[Event]:
        """The output is over: "completed", or "incomplete" when it was cut short."""
        if self._open is not None and self._open["type"] == "message":
            self._current["content"][0]["logprobs"] += self._logprobs  # of tokens without text, as the end token
        self._logprobs = []
        self._close(status)
        return self._taken()

    def _taken(self) -> list[Event]:
        new_events, self._events = self._events, []
        return new_events

    @property
    def _current(self) -> dict[str, Any]:
        assert self._open is not None
        return self._open

    def _text(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        if self._open is None or self._open["type"] != "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._begin("msg", {"type": "message", "role": "assistant"}, part)
        part = self._current["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        self._emit("output_text.delta", content_index=0, delta=text, logprobs=_plain(logprobs))

    def _reasoning(self, text: str) -> None:
        if self._open is None or self._open["type"] != "reasoning":
            self._begin("rs", {"type": "reasoning", "summary": []}, {"type": "reasoning_text", "text": ""})
        self._current["content"][0]["text"] += text
        self._emit("reasoning_text.delta", content_index=0, delta=text)

    def _add_arguments(self, piece: str) -> None:
        call = self._current
        if self._input is not None:
            self._add_input(self._input.feed(piece))
            return
        call["arguments"] += piece
        if call["type"] in _STREAMED:  # others are told when they are whole
            self._emit(f"{call['type']}_arguments.delta", delta=piece)

    def _add_input(self, text: str) -> None:
        if not text:
            return
        if self._current["type"] == INTERPRETER_CALL:
            self._current["code"] += text
            self._emit("code_interpreter_call_code.delta", delta=text)
        else:
            self._current["input"] += text
            self._emit("custom_tool_call_input.delta", delta=text)

    def _begin_call(self, event: CallStart, name: str) -> None:
        of_mcp = self._mcp_tool(name)
        called = {} if of_mcp is None else {"server_label": of_mcp.label, "name": of_mcp.name, "arguments": ""}
        if of_mcp is not None and of_mcp.asks_before:
            self._close("completed")
            request = {"type": "mcp_approval_request", **called}
            self._open = {"id": f"mcpr_{secrets.token_hex(12)}", **request}
            return
        if of_mcp is not None and of_mcp.is_interpreter:
            place = {"container_id": f"cntr_{secrets.token_hex(16)}"}  # each program has a folder of its own
            self._begin("ci", {"type": INTERPRETER_CALL, "code": "", **place, "outputs": None}, None)
            self._emit("code_interpreter_call.in_progress")
            self._input, self._interpreter = CallInput("code"), of_mcp
            return
        if of_mcp is not None:
            call = {"type": "mcp_call", **called, "output": None}
            self._begin("mcp", {**call, "error": None}, None)
            self._emit("mcp_call.in_progress")
            return
        tool, call_id = self._client_tool(name), self.call_id(event.index, event.id)
        if tool is not None and tool.kind in BUILTIN_TOOLS:
            self._close("completed")
            self._open = {"type": BUILTIN_TOOLS[tool.kind].item, "kind": tool.kind, "call_id": call_id, "arguments": ""}
            return
        fields = {"call_id": call_id, "name": name if tool is None else tool.name}
        if tool is not None and tool.namespace is not None:
            fields["namespace"] = tool.namespace
        if tool is not None and tool.kind == "custom":
            self._begin("ctc", {"type": "custom_tool_call", **fields, "input": ""}, None)
            self._input = CallInput()
        else:
            self._begin("fc", {"type": "function_call", **fields, "arguments": ""}, None)

    def _begin(self, prefix: str, item: dict[str, Any], part: dict[str, Any] | None) -> None:
        self._close("completed")
        item = {"id": f"{prefix}_{secrets.token_hex(12)}", **item, "status": "in_progress"}
        if part is not None:
            item["content"] = []
        self.items.append(item)
        self._open = item
        self._events.append(self._item_event("added", item))
        if part is not None:
            item["content"] = [part]
            self._emit("content_part.added", content_index=0, part=dict(part))

    def _close(self, status: str) -> None:
        item, kind = self._open, (self._open or {}).get("type")
        if item is None:
            return
        if kind == "mcp_approval_request":
            self._open = None
            self._add(item if status == "completed" else _broken(item))
            return
        if kind in BUILTIN_BY_ITEM:
            self._open = None
            self._add_builtin_call(item, status)
            return
        if kind in ("custom_tool_call", INTERPRETER_CALL) and self._input is not None:
            self._add_input(self._input.finish())
            self._input = None
        if kind == "custom_tool_call":
            self._emit("custom_tool_call_input.done", input=item["input"])
        elif kind == INTERPRETER_CALL:
            self._emit("code_interpreter_call_code.done", code=item["code"])
            if status == "completed" and self._interpreter is not None:
                item["status"] = "interpreting"
                self._emit("code_interpreter_call.interpreting")
                self._calls.append(_program(item, self._interpreter))
                self._open = None
                return
        elif kind in _STREAMED:
            self._emit(f"{kind}_arguments.done", arguments=item["arguments"])
            if kind == "mcp_call" and status == "completed":
                item["status"] = "calling"  # done when it was run
                self._calls.append(item)
                self._open = None
                return
        else:
            part = item["content"][0]
            if kind == "message":
                self._emit("output_text.done", content_index=0, text=part["text"], logprobs=_plain(part["logprobs"]))
            else:
                self._emit("reasoning_text.done", content_index=0, text=part["text"])
                if self._seal is not None:
                    item["encrypted_content"] = self._seal(part["text"])
            self._emit("content_part.done", content_index=0, part=dict(part))
        item["status"] = status
        self._open = None
        self._events.append(self._item_event("done", item))

    def _add_builtin_call(self, call: dict[str, Any], status: str) -> None:
        """A call of a tool with a type of its own, whose item is made of all of its arguments."""
        built_in = BUILTIN_TOOLS[call["kind"]]
        try:
            arguments = json.loads(call["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = {}
        if status == "incomplete" and not built_in.can_be_incomplete:
            status = "in_progress"
        own = {"id": f"{built_in.name}_{secrets.token_hex(12)}", "type": built_in.item, "call_id": call["call_id"]}
        self._add({**own, **built_in.fields(arguments if isinstance(arguments, dict) else {}), "status": status})

    def _add(self, item: dict[str, Any]) -> None:
        """An item that is whole at once."""
        self.items.append(item)
        self._events += [self._item_event("added", item), self._item_event("done", item)]

    def begin_calls(self, calls: Sequence[dict[str, Any]]) -> list[Event]:
        """Calls of MCP tools that were approved and are being run; their items from now on."""
        for call in calls:
            call |= {"id": f"mcp_{secrets.token_hex(12)}", "type": "mcp_call", "output": None, "error": None}
            call["status"] = "in_progress"
            self.items.append(call)
            place = {"item_id": call["id"], "output_index": self._place(call)}
            self._events.append(self._item_event("added", call))
            self._events.append({"type": "response.mcp_call.in_progress", **place})
            end_event = {"type": "response.mcp_call_arguments.done", "arguments": call["arguments"]}
            self._events.append({**end_event, **place})
        return self._taken()

    def take_calls(self) -> list[dict[str, Any]]:
        """New calls of MCP tools, to be run."""
        calls, self._calls = self._calls, []
        return calls

    def end_calls(self, calls: Sequence[dict[str, Any]]) -> list[Event]:
        """These calls were run: their items hold what came of it."""
        for call in calls:
            item = call.get("item", call)
            place = {"item_id": item["id"], "output_index": self._place(item)}
            if item is call or item["status"] == "completed":  # there is no event for a program that did not run
                self._events.append({"type": f"response.{item['type']}.{item['status']}", **place})
            self._events.append(self._item_event("done", item))
        return self._taken()

    def begin_compaction(self) -> list[Event]:
        """The model summarizes the conversation."""
        item = {"id": f"cmp_{secrets.token_hex(12)}", "type": "compaction", "encrypted_content": ""}
        self.items.append(item)
        place = {"item_id": item["id"], "output_index": self._place(item)}
        return [self._item_event("added", item), {"type": "response.compaction.compacting", **place}]

    def end_compaction(self, content: str) -> list[Event]:
        """It has: the item holds the summary."""
        item = self.items[-1]
        item["encrypted_content"] = content
        return [self._item_event("done", item)]

    def add_tool_lists(self, lists: Sequence[dict[str, Any]]) -> list[Event]:
        """`mcp_list_tools` items, before everything else."""
        for item in lists:
            self.items.append(item)
            place = {"item_id": item["id"], "output_index": self._place(item)}
            self._events.append(self._item_event("added", item))
            self._events += [
                {"type": f"response.mcp_list_tools.{what}", **place} for what in ("in_progress", "completed")
            ]
            self._events.append(self._item_event("done", item))
        return self._taken()

    def _place(self, item: dict[str, Any]) -> int:
        return next(index for index, each in enumerate(self.items) if each is item)

    def _item_event(self, what: str, item: dict[str, Any]) -> Event:
        copied = {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)
        return {"type": f"response.output_item.{what}", "output_index": self._place(item), "item": copied}

    def _emit(self, what: str, **values: Any) -> None:
        place = {"item_id": self._current["id"], "output_index": len(self.items) - 1}
        self._events.append({"type": f"response.{what}", **place, **values})


def _program(item: dict[str, Any], tool: MCPTool) -> dict[str, Any]:
    """A program of the code interpreter as the call of a tool; what comes of it goes to the item."""
    arguments = json.dumps({"code": item["code"]})
    return {"server_label": tool.label, "name": tool.name, "arguments": arguments, "output": None, "error": None,
            "status": "calling", "item": item}  # fmt: skip


def _broken(item: dict[str, Any]) -> dict[str, Any]:
    """A call that was cut short before anybody could be asked for approval."""
    call = {"id": item["id"].replace("mcpr_", "mcp_"), "output": None, "error": None, "status": "incomplete"}
    return {**item, **call, "type": "mcp_call"}


def _plain(logprobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Log probabilities as events have them: without bytes."""
    keys = ("token", "logprob")
    return [
        {
            **{key: each[key] for key in keys},
            "top_logprobs": [{key: top[key] for key in keys} for top in each["top_logprobs"]],
        }
        for each in logprobs
    ]
