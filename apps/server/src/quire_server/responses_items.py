"""Items of the Responses API as a conversation in the chat API's form, whatever their kind.

Neighbouring thoughts, words and calls of the model are one message. Calls of all kinds are calls of functions, with the
names under which the model knows the tools. What only another server could read, and kinds of items that are not known
here, become a line with their text, or nothing: what was said once must not make a conversation impossible. Knows no
engine and no store; the shapes are those of OpenAI's public API reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire_interfaces import wrong_value
from quire_server.builtin_tools import BUILTIN_BY_ITEM
from quire_server.client_tools import INPUT, ClientTools
from quire_server.content_parts import Content
from quire_server.content_text import content_text, left_out_line, seen_content
from quire_server.sealing import Sealer, open_summary

__all__ = ["COMPACTIONS", "ItemReader", "last_question"]

Item = dict[str, Any]

COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
"""Types of an item that stands for an earlier part of the conversation."""
_ROLES = ("user", "assistant", "system", "developer")
_SILENT = ("mcp_list_tools", "mcp_approval_response", "additional_tools", "compaction_trigger")
_READABLE = ("content", "text", "summary", "output", "outputs", "query", "queries", "code", "message", "revised_prompt")
_UNREADABLE_SUMMARY = "An earlier part of the conversation was summarized by another server and cannot be read here."


@dataclass(frozen=True, slots=True)
class ItemReader:
    """Reads the items of one request."""

    offered: ClientTools = field(default_factory=ClientTools)
    """The client's tools, whose names the model knows."""
    mcp_name: Callable[[Any, str], str | None] = lambda label, name: None
    """How the model knows a tool of an MCP server; None for one that is not offered."""
    interpreter_name: str | None = None
    """What the model knows the code interpreter's tool by; None where it has none."""
    sealer: Sealer | None = None
    """Opens the `encrypted_content` of thoughts and summaries; None opens summaries alone that are not sealed."""
    modalities: tuple[str, ...] = ()
    """What the model takes beside text."""

    def chat_messages(
        self, items: Sequence[Item], instructions: str | None = None, *, at: str = "input", has_new: bool = True
    ) -> list[dict[str, Any]]:
        """The conversation.

        Args:
            items: What was said, the newest last.
            instructions: The system prompt.
            at: The place of the items.
            has_new: Whether the last message of the user is asked now, so that it must be readable as a whole.

        Raises:
            RequestError: naming the item at fault.
        """
        transcript = _Transcript(instructions)
        newest = _newest_message(items) if has_new else None
        refused = {
            str(item.get("approval_request_id")): item.get("reason")
            for item in items
            if item.get("type") == "mcp_approval_response" and item.get("approve") is False
        }
        for index, item in self._uncompacted(items):
            self._read(transcript, item, f"{at}[{index}]", refused, is_new=index == newest)
        return transcript.finished()

    def _read(self, transcript: _Transcript, item: Item, at: str, refused: dict[Any, Any], *, is_new: bool) -> None:
        kind = item.get("type")
        if not isinstance(kind, str) or kind == "item_reference":
            raise wrong_value(f"{at}.type", kind, "be the type of an item, like message or function_call_output")
        if kind == "message":
            self._read_message(transcript, item, at, is_new=is_new)
        elif kind == "reasoning":
            transcript.think(self._thoughts(item, at))
        elif kind in ("function_call", "custom_tool_call"):
            transcript.call(_call_id(item), self._name(item, at), _arguments(item))
        elif kind in BUILTIN_BY_ITEM:
            built_in = BUILTIN_BY_ITEM[kind]
            if kind != "tool_search_call" or item.get("execution") == "client":
                transcript.call(_call_id(item), built_in.name, built_in.arguments(item) or {})
        elif kind.endswith("_output") and (item.get("call_id") or kind == "local_shell_call_output"):
            transcript.result(_call_id(item), _output_content(item, f"{at}.output", self.modalities))
        elif kind == "mcp_call":
            text = item.get("output") if item.get("output") is not None else str(item.get("error") or "")
            transcript.call(str(item.get("id")), self._name(item, at), _arguments(item))
            transcript.own_result(str(item.get("id")), content_text(text, f"{at}.output", is_new=False))
        elif kind == "code_interpreter_call" and self.interpreter_name is not None:
            transcript.call(str(item.get("id")), self.interpreter_name, {"code": _readable(item.get("code"))})
            transcript.own_result(str(item.get("id")), _readable(item.get("outputs")))
        elif kind == "mcp_approval_request":
            name = str(item.get("id"))
            if name in refused:  # what was approved is there as the call itself
                transcript.call(name, self._name(item, at), _arguments(item))
                transcript.own_result(name, f"The user did not approve this call. {refused[name] or ''}".rstrip())
        elif kind in COMPACTIONS:
            if item.get("encrypted_content") is not None:
                summary = open_summary(item["encrypted_content"], self.sealer)
                text = _UNREADABLE_SUMMARY if summary is None else summary.text
                transcript.message("user", f"Summary of the conversation so far:\n{text}")
        elif kind not in _SILENT and (line := _line(item)):
            transcript.say(line)

    def _read_message(self, transcript: _Transcript, item: Item, at: str, *, is_new: bool) -> None:
        if item.get("role") not in _ROLES:
            raise wrong_value(f"{at}.role", item.get("role"), f"be one of {', '.join(_ROLES)}")
        if item["role"] == "assistant":
            transcript.say(content_text(item.get("content"), f"{at}.content", is_new=is_new))
        else:
            content = seen_content(item.get("content"), f"{at}.content", self.modalities, is_new=is_new)
            transcript.message(item["role"], content)

    def _thoughts(self, item: Item, at: str) -> str:
        for key in ("content", "summary"):
            if key == "summary" and self.sealer is not None:
                opened = self.sealer.open(item.get("encrypted_content"))
                if opened is not None:
                    return opened
            if item.get(key):
                return content_text(item[key], f"{at}.{key}", is_new=False)
        return ""

    def _name(self, item: Item, at: str) -> str:
        name, namespace = item.get("name"), item.get("namespace")
        if not isinstance(name, str):
            raise wrong_value(f"{at}.name", name, "be the name of a tool")
        if item.get("type") in ("mcp_call", "mcp_approval_request"):
            return self.mcp_name(item.get("server_label"), name) or name
        return self.offered.shown_name(name, namespace if isinstance(namespace, str) else None)

    def _uncompacted(self, items: Sequence[Item]) -> list[tuple[int, Item]]:
        """(place, item) without what the last summary replaces. What the user asked last before it comes behind it."""
        numbered = list(enumerate(items))
        place = next((index for index, item in reversed(numbered) if self._replaces(item)), None)
        if place is None:
            return numbered
        question_place = last_question(items[:place])
        instructions = [each for each in numbered[:question_place] if each[1].get("role") in ("system", "developer")]
        return [*instructions, numbered[place], *numbered[question_place:place], *numbered[place + 1 :]]

    def _replaces(self, item: Item) -> bool:
        if item.get("type") != "compaction":
            return False
        summary = open_summary(item.get("encrypted_content"), self.sealer)
        return summary is not None and summary.replaces


