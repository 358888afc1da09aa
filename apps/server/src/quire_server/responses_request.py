"""The body of OpenAI's Responses API.

Items are the one model of what was said: input, output and what is kept are lists of them; a prompt is made of their
projection onto chat messages (responses_items.py). Source of the shapes: OpenAI's public API reference. Knows no engine
and no store.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from quire_interfaces import RequestError, wrong_value
from quire_server.protocol import SamplingFields, ThinkingTokenBudget, with_effort
from quire_server.request_fields import MAX_MESSAGES, Int, Objects, Texts, Tools, at_most

__all__ = ["CompactRequest", "ResponsesRequest", "with_ids"]

_ID_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs", "compaction": "cmp",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip

_FORMAT_NAMES = {"response_format.json_schema.schema": "text.format.schema", "response_format": "text.format"}


class CompactRequest(SamplingFields):
    """Body of POST /v1/responses/compact: everything that makes the conversation."""

    input: Annotated[str | Objects, at_most(MAX_MESSAGES)] | None = None
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

    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: Texts | None = None
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
    thinking_token_budget: ThinkingTokenBudget = None

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
        names = {key: _FORMAT_NAMES.get(name, name) for key, name in super().field_names().items()}
        return {**names, **_FORMAT_NAMES}

    def logprobs_wanted(self) -> int | None:
        is_included = "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if is_included or self.top_logprobs else None

    @property
    def compact_threshold(self) -> int | None:
        """Tokens of a prompt above which the conversation is compacted first; None for never.

        Raises:
            RequestError: `context_management` is no list of compactions.
        """
        strategies = self.context_management
        if strategies is None:
            return None
        if not isinstance(strategies, list) or not all(isinstance(each, dict) for each in strategies):
            raise wrong_value("context_management", strategies, "be a list of objects")
        for index, each in enumerate(strategies):
            threshold, at = each.get("compact_threshold"), f"context_management[{index}]"
            if each.get("type") != "compaction":
                raise wrong_value(f"{at}.type", each.get("type"), "be compaction")
            if threshold is not None:
                if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 1:
                    raise wrong_value(f"{at}.compact_threshold", threshold, "be a number of tokens")
                return threshold
        return None

    @property
    def seals_thoughts(self) -> bool:
        """Whether the thoughts are wanted in a form that the client can send back."""
        return "reasoning.encrypted_content" in (self.include or ())

    def check_supported(self) -> None:
        super().check_supported()
        if self.prompt is not None:
            raise RequestError("prompt is not served here; put the prompt's text into instructions", param="prompt")
        if self.conversation is not None and self.previous_response_id is not None:
            raise RequestError(
                "conversation and previous_response_id exclude each other: what was said before is in one of them",
                param="previous_response_id",
            )
        if self.background and self.store is False:
            raise RequestError(
                "background can only be used when `store` is true: leave store out, or set it to true",
                param="background",
            )
        if self.truncation not in (None, "disabled", "auto"):
            raise wrong_value("truncation", self.truncation, "be auto or disabled")

    @property
    def conversation_id(self) -> str | None:
        name = self.conversation.get("id") if isinstance(self.conversation, dict) else self.conversation
        if self.conversation is not None and not (isinstance(name, str) and name):
            raise wrong_value("conversation", self.conversation, "be the id of a conversation, or an object with it")
        return name

    def template_kwargs(self) -> dict[str, Any] | None:
        """`chat_template_kwargs`, with what `reasoning.effort` means to templates."""
        effort = (self.reasoning or {}).get("effort")
        if effort is not None and not isinstance(effort, str):
            raise wrong_value("reasoning.effort", effort, "be text")
        return with_effort(self.chat_template_kwargs, effort)


def _response_format(form: Any) -> dict[str, Any]:
    """`text.format` as chat completions spell it."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind == "json_schema":
        return {"type": kind, kind: {key: value for key, value in form.items() if key != "type"}}
    raise wrong_value("text.format.type", kind, "be text, json_object or json_schema")


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
