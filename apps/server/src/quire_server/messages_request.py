"""The body of Anthropic's Messages API, and what it means as a turn.

Source of the shapes: Anthropic's public API reference. Knows no engine.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from quire_interfaces import RequestError
from quire_server.protocol import Int, SamplingFields, check_thinking_budget
from quire_server.tool_choice import ToolUse, check_function, named

__all__ = ["CountTokensRequest", "MessagesRequest"]

_THINKING = ("enabled", "disabled", "adaptive", "between_tools")
_BILLING = "x-anthropic-billing-header:"
"""Begins a block that Claude Code puts before its system prompt; another one in each request."""


class CountTokensRequest(SamplingFields):
    """Body of POST /v1/messages/count_tokens: everything that makes the prompt."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: Int | None = None
    stop_sequences: list[str] | None = None

    def max_tokens_wanted(self) -> int | None:
        return self.max_tokens

    def logprobs_wanted(self) -> int | None:
        return None

    def field_names(self) -> dict[str, str]:
        names = super().field_names()
        if self._form() is not None:
            form = self._form_name
            names = {key: name.replace("response_format", form, 1) for key, name in names.items()}
            names = {key: name.replace(".json_schema.", ".") for key, name in names.items()}
            names["response_format.json_schema.schema"] = f"{form}.schema"
        return {**names, "prompt": "messages", "stop": "stop_sequences"}

    def check_supported(self) -> None:
        super().check_supported()
        if self.n not in (None, 1):
            raise RequestError(f"n must be 1 in this API, got {self.n}", param="n")
        self.stop = self.stop_sequences if self.stop_sequences is not None else self.stop
        form = self._form()
        if form is not None:
            if not isinstance(form, dict) or form.get("type") != "json_schema":
                raise _wrong(self._form_name, form, "be an object with the type json_schema and a schema")
            if self.response_format is not None:
                raise RequestError(f"{self._form_name} and response_format exclude each other", param=self._form_name)
            self.response_format = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}

    @property
    def _form_name(self) -> str:
        return "output_format" if (self.output_config or {}).get("format") is None else "output_config.format"

    def _form(self) -> Any:
        """What form the answer must have, as asked for under today's name or the one before."""
        form = (self.output_config or {}).get("format")
        return self.output_format if form is None else form

    def chat_messages(self) -> list[dict[str, Any]]:
        """The conversation in the chat API's form.

        Raises:
            RequestError: naming the block at fault.
        """
        result: list[dict[str, Any]] = []
        system = _system_text(self.system or "")
        if system:
            result.append({"role": "system", "content": system})
        for index, message in enumerate(self.messages):
            for each in _chat_messages(message, f"messages[{index}]"):
                _append(result, each)
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
        """`chat_template_kwargs`, with what `thinking` and `output_config.effort` mean to templates."""
        kwargs: dict[str, Any] = {}
        kind, effort = self._thinking_kind(), (self.output_config or {}).get("effort")
        if kind is not None:
            kwargs["enable_thinking"] = kwargs["thinking"] = kind != "disabled"
        if effort is not None:
            if not isinstance(effort, str):
                raise _wrong("output_config.effort", effort, "be the name of an effort")
            kwargs["reasoning_effort"] = effort
        return {**kwargs, **(self.chat_template_kwargs or {})} or self.chat_template_kwargs

    def shows_thinking(self) -> bool:
        """Whether the thinking is part of the answer."""
        display = (self.thinking or {}).get("display")
        if display not in (None, "summarized", "omitted"):
            raise _wrong("thinking.display", display, "be summarized or omitted")
        return display != "omitted"

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
        if self.thinking is not None and kind not in _THINKING:
            raise _wrong("thinking.type", kind, f"be one of {', '.join(_THINKING)}")
        return kind


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Int


def _chat_tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None):
        raise _wrong(f"{at}.type", tool["type"], "be 'custom'; other tools are not served here")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
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
        if kind == "text" or (kind in _READ and role == "user"):
            texts.append(_text_of(block, where))
        elif kind == "tool_result" and role == "user":
            text = _content_text(block.get("content") or "", f"{where}.content")
            if not text and block.get("is_error"):
                text = "The tool failed and said nothing."
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text})
        elif kind == "tool_use" and role == "assistant":
            calls.append(_chat_call(block, where))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking") or ""))
        elif role != "assistant" or not _is_passed_over(kind):
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


def _is_passed_over(kind: Any) -> bool:
    """Blocks of an earlier answer that only the server that made them can read: hidden thoughts, and tools that it ran
    by itself."""
    return isinstance(kind, str) and (
        kind in ("redacted_thinking", "server_tool_use", "mcp_tool_use") or kind.endswith("_tool_result")
    )


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Adds a message; consecutive ones of the user or of the assistant are one turn."""
    last = messages[-1] if messages else {}
    if message["role"] not in ("user", "assistant") or last.get("role") != message["role"]:
        messages.append(message)
        return
    for key in ("content", "reasoning_content"):
        texts = [each[key] for each in (last, message) if each.get(key)]
        if texts or key in last:
            last[key] = "\n\n".join(texts)
    if message.get("tool_calls"):
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]


def _chat_call(block: dict[str, Any], at: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str):
        raise _wrong(f"{at}.name", block.get("name"), "be the name of a tool")
    arguments = block.get("input")
    function = {"name": block["name"], "arguments": {} if arguments is None else arguments}
    return {"id": str(block.get("id")), "type": "function", "function": function}


def _system_text(system: Any) -> str:
    """The system prompt, without what differs in each request and would keep the prefix cache from finding anything."""
    if isinstance(system, str):
        return system.partition("\n")[2] if system.startswith(_BILLING) else system
    texts = [_text_of(block, f"system[{index}]", ("text",)) for index, block in enumerate(system)]
    return "\n\n".join(text for text in texts if not text.startswith(_BILLING))


_READ = ("document", "search_result")
"""Blocks beside text whose text is read."""


def _content_text(value: Any, at: str) -> str:
    """Text, or the text of a list of blocks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(at, value, "be text or a list of blocks")
    return "".join(_text_of(block, f"{at}[{index}]") for index, block in enumerate(value))


def _text_of(block: Any, at: str, kinds: Sequence[str] = ("text", *_READ)) -> str:
    """The text of one block. Documents and search results stand under their titles, with a blank line behind."""
    kind = block.get("type", "text") if isinstance(block, dict) else None
    if kind not in kinds:
        raise RequestError(
            f"{at} is of type {reprlib.repr(kind)}; this model reads text only: send blocks of type {', '.join(kinds)}",
            param=at,
            code="unsupported_content_type",
        )
    if kind == "text":
        if not isinstance(block.get("text"), str):
            raise _wrong(f"{at}.text", block.get("text"), "be text")
        return str(block["text"])
    if kind == "document":
        heads, content = ("title", "context"), _document_text(block.get("source"), f"{at}.source")
    else:
        heads, content = ("title", "source"), _content_text(block.get("content"), f"{at}.content")
    lines = [str(block[head]) for head in heads if block.get(head)]
    return "\n".join([*lines, content]) + "\n\n"


def _document_text(source: Any, at: str) -> str:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    if kind == "content":
        return _content_text(source.get("content"), f"{at}.content")
    raise RequestError(
        f"{at} must be of type text with data, or of type content; files and PDF are not read here, got "
        f"{reprlib.repr(kind)}",
        param=at,
        code="unsupported_content_type",
    )


def _wrong(param: str, value: Any, must: str) -> RequestError:
    return RequestError(f"{param} must {must}, got {reprlib.repr(value)}", param=param)