class _Transcript:
    """The messages so far."""

    def __init__(self, instructions: str | None) -> None:
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
        self._answer: dict[str, Any] | None = None
        self._results: list[dict[str, Any]] = []

    def message(self, role: str, content: Content) -> None:
        self._end_answer()
        self._messages.append({"role": role, "content": content})

    def result(self, call_id: str, content: Content) -> None:
        self._end_answer()
        self._messages.append(_result(call_id, content))

    def own_result(self, call_id: str, text: str) -> None:
        """Of a call that a server ran itself: it stands behind all calls of the answer."""
        self._results.append(_result(call_id, text))

    def think(self, text: str) -> None:
        if self._answer is not None and ("content" in self._answer or "tool_calls" in self._answer):
            self._end_answer()
        answer = self._open_answer()
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def say(self, text: str) -> None:
        if self._results:
            self._end_answer()
        answer = self._open_answer()
        answer["content"] = answer.get("content", "") + text

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._open_answer().setdefault("tool_calls", []).append(call)

    def finished(self) -> list[dict[str, Any]]:
        self._end_answer()
        for message in self._messages:
            message.setdefault("content", "")
        return self._messages

    def _open_answer(self) -> dict[str, Any]:
        if self._answer is None:
            self._answer = {"role": "assistant"}
            self._messages.append(self._answer)
        return self._answer

    def _end_answer(self) -> None:
        self._answer = None
        self._messages += self._results
        self._results = []


