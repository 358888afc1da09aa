"""The body of OpenAI's Responses API, and what its items mean as a conversation.

Items are the one model of what was said: input, output and what is kept are lists of them; a prompt is made of their
projection onto chat messages. Source of the shapes: OpenAI's public API reference. Knows no engine and no store.
"""

from __future__ import annotations

import base64
import binascii
import reprlib
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire_interfaces import RequestError
from quire_server.protocol import Int, SamplingFields, with_effort
from quire_server.tool_choice import ToolUse, allow_only, check_function, named

__all__ = ["CompactRequest", "ResponsesRequest", "chat_messages", "pack_summary", "with_ids"]

_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_ROLES = ("user", "assistant", "system", "developer")
_NOT_SERVED = {
    "prompt": "put the prompt's text into instructions",
    "context_management": "use /v1/responses/compact",
}


class CompactRequest(SamplingFields):
    """Body of POST /v1/responses/compact: everything that makes the conversation."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Int | None = None

    def max_tokens_wanted(self) -> int | None:
        return self.max_output_tokens

    def logprobs_wanted(self) -> int | None:
        return None

    def field_names(self) -> dict[str, str]:
        return {
            **super().field_names(), "prompt": "input", "messages": "input", "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
        }  # fmt: skip

    @property
    def conversation_id(self) -> str | None:
        """The conversation that the response belongs to."""
        return None

    def input_items(self) -> list[dict[str, Any]]:
        """The new items, each with a type and an id.

        Raises:
            RequestError: naming the item at fault.
        """
        if self.input is None:
            if self.previous_response_id is None and self.conversation_id is None:
                raise RequestError("input is required", param="input")
            return []
        if isinstance(self.input, str):
            return with_ids([{"type": "message", "role": "user", "content": self.input}])
        return with_ids(self.input)

    def check_supported(self) -> None:
        super().check_supported()
        if self.n not in (None, 1):
            raise RequestError(f"n must be 1 in this API, got {self.n}", param="n")


class ResponsesRequest(CompactRequest):
    """Body of POST /v1/responses."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: Int | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: Any = None
    context_management: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True
    thinking_token_budget: Int | None = None

    def take_format(self) -> None:
        """`text.format` is `response_format` of this API. Raises RequestError when it is none."""
        form = (self.text or {}).get("format")
        if form is None:
            return
        self.response_format = _response_format(form)
        if self.structured_outputs is not None and self.response_format["type"] != "text":
            raise RequestError(
                "text.format and structured_outputs exclude each other; ask for the form of the output in one place",
                param="structured_outputs",
            )

    def field_names(self) -> dict[str, str]:
        names = {
            key: "text.format" if name.startswith("response_format") else name
            for key, name in super().field_names().items()
        }
        return {**names, "response_format.json_schema.schema": "text.format.schema", "response_format": "text.format"}

    def logprobs_wanted(self) -> int | None:
        wanted = "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if wanted or self.top_logprobs else None

    def check_supported(self) -> None:
        super().check_supported()
        for name, instead in _NOT_SERVED.items():
            if getattr(self, name) is not None:
                raise RequestError(f"{name} is not served here; {instead}", param=name)
        if self.conversation is not None and self.previous_response_id is not None:
            raise RequestError(
                "conversation and previous_response_id exclude each other: what was said before is in one of them",
                param="previous_response_id",
            )
        if self.background and self.store is False:
            raise RequestError("background needs store: leave store out, or set it to true", param="background")
        if self.truncation not in (None, "disabled", "auto"):
            raise _wrong("truncation", self.truncation, "be auto or disabled")

    @property
    def conversation_id(self) -> str | None:
        given = self.conversation.get("id") if isinstance(self.conversation, dict) else self.conversation
        if self.conversation is not None and not (isinstance(given, str) and given):
            raise _wrong("conversation", self.conversation, "be the id of a conversation, or an object with it")
        return given

    def function_names(self) -> list[str]:
        """Names of the functions that are the client's to call."""
        return [str(tool.get("name")) for tool in self.tools or () if tool.get("type") == "function"]

    def tool_use(self, mcp_tools: Sequence[dict[str, Any]] = ()) -> ToolUse:
        """What `tools`, `tool_choice` and `parallel_tool_calls` mean; `mcp_tools` are those of the "mcp" entries, in
        the chat API's form. Raises RequestError naming the field."""
        own = [
            _chat_tool(tool, f"tools[{index}]")
            for index, tool in enumerate(self.tools or ())
            if tool.get("type") != "mcp"
        ]
        tools = (*own, *mcp_tools)
        use = ToolUse(tools=tools, parallel=self.parallel_tool_calls is not False)
        choice = self.tool_choice
        if choice is None:
            return use
        if isinstance(choice, dict):
            if choice.get("type") == "function":
                return named(use, choice.get("name"), "tool_choice.name")
            if choice.get("type") == "allowed_tools" and choice.get("mode") in ("auto", "required"):
                return allow_only(use, choice.get("tools"), choice["mode"], "tool_choice.tools")
            raise _wrong("tool_choice", choice, "be of type function or allowed_tools")
        if choice not in ("none", "auto", "required"):
            raise _wrong("tool_choice", choice, "be none, auto, required, or an object that names a tool")
        if choice == "required" and not tools:
            raise RequestError("tool_choice 'required' needs tools", param="tool_choice")
        return replace(use, mode=choice)

    def template_kwargs(self) -> dict[str, Any] | None:
        """`chat_template_kwargs`, with what `reasoning.effort` means to templates."""
        effort = (self.reasoning or {}).get("effort")
        if effort is not None and not isinstance(effort, str):
            raise _wrong("reasoning.effort", effort, "be text")
        return with_effort(self.chat_template_kwargs, effort)


