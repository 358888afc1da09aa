"""The body of Anthropic's Messages API, and what it means as a turn.

Source of the shapes: Anthropic's public API reference. Knows no engine.
"""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Any

from pydantic import Field

from quire_interfaces import RequestError
from quire_server.protocol import Int, SamplingFields, check_thinking_budget
from quire_server.tool_choice import ToolUse, check_function, named

__all__ = ["CountTokensRequest", "MessagesRequest"]


class CountTokensRequest(SamplingFields):
    """Body of POST /v1/messages/count_tokens: everything that makes the prompt."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: Int | None = None
    stop_sequences: list[str] | None = None

    def max_tokens_wanted(self) -> int | None:
        return self.max_tokens

    def logprobs_wanted(self) -> int | None:
        return None

    def field_names(self) -> dict[str, str]:
        return {**super().field_names(), "prompt": "messages", "stop": "stop_sequences"}

    def check_supported(self) -> None:
        super().check_supported()
        if self.n not in (None, 1):
            raise RequestError(f"n must be 1 in this API, got {self.n}", param="n")
        self.stop = self.stop_sequences if self.stop_sequences is not None else self.stop

    def chat_messages(self) -> list[dict[str, Any]]:
        """The conversation in the chat API's form.

        Raises:
            RequestError: naming the block at fault.
        """
        result: list[dict[str, Any]] = []
        if self.system:
            result.append({"role": "system", "content": _text_of(self.system, "system", "\n\n")})
        for index, message in enumerate(self.messages):
            result.extend(_chat_messages(message, f"messages[{index}]"))
        return result

    def prefills(self, messages: list[dict[str, Any]]) -> bool:
        """Whether the conversation ends inside the answer, which the model then goes on with."""
        last = messages[-1]
        return last["role"] == "assistant" and bool(last.get("content")) and not last.get("tool_calls")

    def tool_use(self) -> ToolUse:
        """What `tools` and `tool_choice` mean. Raises RequestError naming the field at fault."""
        use = ToolUse(tools=tuple(_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or ())))
        choice = self.tool_choice
        if choice is None:
            return use
        use = replace(use, parallel=choice.get("disable_parallel_tool_use") is not True)
        kind = choice.get("type")
        if kind == "tool":
            return named(use, choice.get("name"), "tool_choice.name")
        modes = {"auto": "auto", "any": "required", "none": "none"}
        if not isinstance(kind, str) or kind not in modes:
            raise _wrong("tool_choice.type", kind, "be auto, any, tool or none")
        if kind == "any" and not use.tools:
            raise RequestError("tool_choice 'any' needs tools", param="tool_choice")
        return replace(use, mode=modes[kind])

    def template_kwargs(self) -> dict[str, Any] | None:
        """`chat_template_kwargs`, with what `thinking` means to templates."""
        kind = self._thinking_kind()
        if kind is None:
            return self.chat_template_kwargs
        thinks = kind != "disabled"
        return {"enable_thinking": thinks, "thinking": thinks, **(self.chat_template_kwargs or {})}

    def thinking_budget(self) -> int | None:
        """Most tokens of thinking."""
        if self._thinking_kind() != "enabled" or self.thinking is None:
            return None
        budget = self.thinking.get("budget_tokens")
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
            raise _wrong("thinking.budget_tokens", budget, "be a whole number")
        check_thinking_budget(budget, "thinking.budget_tokens")
        return budget

    def _thinking_kind(self) -> str | None:
        kind = (self.thinking or {}).get("type")
        if self.thinking is not None and kind not in ("enabled", "disabled", "adaptive"):
            raise _wrong("thinking.type", kind, "be enabled, disabled or adaptive")
        return kind


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Int


def _chat_tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None):
        raise _wrong(f"{at}.type", tool["type"], "be 'custom'; other tools are not served here")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    check_function({**function, "parameters": tool.get("input_schema")}, at)
    return {"type": "function", "function": function}


def _chat_messages(message: dict[str, Any], at: str) -> list[dict[str, Any]]:
    """One message as one or more: tool results are messages of their own in the chat API."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise _wrong(f"{at}.role", role, "be user, assistant or system")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise _wrong(f"{at}.content", content, "be text or a list of blocks")
    texts: list[str] = []
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(content):
        where = f"{at}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind == "text":
            texts.append(_text_of([block], where, ""))
        elif kind == "tool_result" and role == "user":
            text = _text_of(block.get("content") or "", f"{where}.content", "")
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text})
        elif kind == "tool_use" and role == "assistant":
            calls.append(_chat_call(block, where))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            raise RequestError(
                f"{where} is of type {kind!r}, which a message of role {role!r} cannot hold here; send text",
                param=where,
                code="unsupported_content_type",
            )
    return results + _own_message(role, "".join(texts), calls, "".join(thoughts), has_results=bool(results))


def _own_message(
    role: str, text: str, calls: list[dict[str, Any]], thoughts: str, *, has_results: bool
) -> list[dict[str, Any]]:
    if has_results and not text:
        return []
    message: dict[str, Any] = {"role": role, "content": text}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = thoughts
    return [message]


def _chat_call(block: dict[str, Any], at: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str):
        raise _wrong(f"{at}.name", block.get("name"), "be the name of a tool")
    arguments = block.get("input")
    function = {"name": block["name"], "arguments": {} if arguments is None else arguments}
    return {"id": str(block.get("id")), "type": "function", "function": function}


def _text_of(value: Any, at: str, between: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(at, value, "be text or a list of text blocks")
    for index, block in enumerate(value):
        if not isinstance(block, dict) or not isinstance(block.get("text"), str):
            raise _wrong(f"{at}[{index}]", block, "be a text block; this model takes text only")
    return between.join(block["text"] for block in value)


def _wrong(param: str, value: Any, must: str) -> RequestError:
    return RequestError(f"{param} must {must}, got {reprlib.repr(value)}", param=param)