def last_question(items: Sequence[Item]) -> int:
    """The place of the user's last message, or the end where there is none."""
    places = (index for index, item in reversed(list(enumerate(items))) if item.get("role") == "user")
    return next(places, len(items))


def _newest_message(items: Sequence[Item]) -> int | None:
    """The place of the user's message that is not answered yet."""
    for index in reversed(range(len(items))):
        kind = items[index].get("type")
        if kind == "message" and items[index].get("role") == "user":
            return index
        if kind not in _SILENT and not (kind == "message" and items[index].get("role") in ("system", "developer")):
            return None
    return None


def _result(call_id: str, content: Content) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _call_id(item: Item) -> str:
    return str(item.get("call_id") or item.get("id"))


def _arguments(item: Item) -> Any:
    if item["type"] == "custom_tool_call":
        return json.dumps({INPUT: str(item.get("input") or "")}, ensure_ascii=False)
    return item.get("arguments") or "{}"


def _output_content(item: Item, at: str, modalities: tuple[str, ...]) -> Content:
    """What a tool has found, with its media where the model takes any."""
    output = item.get("output")
    seen = [output] if isinstance(output, dict) else output
    if modalities and isinstance(seen, list) and item["type"] not in ("tool_search_output", "shell_call_output"):
        return seen_content(seen, at, modalities, is_new=False)
    return _output_text(item, at)


def _output_text(item: Item, at: str) -> str:
    kind, output = item["type"], item.get("output")
    if kind == "tool_search_output":
        tools = item["tools"] if isinstance(item.get("tools"), list) else []
        names = [str(tool.get("name") or tool.get("type")) for tool in tools if isinstance(tool, dict)]
        return f"Tools found: {', '.join(names) or 'none'}"
    if kind == "shell_call_output" and isinstance(output, list):
        return "".join(_shell_output(each) for each in output)
    if isinstance(output, dict):
        return left_out_line(output.get("type"))
    text = content_text(output, at, is_new=False)
    return text or (f"status: {item['status']}" if kind == "apply_patch_call_output" and item.get("status") else "")


def _shell_output(value: Any) -> str:
    if not isinstance(value, dict) or "outcome" not in value:
        return content_text([value], "output", is_new=False)
    outcome = value["outcome"] if isinstance(value["outcome"], dict) else {}
    ending = f"exit code: {outcome['exit_code']}" if "exit_code" in outcome else str(outcome.get("type") or "")
    streams = [str(value[name]).rstrip("\n") for name in ("stdout", "stderr") if value.get(name)]
    return "\n".join([*streams, ending]) + "\n"


def _line(item: Item) -> str:
    """An item that only another server can read: its type and text in a line; nothing where it has no text."""
    action = item.get("action")
    holders = [item, action] if isinstance(action, dict) else [item]
    texts = [text for holder in holders for key in _READABLE if (text := _readable(holder.get(key)))]
    return f"[{item['type']}: {' '.join(texts)}]\n" if texts else ""


def _readable(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return " ".join(filter(None, map(_readable, value)))
    if isinstance(value, dict):
        return next((value[key] for key in ("text", "logs") if isinstance(value.get(key), str)), "")
    return ""