def _response_format(form: Any) -> dict[str, Any]:
    """`text.format` as chat completions spell it."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind == "json_schema":
        return {"type": kind, kind: {key: value for key, value in form.items() if key != "type"}}
    raise _wrong("text.format.type", kind, "be text, json_object or json_schema")


def _chat_tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise _wrong(f"{at}.type", tool.get("type"), "be 'function'; other tools are not enabled on this server")
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    check_function(function, at)
    return {"type": "function", "function": function}


def with_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items, each with its type and an id of its own."""
    result = []
    for item in items:
        kind = item.get("type") or ("message" if "role" in item else "item_reference" if set(item) == {"id"} else None)
        prefix = _ID_PREFIXES.get(str(kind), "item")
        own = item.get("id")
        name = own if isinstance(own, str) and own else f"{prefix}_{secrets.token_hex(12)}"
        result.append({**item, "type": kind, "id": name})
    return result


def chat_messages(
    items: list[dict[str, Any]], instructions: str | None = None, *, at: str = "input"
) -> list[dict[str, Any]]:
    """A conversation in the chat API's form. Neighbouring thoughts, words and calls of the model are one message.

    Raises:
        RequestError: naming the item at fault.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    answer: dict[str, Any] | None = None
    for index, item in _with_mcp_calls(items):
        place, kind = f"{at}[{index}]", item.get("type")
        is_answer = kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")
        if not is_answer:
            answer = None
            messages.append(_other_message(item, place))
            continue
        if answer is None or (kind == "reasoning" and ("content" in answer or "tool_calls" in answer)):
            answer = {"role": "assistant"}
            messages.append(answer)
        _add_to_answer(answer, item, place)
    for message in messages:
        message.setdefault("content", "")
    return messages


def _with_mcp_calls(items: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """(place, item), where calls of MCP tools are calls like others, followed by their outputs."""
    result: list[tuple[int, dict[str, Any]]] = []
    outputs: list[tuple[int, dict[str, Any]]] = []
    refused = {
        item.get("approval_request_id"): item.get("reason")
        for item in items
        if item.get("type") == "mcp_approval_response" and item.get("approve") is False
    }
    for index, item in enumerate(items):
        kind, name = item.get("type"), item.get("id")
        if kind in ("mcp_list_tools", "mcp_approval_response"):
            continue
        if kind == "mcp_approval_request":  # what was approved is there as the call itself
            if name in refused:
                result.append((index, {**item, "type": "function_call", "call_id": name}))
                told = f"The user did not approve this call. {refused[name] or ''}".rstrip()
                outputs.append((index, {"type": "function_call_output", "call_id": name, "output": told}))
            continue
        if kind == "mcp_call":
            result.append((index, {**item, "type": "function_call", "call_id": name}))
            text = item.get("output") if item.get("output") is not None else str(item.get("error") or "")
            outputs.append((index, {"type": "function_call_output", "call_id": name, "output": text}))
            continue
        if kind != "function_call":
            result += outputs
            outputs = []
        result.append((index, item))
    return result + outputs


def _add_to_answer(answer: dict[str, Any], item: dict[str, Any], at: str) -> None:
    kind = item["type"]
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        answer["reasoning_content"] = answer.get("reasoning_content", "") + _text_of(parts, f"{at}.content")
    elif kind == "message":
        answer["content"] = answer.get("content", "") + _text_of(item.get("content"), f"{at}.content")
    else:
        if not isinstance(item.get("name"), str):
            raise _wrong(f"{at}.name", item.get("name"), "be the name of a function")
        function = {"name": item["name"], "arguments": item.get("arguments") or "{}"}
        call = {"id": str(item.get("call_id") or item["id"]), "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)


def _other_message(item: dict[str, Any], at: str) -> dict[str, Any]:
    kind = item.get("type")
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise _wrong(f"{at}.role", item.get("role"), f"be one of {', '.join(_ROLES)}")
        return {"role": item["role"], "content": _text_of(item.get("content"), f"{at}.content")}
    if kind == "function_call_output":
        text = _text_of(item.get("output"), f"{at}.output")
        return {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": text}
    if kind == "compaction":
        summary = _unpack_summary(item.get("encrypted_content"), f"{at}.encrypted_content")
        return {"role": "user", "content": f"Summary of the conversation so far:\n{summary}"}
    raise _wrong(f"{at}.type", kind, "be message, function_call, function_call_output, reasoning or compaction")


def _text_of(value: Any, at: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(at, value, "be text or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        text = (part.get("text") if "text" in part else part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(
                f"{at}[{index}] is of type {kind!r}, and this model takes text only; send parts of type 'input_text'",
                param=f"{at}[{index}]",
                code="unsupported_content_type",
            )
        texts.append(text)
    return "".join(texts)


def pack_summary(text: str) -> str:
    """A summary as the opaque content of a compaction item."""
    return base64.b64encode(text.encode()).decode()


def _unpack_summary(content: Any, at: str) -> str:
    try:
        return base64.b64decode(content, validate=True).decode()
    except (TypeError, ValueError, binascii.Error):
        raise _wrong(at, content, "be what /v1/responses/compact of such a server gave") from None


def _wrong(param: str, value: Any, must: str) -> RequestError:
    return RequestError(f"{param} must {must}, got {reprlib.repr(value)}", param=param)
