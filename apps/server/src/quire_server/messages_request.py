"""The body of Anthropic's Messages API, and what it means as a turn.

Source of the shapes: Anthropic's public API reference. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from pydantic import Field

from quire_interfaces import RequestError, wrong_value
from quire_server.messages_blocks import chat_messages, found_tools
from quire_server.messages_tools import deferred_tools, messages_client_tools
from quire_server.protocol import SamplingFields, check_thinking_budget
from quire_server.request_fields import Int, Messages, Objects, Texts, Tools
from quire_server.tool_choice import ToolUse, check_required, named

__all__ = ["CountTokensRequest", "MessagesRequest"]

_THINKING = ("enabled", "disabled", "adaptive", "between_tools")


class CountTokensRequest(SamplingFields):
    """Body of POST /v1/messages/count_tokens: everything that makes the prompt."""

    messages: Messages = Field(min_length=1)
    system: str | Objects | None = None
    tools: Tools | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: Int | None = None
    stop_sequences: Texts | None = None

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
                raise wrong_value(self._form_name, form, "be an object with the type json_schema and a schema")
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

    def chat_messages(self, modalities: Collection[str] = ()) -> list[dict[str, Any]]:
        """The conversation in the chat API's form.

        Args:
            modalities: What the model takes beside text.

        Raises:
            RequestError: naming the block at fault.
        """
        definitions = {tool["name"]: tool for tool in self.tools or () if isinstance(tool.get("name"), str)}
        return chat_messages(self.system or "", self.messages, definitions, modalities)

    def prefills(self, messages: list[dict[str, Any]]) -> bool:
        """Whether the conversation ends inside the answer, which the model then goes on with."""
        last = messages[-1]
        return last["role"] == "assistant" and bool(last.get("content")) and not last.get("tool_calls")

    def tool_use(self) -> ToolUse:
        """What `tools` and `tool_choice` mean. Raises RequestError naming the field at fault."""
        offered, choice = messages_client_tools(self.tools or ()), self.tool_choice
        unknown, described = deferred_tools(self.tools or (), *found_tools(self.messages))
        name = choice.get("name") if choice is not None and choice.get("type") == "tool" else None
        forced = {name} if isinstance(name, str) else set()
        use = ToolUse.of(offered).without(unknown - forced, unshown=described - forced)
        if choice is None:
            return use
        use = replace(use, parallel=choice.get("disable_parallel_tool_use") is not True)
        kind = choice.get("type")
        if kind == "tool":
            return named(use, choice.get("name"), "tool_choice.name")
        modes = {"auto": "auto", "any": "required", "none": "none"}
        if not isinstance(kind, str) or kind not in modes:
            raise wrong_value("tool_choice.type", kind, "be auto, any, tool or none")
        use = replace(use, mode=modes[kind])
        check_required(use, kind)
        return use

    def template_kwargs(self) -> dict[str, Any] | None:
        """`chat_template_kwargs`, with what `thinking` and `output_config.effort` mean to templates."""
        kwargs: dict[str, Any] = {}
        kind, effort = self._thinking_kind(), (self.output_config or {}).get("effort")
        if kind is not None:
            kwargs["enable_thinking"] = kwargs["thinking"] = kind != "disabled"
        if effort is not None:
            if not isinstance(effort, str):
                raise wrong_value("output_config.effort", effort, "be the name of an effort")
            if kind != "disabled":
                kwargs["reasoning_effort"] = effort
        return {**kwargs, **(self.chat_template_kwargs or {})} or self.chat_template_kwargs

    def shows_thinking(self) -> bool:
        """Whether the thinking is part of the answer."""
        display = (self.thinking or {}).get("display")
        if display not in (None, "summarized", "updates", "omitted"):
            raise wrong_value("thinking.display", display, "be summarized, updates or omitted")
        return display != "omitted"

    def thinking_budget(self) -> int | None:
        """Most tokens of thinking."""
        if self._thinking_kind() != "enabled" or self.thinking is None:
            return None
        budget = self.thinking.get("budget_tokens")
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
            raise wrong_value("thinking.budget_tokens", budget, "be a whole number")
        check_thinking_budget(budget, "thinking.budget_tokens")
        return budget

    def _thinking_kind(self) -> str | None:
        kind = (self.thinking or {}).get("type")
        if self.thinking is not None and kind not in _THINKING:
            raise wrong_value("thinking.type", kind, f"be one of {', '.join(_THINKING)}")
        return kind


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Int
